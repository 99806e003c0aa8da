"""Through the canary itself: whatever bytes change, they are looked at within the documented number of steps."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.canary import KVGroup, KVPart
from tests.canary.toy import Row, ToyEngine

BLOCKS, SIZE = 60, 2


def pool_of(parts: int) -> Any:
    """A maker of a pool with so many parts of eight bytes a slot."""

    def make(blocks: int, size: int, **group: Any) -> tuple[KVGroup, ...]:
        data = torch.zeros(parts, blocks, size, 2)
        named = tuple(KVPart(layer=f"layers.{part}", part="k", view=data[part]) for part in range(parts))
        return (KVGroup(name="full", block_size=size, parts=named, **group),)

    return make


def engine(parts: int, **canary: Any) -> ToyEngine:
    settings = {"content": "scrub", **canary}
    return ToyEngine(pool_of(parts), blocks=BLOCKS, block_size=SIZE, settings=settings)


def step(toy: ToyEngine, *names: str) -> None:
    """One step for all of these requests: new ones are prefilled, every other one decodes, the rest only read."""
    rows = []
    for number, name in enumerate(names):
        request = toy.requests[name]
        count = len(request.tokens) - request.computed
        if not count and number % 2:
            request.tokens.append(7 * len(request.tokens))
            count = 1
        missing = -(-(request.computed + count) // SIZE) - len(request.tables[0])
        if missing > 0:
            toy.allocate(name, missing)
        rows.append(Row(request=name, count=count))
    toy.step(*rows)


def recorded(toy: ToyEngine, *names: str) -> set[tuple[int, int]]:
    """Slot and part of everything that these requests have written."""
    return {
        (toy.slot(name, position), part)
        for name in names
        for position in range(toy.requests[name].computed)
        for part in range(len(toy.groups[0].parts))
    }


def corrupt(toy: ToyEngine, places: set[tuple[int, int]]) -> None:
    for slot, part in places:
        toy.poke(slot, part)


def reported(toy: ToyEngine) -> set[tuple[int, int]]:
    return {(violation.slot, int((violation.layer or "").split(".")[1])) for violation in toy.sink.violations}


@settings(deadline=None, max_examples=60)
@given(
    parts=st.integers(1, 6),
    period=st.integers(1, 13),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    joins=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=2),
    leaves=st.integers(0, 12),
    already=st.integers(0, 7),
)
def test_every_byte_that_a_running_request_reads_is_compared_within_the_scrub_period(
    parts: int, period: int, lengths: list[int], joins: list[tuple[int, int]], leaves: int, already: int
) -> None:
    toy = engine(parts, scrub_period=period)
    stays = [f"r{number}" for number in range(len(lengths))]
    for name, length in zip(stays, lengths, strict=True):
        toy.request(name, range(10, 10 + length))
    toy.request("leaves", range(40, 43))
    running = [*stays, "leaves"]
    for _ in range(already + 1):
        step(toy, *running)
    assert toy.sink.violations == []
    places = recorded(toy, *stays)
    corrupt(toy, places)
    for number in range(period):
        if leaves == number:
            running.remove("leaves")
            toy.free("leaves", recycle=False)
        for at, (when, length) in enumerate(joins):
            if when == number:
                toy.request(f"join{at}", range(80, 80 + length))
                running.append(f"join{at}")
        step(toy, *running)
    assert reported(toy) == places


@settings(deadline=None, max_examples=60)
@given(parts=st.integers(1, 5), rate=st.integers(1, 12), already=st.integers(0, 30))
def test_every_byte_of_an_idle_block_is_patrolled_within_a_round(parts: int, rate: int, already: int) -> None:
    toy = engine(parts, scrub_period=4, sweep_slots_per_step=rate)
    toy.request("idle", range(10, 17))
    toy.request("busy", range(50, 53))
    step(toy, "busy", "idle")
    for _ in range(already):
        step(toy, "busy")
    assert toy.sink.violations == []
    places = recorded(toy, "idle")
    corrupt(toy, places)
    for _ in range(parts * -(-BLOCKS // max(1, rate * parts // SIZE))):
        step(toy, "busy")
    assert reported(toy) == places
    assert all(violation.request is None for violation in toy.sink.violations)
