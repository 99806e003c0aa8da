"""Which sequences take part in a step, and with how many tokens."""

from collections import deque
from collections.abc import Sequence as List
from dataclasses import dataclass

from kvcanary_agent.demo.block_manager import BlockManager
from kvcanary_agent.demo.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step.

    rows: each sequence with the number of tokens, after those computed, to compute now. Its blocks have room for them.
    block_copies: (source, destination) blocks to copy before the forward.
    """

    rows: tuple[tuple[Sequence, int], ...]
    block_copies: tuple[tuple[int, int], ...]


class Scheduler:
    """Continuous batching: prompts, chunks of prompts and single tokens share each step's token budget.

    Running sequences come first, in order of admission. If blocks run out, the sequence admitted last loses its blocks
    and waits, first in line, to be recomputed; its outputs are kept.
    """

    def __init__(self, block_manager: BlockManager, *, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._block_manager = block_manager
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, root_id: str) -> None:
        """Drop every sequence of one request, and free its blocks."""
        self.waiting = deque(seq for seq in self.waiting if seq.root_id != root_id)
        for seq in self.running:
            if seq.root_id == root_id:
                self._block_manager.free(seq)
        self.running = [seq for seq in self.running if seq.root_id != root_id]

    def schedule(self) -> Schedule:
        """Plan the next step and take the blocks it needs. No rows: nothing is left to do."""
        rows: list[tuple[Sequence, int]] = []
        copies: list[tuple[int, int]] = []
        budget = self._max_batched_tokens

        # Preemption takes the last running sequence, so it never takes one that already has a row.
        while budget and len(rows) < len(self.running):
            seq = self.running[len(rows)]
            num_tokens = min(seq.num_tokens - seq.num_computed, budget)
            if not self._block_manager.can_append(seq, num_tokens):
                self._preempt(self.running.pop())
                continue
            copies += self._block_manager.append(seq, num_tokens)
            rows.append((seq, num_tokens))
            budget -= num_tokens

        while budget and self.waiting:
            seq = self.waiting[0]
            prefix = self._block_manager.match_prefix(seq)
            num_cached = len(prefix) * self._block_manager.block_size
            num_tokens = min(seq.num_tokens - num_cached, budget)
            if not self._has_seat(seq) or not self._block_manager.can_admit(seq, prefix, num_tokens):
                break
            self.running.append(self.waiting.popleft())
            if prefix:
                self._block_manager.share(seq, prefix)
            seq.num_computed = num_cached
            copies += self._block_manager.append(seq, num_tokens)
            rows.append((seq, num_tokens))
            budget -= num_tokens

        return Schedule(rows=tuple(rows), block_copies=tuple(copies))

    def update(self, schedule: Schedule, ranked_tokens: List[List[int]]) -> list[Sequence]:
        """Enter the outcome of a step, and return the sequences that it finished.

        ranked_tokens: for each row, the likeliest next tokens, best first, at least `n` of its sequence.
        """
        finished = []
        for (seq, num_tokens), ranked in zip(schedule.rows, ranked_tokens, strict=True):
            num_computed_before = seq.num_computed
            seq.num_computed += num_tokens
            self._block_manager.index_full_blocks(seq, num_computed_before)
            if seq.num_computed < seq.num_tokens:
                continue
            for rank, continuation in enumerate(self._fork(seq)):
                continuation.token_ids.append(ranked[rank])
                if continuation.is_finished:
                    finished.append(continuation)
        for seq in finished:
            self.running.remove(seq)
            self._block_manager.free(seq)
        return finished

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """`seq`, and the continuations that it stood for, which share all its blocks with it from now on."""
        forks = [seq.fork(sample_index) for sample_index in range(1, seq.n)]
        for fork in forks:
            self._block_manager.share(fork, seq.block_table)
        self.running += forks
        seq.n = 1
        return [seq, *forks]

    def _preempt(self, seq: Sequence) -> None:
        self._block_manager.free(seq)
        seq.num_computed = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _has_seat(self, seq: Sequence) -> bool:
        return sum(running.n for running in self.running) + seq.n <= self._max_num_seqs
