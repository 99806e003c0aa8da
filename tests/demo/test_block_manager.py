"""The block manager: who holds which block, and what a block table reads back."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvcanary_agent.demo.block_manager import NULL_BLOCK, BlockManager
from kvcanary_agent.demo.sequence import Sequence

BLOCK_SIZE = 3
NUM_BLOCKS = 9


def sequence(token_ids: list[int], request_id: str = "a") -> Sequence:
    return Sequence(
        request_id=request_id,
        root_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_tokens=1,
    )


def compute(manager: BlockManager, seq: Sequence) -> list[tuple[int, int]]:
    """Compute all tokens of `seq` as a step does; returns the block copies."""
    copies = manager.append(seq, seq.num_tokens - seq.num_computed)
    before, seq.num_computed = seq.num_computed, seq.num_tokens
    manager.index_full_blocks(seq, before)
    return copies


# Few different tokens, so that prefixes meet.
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class BlockManagerMachine(RuleBasedStateMachine):
    """Random traffic against a shadow of the pool that holds tokens instead of keys and values."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.contents: dict[int, list[int | None]] = {block: [None] * BLOCK_SIZE for block in range(NUM_BLOCKS)}
        self.living: dict[str, Sequence] = {}
        self.names = count()

    def compute(self, seq: Sequence, num_tokens: int) -> None:
        for source, destination in self.manager.append(seq, num_tokens):
            self.contents[destination] = list(self.contents[source])
        before = seq.num_computed
        for position in range(before, before + num_tokens):
            block = seq.block_table[position // BLOCK_SIZE]
            self.contents[block][position % BLOCK_SIZE] = seq.token_ids[position]
        seq.num_computed += num_tokens
        self.manager.index_full_blocks(seq, before)

    @rule(target=sequences, token_ids=tokens, data=st.data())
    def admit(self, token_ids: list[int], data: st.DataObject) -> object:
        seq = sequence(token_ids, str(next(self.names)))
        prefix = self.manager.match_prefix(seq)
        num_cached = len(prefix) * BLOCK_SIZE
        num_tokens = data.draw(st.integers(1, seq.num_tokens - num_cached))
        if not self.manager.can_admit(seq, prefix, num_tokens):
            return multiple()
        self.manager.share(seq, prefix)
        seq.num_computed = num_cached
        self.living[seq.request_id] = seq
        self.compute(seq, num_tokens)
        return seq

    @rule(seq=sequences, more=tokens)
    def extend(self, seq: Sequence, more: list[int]) -> None:
        num_tokens = seq.num_tokens + len(more) - seq.num_computed
        if self.manager.can_append(seq, num_tokens):
            seq.token_ids += more
            self.compute(seq, num_tokens)

    @rule(target=sequences, seq=sequences)
    def fork(self, seq: Sequence) -> Sequence:
        fork = seq.fork(1)
        fork.request_id = str(next(self.names))
        self.manager.share(fork, seq.block_table)
        self.living[fork.request_id] = fork
        return fork

    @rule(seq=consumes(sequences))
    def free(self, seq: Sequence) -> None:
        self.manager.free(seq)
        del self.living[seq.request_id]

    @rule()
    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def every_table_reads_back_its_own_tokens(self) -> None:
        for seq in self.living.values():
            read = [
                self.contents[seq.block_table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                for position in range(seq.num_computed)
            ]
            assert read == seq.token_ids[: seq.num_computed]

    @invariant()
    def a_block_is_free_exactly_when_no_table_holds_it(self) -> None:
        held = {block for seq in self.living.values() for block in seq.block_table}
        assert set(self.manager.free_blocks) == set(range(NUM_BLOCKS)) - held - {NULL_BLOCK}

    @invariant()
    def the_null_block_is_never_held_and_no_table_holds_a_block_twice(self) -> None:
        for seq in self.living.values():
            assert NULL_BLOCK not in seq.block_table
            assert len(set(seq.block_table)) == len(seq.block_table)


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockManagerMachine = BlockManagerMachine.TestCase


def test_blocks_of_a_freed_sequence_are_shared_by_the_next_with_the_same_prefix() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    first = sequence([1, 2, 3, 4, 5, 6, 7])
    compute(manager, first)
    full_blocks = first.block_table[:2]
    manager.free(first)

    assert manager.match_prefix(sequence([1, 2, 3, 4, 5, 6, 8])) == full_blocks


def test_a_prefix_matches_only_with_everything_before_it_equal() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    compute(manager, sequence([1, 2, 3, 4, 5, 6, 7]))

    assert manager.match_prefix(sequence([9, 2, 3, 4, 5, 6, 7])) == []


def test_the_last_token_of_a_fully_cached_prompt_is_left_to_compute() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    first = sequence([1, 2, 3, 4, 5, 6])
    compute(manager, first)

    assert manager.match_prefix(sequence([1, 2, 3, 4, 5, 6])) == first.block_table[:1]


def test_blocks_that_nobody_can_hit_are_allocated_before_cached_ones_and_those_oldest_first() -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    older, newer, partial = sequence([1, 1, 1]), sequence([2, 2, 2]), sequence([3])
    for seq in (older, newer, partial):
        compute(manager, seq)
    [older_block], [newer_block], [partial_block] = older.block_table, newer.block_table, partial.block_table
    never_used = set(manager.free_blocks)
    for seq in (older, newer, partial):
        manager.free(seq)

    allocated = manager.allocate(sequence([4]), 5)

    assert allocated[0] == partial_block
    assert set(allocated[1:3]) == never_used
    assert allocated[3:] == [older_block, newer_block]
    assert manager.match_prefix(sequence([1, 1, 1, 1])) == []


def test_a_fork_copies_the_block_it_writes_to_and_the_last_holder_writes_in_place() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    parent = sequence([1, 2, 3, 4])
    compute(manager, parent)
    shared = list(parent.block_table)
    fork = parent.fork(1)
    manager.share(fork, shared)
    fork.token_ids.append(5)
    parent.token_ids.append(6)

    copies = compute(manager, fork)

    assert copies == [(shared[1], fork.block_table[1])]
    assert fork.block_table[0] == shared[0]
    assert fork.block_table[1] != shared[1]
    assert compute(manager, parent) == []
    assert parent.block_table == shared


def test_a_copy_on_write_counts_as_a_block_that_an_append_needs() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    parent = sequence([1, 2, 3, 4])
    compute(manager, parent)
    fork = parent.fork(1)
    manager.share(fork, parent.block_table)

    assert manager.num_free == 0
    assert not manager.can_append(fork, 1)
    manager.free(parent)
    assert manager.can_append(fork, 1)


def test_reviving_a_cached_block_counts_as_a_block_that_an_admission_needs() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    first = sequence([1, 2, 3])
    compute(manager, first)
    manager.free(first)
    second = sequence([1, 2, 3, 4, 5, 6, 7])
    prefix = manager.match_prefix(second)

    assert manager.can_admit(second, prefix, 3)
    assert not manager.can_admit(second, prefix, 4)


def test_allocating_more_than_is_free_fails() -> None:
    with pytest.raises(KeyError):
        BlockManager(3, BLOCK_SIZE).allocate(sequence([1]), 3)


def test_after_a_reset_no_prefix_matches() -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    compute(manager, sequence([1, 2, 3, 4]))

    manager.reset_prefix_cache()

    assert manager.match_prefix(sequence([1, 2, 3, 4])) == []
