"""What a step may do on a GPU: few launches, no new memory, and never a wait. The CPU stands for one here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcanary_agent.canary import Kind
from kvcanary_agent.kernels.triton import TritonChecks
from kvcanary_agent.settings import Content
from tests.canary.toy import Row, ToyEngine
from tests.kernels.histories import checks_by
from tests.kernels.interpreted.device import WaitedForTheDevice, Watch, a_device

BEFORE = {"check_writes_kernel": 1, "enter_writes_kernel": 1, "verify_reads_kernel": 1, "verify_content_kernel": 1}
BEFORE_FULL = {
    "check_writes_kernel": 1,
    "enter_measured_writes_kernel": 1,
    "verify_reads_kernel": 1,
    "verify_content_kernel": 1,
}
AFTER = {"record_content_kernel": 1, "check_null_block_kernel": 1, "verify_blocks_kernel": 1}


@pytest.fixture
def watching() -> Iterator[Callable[[], Any]]:
    with a_device() as watching, checks_by(TritonChecks):
        yield watching


def engine(layout: str = "token_major", content: Content = "scrub") -> ToyEngine:
    settings = {"content": content, "scrub_period": 3, "sweep_slots_per_step": 2}
    toy = ToyEngine(layout, blocks=30, settings=settings, null_block=0)
    toy.start("a", range(10, 19), blocks=5)
    toy.start("b", range(30, 35), blocks=4)
    return toy


def rows_of(toy: ToyEngine, count: int) -> list[Row]:
    for request in toy.requests.values():
        request.tokens += range(count)
    return [Row(request=name, count=count) for name in toy.requests]


def watched_step(toy: ToyEngine, watching: Callable[[], Any], *rows: Row) -> tuple[Watch, Watch]:
    """What happens before and after the forward of a step."""
    step, writes = toy.plan(*rows, pad_slots=[-1, 0])
    with watching() as before:
        toy.canary.before_forward(step)
    toy.forward(writes)
    for row in rows:
        toy.requests[row.request].computed += row.count
    with watching() as after:
        toy.canary.after_forward()
    return before, after


def times(launches: dict[str, int], groups: int) -> dict[str, int]:
    return {name: count * groups for name, count in launches.items()}


@pytest.mark.parametrize(
    ("layout", "content", "before_forward"),
    [("token_major", "scrub", BEFORE), ("two_groups_over_one_storage", "full", BEFORE_FULL)],
)
def test_a_step_launches_four_kernels_before_and_three_after_it_for_each_group_and_allocates_nothing(
    watching: Callable[[], Any], layout: str, content: Content, before_forward: dict[str, int]
) -> None:
    toy = engine(layout, content)
    watched_step(toy, watching, *rows_of(toy, 1))
    # A decode, and a prefill.
    for count in (1, 3):
        before, after = watched_step(toy, watching, *rows_of(toy, count))
        assert before.kernels == times(before_forward, len(toy.groups))
        assert after.kernels == times(AFTER, len(toy.groups))
        for watch, passes in ((before, 1), (after, 2)):
            assert watch.operations == {}
            assert watch.allocations == {}
            assert watch.copies == passes
    assert toy.sink.violations == []


def test_a_batch_of_other_requests_costs_two_copies_and_one_conversion_more(watching: Callable[[], Any]) -> None:
    toy = engine()
    rows = rows_of(toy, 1)
    watched_step(toy, watching, *rows)
    before, after = watched_step(toy, watching, *reversed(rows_of(toy, 1)))
    assert before.kernels == BEFORE
    assert before.operations == {"_to_copy": 1}
    assert before.copies == 3
    assert after.operations == {}


def test_events_of_a_step_reach_the_device_in_one_copy(watching: Callable[[], Any]) -> None:
    toy = engine("two_groups_over_one_storage")
    watched_step(toy, watching, *rows_of(toy, 1))
    with watching() as events:
        toy.allocate("a", 2)
        toy.allocate("b", 1)
        toy.canary.freed([toy.requests["b"].tables[0].pop()], group=0, request="b")
    assert (events.copies, events.operations, events.kernels) == (0, {}, {})
    before, _ = watched_step(toy, watching, *rows_of(toy, 1))
    assert before.copies == 2


def test_no_event_and_no_step_waits_for_the_device(watching: Callable[[], Any]) -> None:
    toy = engine()
    canary = toy.canary
    table = toy.requests["a"].tables[0]
    blocks = torch.tensor([27, -1])
    with watching():
        canary.indexed(range(10, 14), table[0])
        canary.indexed(range(10, 18), table[1])
        toy.request("c", [*range(10, 18), 1, 2])
        toy.share("c", "a", 2)
        toy.allocate("c", 2)
        canary.copied([table[0]], [29])
        canary.stored("key", table[:2])
        canary.loaded("key", table[:2], request="a")
        canary.loaded("unknown", [28], request="a")
        canary.rolled_back("a", 9)
        canary.weights_changed()
        canary.returned(blocks)
        canary.taken(blocks)
    watched_step(toy, watching, *rows_of(toy, 1))
    step, _ = toy.plan(*rows_of(toy, 1))
    with watching():
        canary.before_forward(step)
        canary.abandon_step()
        toy.free("b", cached=True)
        toy.free("c")
        canary.sweep()
        for number in range(30):
            canary.stored(number, table)
        canary.loaded(0, table)
        canary.reset()
    # Nor does it when there is something to report: K/V of the weights before.
    assert Kind.EPOCH in toy.sink.kinds()


def test_looking_at_a_tensor_of_the_device_is_noticed(watching: Callable[[], Any]) -> None:
    tensor = torch.arange(3)
    for look in (
        lambda: bool(tensor[0]),
        lambda: tensor[tensor > 1],
        lambda: tensor.tolist(),
        lambda: int(tensor.sum()),
        lambda: torch.tensor([1]),
        lambda: tensor.nonzero(),
        lambda: tensor.repeat_interleave(tensor),
    ):
        with pytest.raises(WaitedForTheDevice), watching():
            look()


def test_what_is_found_is_reported_one_look_later(watching: Callable[[], Any]) -> None:
    toy = engine(content="full")
    toy.poke(toy.slot("a", 2), 1)
    toy.canary.indexed([10, 11, 12, 99], toy.requests["a"].tables[0][0])
    toy.step(*rows_of(toy, 1))
    toy.step(*rows_of(toy, 1))
    assert [(v.kind, v.request, v.position) for v in toy.sink.violations if v.kind is Kind.CONTENT and v.request] == [
        (Kind.CONTENT, "a", 2)
    ]
    assert [(v.kind, v.block, v.writer) for v in toy.sink.violations if v.kind is Kind.INDEX] == [
        (Kind.INDEX, toy.requests["a"].tables[0][0], "a")
    ]
