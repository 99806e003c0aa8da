"""Blocks handed out and taken back by an allocator that names no request: a healthy one is never blamed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.canary import Canary, ForwardStep, GroupStep, Kind, KVGroup, KVLayout
from kvcanary_agent.canary.occupancy import Occupancy
from kvcanary_agent.settings import Settings
from tests.canary.toy import RecordingSink, token_major

BLOCKS = 8


def occupancy() -> Occupancy:
    return Occupancy(BLOCKS, 0, torch.device("cpu"))


def blocks(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


@settings(deadline=None)
@given(st.data())
def test_a_healthy_allocator_is_never_blamed_and_its_blocks_are_mirrored(data: st.DataObject) -> None:
    mirror, free, used = occupancy(), set(range(1, BLOCKS)), set[int]()
    mirror.all_returned()
    for _ in range(data.draw(st.integers(0, 12))):
        source, target = (free, used) if data.draw(st.booleans()) else (used, free)
        moved = data.draw(st.lists(st.sampled_from(sorted(source)), unique=True)) if source else []
        act = mirror.taken if source is free else mirror.returned
        assert not act(blocks(*moved, -1)).any()
        source -= set(moved)
        target |= set(moved)
    assert set(mirror.held[0].nonzero().flatten().tolist()) == used


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        pytest.param((3, 4), [False, True], id="in_use"),
        pytest.param((3, 3), [False, True], id="twice_at_once"),
        pytest.param((0, 3), [True, False], id="null_block"),
        pytest.param((-1, -1), [False, False], id="none"),
    ],
)
def test_what_must_not_be_handed_out(numbers: tuple[int, ...], wrong: list[bool]) -> None:
    mirror = occupancy()
    mirror.all_returned()
    mirror.taken(blocks(4))

    assert mirror.taken(blocks(*numbers)).tolist() == wrong


def test_what_is_free_must_not_be_freed() -> None:
    mirror = occupancy()
    mirror.taken(blocks(3, 4))

    assert mirror.returned(blocks(3, 4, 4, -1)).tolist() == [False, False, True, False]
    assert mirror.returned(blocks(3)).tolist() == [True]


def test_nothing_is_said_about_blocks_of_before_the_first_event() -> None:
    mirror = occupancy()

    assert not mirror.taken(blocks(3)).any()
    assert not mirror.returned(blocks(4)).any()
    assert mirror.held.sum() == BLOCKS - 1


class Watched:
    """A canary over blocks of one slot, and the steps of requests that use them."""

    def __init__(self) -> None:
        self.sink = RecordingSink()
        self._group: KVGroup = token_major(BLOCKS, 1, null_block=0)[0]
        layout = KVLayout(engine="toy", groups=(self._group,), reports_occupancy=True)
        self.canary = Canary(layout, Settings(content="full"), self.sink)
        self.canary.all_returned()

    def compute(self, request: str, prefix: list[int], new: list[int]) -> None:
        """One step of one request: it reads the slots of its prefix and fills new ones; tokens are the slots."""
        step = ForwardStep(
            requests=[request],
            prefix_lens=blocks(len(prefix)),
            query_offsets=blocks(0, len(new)),
            token_ids=blocks(*new),
            positions=torch.arange(len(prefix), len(prefix) + len(new)),
            groups=[GroupStep(block_table=blocks(*prefix, *new)[None], write_slots=blocks(*new))],
        )
        self.canary.before_forward(step)
        for part in self._group.parts:
            part.view[new] = torch.randn_like(part.view[new])
        self.canary.after_forward()


def test_a_block_freed_under_a_request_is_reported_when_it_is_read() -> None:
    watched = Watched()
    watched.canary.taken(blocks(1, 2, 3))
    watched.compute("a", [], [1, 2])
    watched.canary.returned(blocks(1))

    watched.compute("a", [1, 2], [3])

    (violation,) = watched.sink.violations
    assert (violation.kind, violation.slot, violation.request) == (Kind.OWNERSHIP, 1, "a")
    assert violation.held is False


def test_a_write_to_a_free_block_is_reported() -> None:
    watched = Watched()
    watched.canary.taken(blocks(1))

    watched.compute("a", [], [1, 2])

    (violation,) = watched.sink.violations
    assert (violation.kind, violation.slot) == (Kind.OWNERSHIP, 2)


def test_a_block_handed_out_twice_is_reported_with_who_wrote_it() -> None:
    watched = Watched()
    watched.canary.taken(blocks(1, 2))
    watched.compute("a", [], [1, 2])

    watched.canary.taken(blocks(2))

    (violation,) = watched.sink.violations
    assert (violation.kind, violation.slot, violation.writer) == (Kind.OWNERSHIP, 2, "a")
    assert "double allocation" in violation.detail


def test_after_the_allocator_started_anew_nothing_of_before_may_be_read() -> None:
    watched = Watched()
    watched.canary.taken(blocks(1, 2))
    watched.compute("a", [], [1])
    watched.canary.all_returned()
    watched.canary.taken(blocks(1, 2))

    watched.compute("a", [1], [2])

    assert watched.sink.kinds() == [Kind.UNWRITTEN]


def test_an_index_that_holds_what_was_written_is_not_reported() -> None:
    watched = Watched()
    watched.canary.taken(blocks(1, 2, 3, 4))
    watched.compute("a", [], [1, 2, 3])
    watched.compute("b", [1, 2], [4])

    watched.canary.walked_index(blocks(1, 2, 3, 4), blocks(0, 1, 2, 2), blocks(-1, 1, 2, 2))

    assert watched.sink.violations == []


@pytest.mark.parametrize(
    ("slots", "positions", "previous", "broken"),
    [
        pytest.param((2, 1, 3), (0, 1, 2), (-1, 2, 1), {1, 2, 3}, id="order"),
        pytest.param((1, 2, 5), (0, 1, 2), (-1, 1, 2), {5}, id="unwritten"),
        pytest.param((1, 4, 3), (0, 1, 2), (-1, 1, 4), {4, 3}, id="another_prefix"),
    ],
)
def test_an_index_that_holds_something_else_is_reported_once(
    slots: tuple[int, ...], positions: tuple[int, ...], previous: tuple[int, ...], broken: set[int]
) -> None:
    watched = Watched()
    watched.canary.taken(blocks(1, 2, 3, 4, 5, 6))
    watched.compute("a", [], [1, 2, 3])
    watched.compute("b", [], [6, 4])

    for _ in range(2):
        watched.canary.walked_index(blocks(*slots), blocks(*positions), blocks(*previous))

    assert {violation.kind for violation in watched.sink.violations} == {Kind.INDEX}
    assert [violation.slot for violation in watched.sink.violations] == sorted(
        broken, key=lambda slot: slots.index(slot)
    )
