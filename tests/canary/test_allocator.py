"""The canary of an allocator: every misuse is named at once, with both requests; healthy acts are never blamed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcanary_agent.canary.allocator import AllocatorCanary, AllocatorLayout
from kvcanary_agent.canary.violation import CheckCounts, Kind, KVCanaryError, Sink, Violation
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry.diagnosis import diagnose
from kvcanary_agent.telemetry.diagnosis.burst import Burst

BLOCKS = 8


class Heard(Sink):
    """What an allocator's canary has said."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.passes: list[tuple[int, dict[str, tuple[int, int]]]] = []
        self.flushed = 0

    def violation(self, violation: Violation) -> None:
        self.violations.append(violation)

    def pass_finished(
        self, phase: str, step: int, start_ns: int, end_ns: int, counts: CheckCounts, violations: tuple[Violation, ...]
    ) -> None:
        self.passes.append((step, counts.slots))

    def flush(self) -> None:
        self.flushed += 1


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def canary(heard: Heard) -> AllocatorCanary:
    return new_canary(heard)


def new_canary(heard: Heard, **changed: Any) -> AllocatorCanary:
    layout = AllocatorLayout(engine="toy", num_blocks=BLOCKS, block_size=4, null_block=0)
    return AllocatorCanary(layout, Settings(**changed), heard)


def only(heard: Heard) -> Violation:
    (violation,) = heard.violations
    return violation


def test_a_block_handed_out_twice_names_both_requests_and_the_cause(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3], "a")
    canary.allocated([3], "b")

    found = only(heard)
    assert (found.kind, found.block, found.slot, found.request, found.writer) == (Kind.OWNERSHIP, 3, 12, "b", "a")
    assert found.block_history == ("a", "b")
    assert diagnose(found, Burst([found])).cause == "double_allocation"


def test_the_null_block_is_never_handed_out(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([0], "a")

    assert "null block" in only(heard).detail


def test_a_fresh_block_has_one_reference_and_no_entry_in_the_prefix_index(
    canary: AllocatorCanary, heard: Heard
) -> None:
    canary.allocated([2, 3], "a", counts=[1, 2], indexed=[True, False])

    assert [(found.kind, found.block) for found in heard.violations] == [(Kind.INDEX, 2), (Kind.OWNERSHIP, 3)]


@pytest.mark.parametrize("again", ["a", "b", None], ids=["by_itself", "by_another", "on_nobodys_behalf"])
def test_a_second_free_is_a_double_free(canary: AllocatorCanary, heard: Heard, again: str | None) -> None:
    canary.allocated([3], "a")
    canary.freed([3], "a")
    canary.freed([3], again, counts=[-1])

    found = only(heard)
    assert (found.kind, found.request, found.writer) == (Kind.OWNERSHIP, again, "a")
    assert diagnose(found, Burst([found])).cause == "double_free"


def test_a_reference_that_a_request_has_not_given_back_is_freed_by_nobody_else(
    canary: AllocatorCanary, heard: Heard
) -> None:
    canary.allocated([3], "a")
    canary.freed([3], None, counts=[0])
    canary.audit(3, counts=[0], free=[True])

    assert "a did not give it back" in only(heard).detail


def test_a_block_is_given_up_first_and_freed_later(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3], "a")
    canary.given_up([3], "a")
    canary.freed([3], None, counts=[0])
    canary.allocated([3], "b", counts=[1])

    assert heard.violations == []


def test_what_is_free_and_not_cached_is_not_shared(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3, 4], "a")
    canary.freed([3, 4], "a", indexed=[False, True])
    canary.shared([4], "b")
    assert heard.violations == []
    canary.shared([3], "b")

    assert (only(heard).block, only(heard).request, only(heard).writer) == (3, "b", "a")


def test_after_the_index_is_reset_nothing_free_is_shared(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3], "a")
    canary.freed([3], "a", indexed=[True])
    canary.index_reset()
    canary.shared([3], "b")

    assert only(heard).block == 3


def test_a_block_that_is_still_written_is_not_shared(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3], "a")
    canary.shared([3], "b", counts=[2], indexed=[False])

    assert "may still be written" in only(heard).detail


def test_a_reference_that_the_allocator_did_not_count_is_seen(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3], "a", counts=[1])
    canary.shared([3], "b", counts=[1])
    canary.audit(3, counts=[1], free=[False])

    assert (only(heard).request, only(heard).writer) == ("b", "a")


def test_a_table_holds_what_it_has(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3], "a")
    canary.in_table([3], "a")
    assert heard.violations == []
    canary.in_table([3], "b")

    assert (only(heard).request, only(heard).writer) == ("b", "a")


def test_the_index_takes_only_what_the_request_holds(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3], "a")
    canary.indexed([3], "a")
    assert heard.violations == []
    canary.indexed([3], "b")

    assert only(heard).kind is Kind.INDEX


def test_an_audit_finds_held_blocks_among_the_free_and_blocks_that_are_missing(
    canary: AllocatorCanary, heard: Heard
) -> None:
    canary.allocated([3], "a")
    for _ in range(2):
        canary.audit(2, counts=[0, 1], free=[True, True])
        canary.balance(BLOCKS - 1)

    assert [(found.block, found.request) for found in heard.violations] == [(3, "a"), (-1, None)]


def test_raise_mode_fails_the_step_that_is_being_scheduled_and_no_other(heard: Heard) -> None:
    canary = new_canary(heard, mode="raise")
    canary.allocated([3], "a")
    canary.step_finished()
    canary.allocated([3], "b")
    with pytest.raises(KVCanaryError) as raised:
        canary.step_finished()
    canary.step_finished()

    assert [found.step for found in raised.value.violations] == [2]
    assert heard.flushed == 1


def test_checks_are_counted(canary: AllocatorCanary, heard: Heard) -> None:
    canary.allocated([3, 4], "a")
    canary.allocated([4], "b")
    canary.step_finished()

    assert heard.passes == [(1, {"allocator": (3, 1)})]


class HealthyAllocator(RuleBasedStateMachine):
    """An allocator that does nothing wrong, with pins, deferred frees and a prefix index, is never blamed."""

    @initialize()
    def start(self) -> None:
        self.heard = Heard()
        self.canary = new_canary(self.heard)
        self.free = list(range(1, BLOCKS))
        self.tables: dict[str, list[int]] = {}
        self.loose: list[int] = []
        self.index: set[int] = set()
        self.counts: Counter[int] = Counter()
        self.named = 0

    def facts(self, blocks: list[int]) -> dict[str, list[Any]]:
        return {"counts": [self.counts[b] for b in blocks], "indexed": [b in self.index for b in blocks]}

    @rule(count=st.integers(1, 3), at=st.integers(0, 9))
    def allocate(self, count: int, at: int) -> None:
        if count > len(self.free):
            return
        if not self.tables or at > 6:
            self.named += 1
            self.tables[f"r{self.named}"] = []
        request = sorted(self.tables)[at % len(self.tables)]
        blocks = [self.free.pop(0) for _ in range(count)]
        self.index -= set(blocks)
        self.counts.update(blocks)
        self.tables[request] += blocks
        self.canary.allocated(blocks, request, **self.facts(blocks))
        self.canary.in_table(self.tables[request], request)

    @precondition(lambda self: self.tables)
    @rule(at=st.integers(0, 9))
    def enter_into_index(self, at: int) -> None:
        request = sorted(self.tables)[at % len(self.tables)]
        self.index |= set(self.tables[request])
        self.canary.indexed(self.tables[request], request)

    @precondition(lambda self: self.index)
    @rule(at=st.integers(0, 9), pin=st.booleans())
    def hit(self, at: int, pin: bool) -> None:
        block = sorted(self.index)[at % len(self.index)]
        if block in self.free:
            self.free.remove(block)
        self.counts[block] += 1
        if pin:
            self.loose.append(block)
            self.canary.shared([block], None, **self.facts([block]))
            return
        self.named += 1
        self.tables[f"r{self.named}"] = [block]
        self.canary.shared([block], f"r{self.named}", **self.facts([block]))

    @precondition(lambda self: self.tables)
    @rule(at=st.integers(0, 9), later=st.booleans())
    def end(self, at: int, later: bool) -> None:
        request = sorted(self.tables)[at % len(self.tables)]
        blocks = self.tables.pop(request)
        if later:
            self.loose += blocks
            self.canary.given_up(blocks, request)
        else:
            self.give_back(blocks, request)

    @precondition(lambda self: self.loose)
    @rule()
    def free_what_is_loose(self) -> None:
        self.give_back([self.loose.pop()], None)

    def give_back(self, blocks: list[int], request: str | None) -> None:
        self.counts.subtract(blocks)
        self.free += [block for block in blocks if not self.counts[block]]
        self.canary.freed(blocks, request, **self.facts(blocks))

    @precondition(lambda self: not self.tables and not self.loose)
    @rule()
    def reset(self) -> None:
        self.index.clear()
        self.canary.index_reset()

    @rule()
    def finish_step(self) -> None:
        every = range(1, BLOCKS)
        self.canary.audit(1, [self.counts[b] for b in every], [b in self.free for b in every])
        self.canary.balance(len(self.free))
        self.canary.step_finished()
        assert self.heard.violations == []


TestHealthyAllocator = HealthyAllocator.TestCase
TestHealthyAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
