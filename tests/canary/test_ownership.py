"""Who holds which block: healthy allocators are never blamed, unhealthy ones always, and the device mirrors agree."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcanary_agent.canary.ownership import Misuse, Ownership

CPU = torch.device("cpu")
BLOCKS = 8


def ownership(null_block: int | None = 0) -> Ownership:
    return Ownership(BLOCKS, null_block, CPU)


def holds(owner: Ownership, request: str) -> set[int] | None:
    """The blocks that the device's mirror says the request holds; None if the mirror knows nothing of it."""
    (row,) = owner.rows([request])
    owner.settle()
    return None if row < 0 else set(owner.held[row].nonzero().flatten().tolist())


# Each kind of misuse


def test_handing_out_a_held_block_is_a_double_allocation_that_names_both() -> None:
    owner = ownership()
    owner.allocated([3], "a")
    (misuse,) = owner.allocated([3], "b")
    assert (misuse.block, misuse.request, misuse.other) == (3, "b", "a")
    assert "double allocation" in misuse.detail
    assert holds(owner, "a") == set()
    assert holds(owner, "b") == {3}
    owner.settle()
    assert owner.references[3] == 1


def test_a_block_twice_in_one_allocation_is_a_double_allocation() -> None:
    (misuse,) = ownership().allocated([3, 3], "a")
    assert (misuse.block, misuse.request, misuse.other) == (3, "a", "a")


def test_handing_out_the_null_block_is_reported() -> None:
    (misuse,) = ownership(null_block=2).allocated([1, 2], "a")
    assert misuse.block == 2
    assert "null block" in misuse.detail


def test_a_pool_without_a_null_block_may_hand_out_block_0() -> None:
    assert ownership(null_block=None).allocated([0], "a") == []


def test_freeing_twice_is_reported_and_names_the_last_holder() -> None:
    owner = ownership()
    owner.allocated([3], "a")
    assert owner.freed([3], "a", False) == []
    (misuse,) = owner.freed([3], "b", False)
    assert (misuse.block, misuse.request, misuse.other) == (3, "b", "a")
    assert "double free" in misuse.detail


def test_freeing_twice_in_one_call_is_reported() -> None:
    owner = ownership()
    owner.allocated([3], "a")
    assert [misuse.block for misuse in owner.freed([3, 3], "a", True)] == [3]


def test_an_anonymous_double_free_is_reported() -> None:
    owner = ownership()
    owner.allocated([3], None)
    owner.freed([3], None, False)
    (misuse,) = owner.freed([3], None, False)
    assert (misuse.block, misuse.request) == (3, None)


def test_freeing_what_another_request_holds_is_reported_and_changes_nothing() -> None:
    owner = ownership()
    owner.allocated([3], "a")
    (misuse,) = owner.freed([3], "b", False)
    assert (misuse.block, misuse.request, misuse.other) == (3, "b", "a")
    assert "does not hold" in misuse.detail
    assert holds(owner, "a") == {3}
    owner.settle()
    assert owner.references[3] == 1


def test_sharing_a_freed_block_that_is_not_cached_is_reported() -> None:
    owner = ownership()
    owner.allocated([3], "a")
    owner.freed([3], "a", False)
    (misuse,) = owner.shared([3], "b")
    assert (misuse.block, misuse.request, misuse.other) == (3, "b", "a")
    assert "not cached" in misuse.detail


def test_sharing_a_cached_block_is_legal_until_it_is_handed_out_again() -> None:
    owner = ownership()
    owner.allocated([3], "a")
    owner.freed([3], "a", True)
    assert owner.shared([3], "b") == []
    assert owner.freed([3], "b", True) == []
    assert owner.allocated([3], "c") == []
    assert owner.freed([3], "c", False) == []
    assert len(owner.shared([3], "d")) == 1


# What is not known is not blamed


def test_blocks_never_heard_of_may_be_freed_and_shared() -> None:
    owner = ownership()
    assert owner.freed([5], "a", False) == []
    assert owner.freed([5], None, False) == []
    assert owner.shared([6], "a") == []


def test_a_request_that_held_a_block_before_the_agent_attached_may_free_it_after_a_shared_use() -> None:
    owner = ownership()
    owner.shared([5], "new")
    assert owner.freed([5], "new", False) == []
    # The request whose blocks were handed out before the agent was there gives its own reference back.
    assert owner.freed([5], "early", False) == []


def test_a_block_held_since_before_the_agent_attached_may_be_shared_again() -> None:
    owner = ownership()
    owner.shared([5], "b")
    owner.freed([5], "b", False)
    assert owner.shared([5], "c") == []


def test_a_request_never_heard_of_has_no_row() -> None:
    owner = ownership()
    owner.allocated([1], "a")
    assert holds(owner, "stranger") is None
    assert owner.rows(["a", "stranger"])[1] == -1


def test_a_request_that_has_given_everything_back_is_known_to_hold_nothing() -> None:
    owner = ownership()
    owner.allocated([1, 2], "a")
    owner.freed([1, 2], "a", False)
    assert holds(owner, "a") == set()
    assert owner.table("a") == ()


def test_a_request_that_comes_back_holds_again() -> None:
    owner = ownership()
    owner.allocated([1], "a")
    owner.freed([1], "a", False)
    owner.allocated([2], "a")
    assert holds(owner, "a") == {2}
    assert list(owner.table("a")) == [2]


def test_history_keeps_the_last_holders_oldest_first() -> None:
    owner = ownership()
    for name in "abcdef":
        owner.allocated([1], name)
        owner.freed([1], name, False)
    assert owner.history(1) == ("c", "d", "e", "f")
    assert owner.history(7) == ()


# Rows of the mirror


def test_rows_are_reused_without_growing_or_leaking_a_block_to_the_next_request() -> None:
    owner = ownership()
    rows = owner.held.shape[0]
    for number in range(1000):
        name = f"r{number}"
        block = 1 + number % (BLOCKS - 1)
        owner.allocated([block], name)
        assert holds(owner, name) == {block}
        owner.freed([block], name, False)
    owner.settle()
    assert owner.held.shape[0] == rows
    assert not owner.held.any()


def test_rows_are_reused_when_blocks_were_given_back_without_a_name() -> None:
    owner = ownership()
    rows = owner.held.shape[0]
    for number in range(1000):
        owner.allocated([1, 2], f"r{number}")
        owner.freed([1, 2], None, False)
    owner.settle()
    assert owner.held.shape[0] == rows
    assert not owner.held.any()


def test_rows_are_reused_when_blocks_were_lost_to_a_double_allocation() -> None:
    owner = ownership()
    rows = owner.held.shape[0]
    for number in range(1000):
        assert len(owner.allocated([1], f"r{number}")) == (number > 0)
    assert owner.held.shape[0] == rows


def test_more_requests_than_rows_make_the_mirror_grow_and_lose_nothing() -> None:
    owner = Ownership(200, None, CPU)
    for number in range(200):
        owner.allocated([number], f"r{number}")
    assert all(holds(owner, f"r{number}") == {number} for number in range(200))


@pytest.mark.parametrize("grows_in_inference_mode", [True, False])
def test_the_mirror_may_grow_in_inference_mode_and_change_outside_and_the_other_way_round(
    grows_in_inference_mode: bool,
) -> None:
    owner = Ownership(100, None, CPU)
    with torch.inference_mode(grows_in_inference_mode):
        for number in range(50):
            owner.allocated([number], f"r{number}")
    with torch.inference_mode(not grows_in_inference_mode):
        assert owner.freed([49], "r49", False) == []
        assert holds(owner, "r49") == set()


# Any history against a model that is nothing but counters


class AnyHistory(RuleBasedStateMachine):
    """Events of a healthy allocator, and now and then one that its rules forbid.

    The model: which references each request has to each block (None: the anonymous ones), and which free blocks are
    cached. A history is anonymous or named as a whole, for an adapter either knows the names or does not.
    """

    requests = Bundle("requests")

    @initialize(anonymous=st.booleans())
    def begin(self, anonymous: bool) -> None:
        self.owner = ownership()
        self.anonymous = anonymous
        self.references: dict[int, Counter[str]] = {block: Counter() for block in range(1, BLOCKS)}
        self.seen: set[int] = set()
        self.cached: set[int] = set()
        self.ever_held: set[str] = set()

    def named(self, request: str) -> str | None:
        return None if self.anonymous else request

    def held_blocks(self) -> list[int]:
        return [block for block, holders in self.references.items() if holders.total()]

    def add(self, block: int, request: str) -> None:
        self.references[block][request] += 1
        self.seen.add(block)
        self.ever_held.add(request)

    @rule(target=requests, name=st.sampled_from(["a", "b", "c", "d"]))
    def arrive(self, name: str) -> str:
        return name

    @rule(request=requests, count=st.integers(1, 3))
    def allocate(self, request: str, count: int) -> None:
        held = self.held_blocks()
        blocks = [block for block in self.references if block not in held][:count]
        assert self.owner.allocated(blocks, self.named(request)) == []
        for block in blocks:
            self.cached.discard(block)
            self.add(block, request)

    @precondition(lambda self: self.held_blocks() or self.cached)
    @rule(request=requests, data=st.data())
    def share(self, request: str, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.held_blocks(), *self.cached})))
        assert self.owner.shared([block], self.named(request)) == []
        self.add(block, request)

    @precondition(lambda self: self.held_blocks())
    @rule(data=st.data(), cached=st.booleans())
    def free_one(self, data: st.DataObject, cached: bool) -> None:
        block = data.draw(st.sampled_from(self.held_blocks()))
        request = data.draw(st.sampled_from(sorted(+self.references[block])))
        self.free([block], request, cached)

    @rule(request=requests, cached=st.booleans())
    def free_all(self, request: str, cached: bool) -> None:
        blocks = [block for block, holders in self.references.items() for _ in range(holders[request])]
        self.free(blocks, request, cached)

    def free(self, blocks: list[int], request: str, cached: bool) -> None:
        assert self.owner.freed(blocks, self.named(request), cached) == []
        for block in blocks:
            self.references[block][request] -= 1
            if cached:
                self.cached.add(block)

    # Misuse

    @precondition(lambda self: self.held_blocks())
    @rule(request=requests, data=st.data())
    def allocate_a_held_block(self, request: str, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held_blocks()))
        (misuse,) = self.owner.allocated([block], self.named(request))
        self.expect(misuse, block, request, "double allocation")
        self.references[block].clear()
        self.cached.discard(block)
        self.add(block, request)

    @precondition(lambda self: self.seen.difference(self.held_blocks()))
    @rule(request=requests, data=st.data())
    def free_a_free_block(self, request: str, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.seen.difference(self.held_blocks()))))
        (misuse,) = self.owner.freed([block], self.named(request), False)
        self.expect(misuse, block, request, "double free")

    @precondition(lambda self: self.held_blocks() and not self.anonymous)
    @rule(data=st.data())
    def free_what_another_holds(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held_blocks()))
        (misuse,) = self.owner.freed([block], "stranger", True)
        self.expect(misuse, block, "stranger", "does not hold")

    @precondition(lambda self: self.seen.difference(self.held_blocks(), self.cached))
    @rule(request=requests, data=st.data())
    def share_a_free_block(self, request: str, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.seen.difference(self.held_blocks(), self.cached))))
        (misuse,) = self.owner.shared([block], self.named(request))
        self.expect(misuse, block, request, "not cached")
        self.add(block, request)

    def expect(self, misuse: Misuse, block: int, request: str, words: str) -> None:
        assert (misuse.block, misuse.request) == (block, self.named(request))
        assert words in misuse.detail

    # The device

    @invariant()
    def references_on_the_device_are_those_of_the_model(self) -> None:
        if hasattr(self, "owner"):
            self.owner.settle()
            wanted = [0, *(holders.total() for holders in self.references.values())]
            assert self.owner.references.tolist() == wanted

    @invariant()
    def held_on_the_device_is_what_the_model_holds(self) -> None:
        if not hasattr(self, "owner"):
            return
        for request in "abcd":
            if self.anonymous or request not in self.ever_held:
                assert holds(self.owner, request) is None
            else:
                assert holds(self.owner, request) == {
                    block for block, holders in self.references.items() if holders[request] > 0
                }
        self.owner.settle()
        assert not self.owner.held[0].any()


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
