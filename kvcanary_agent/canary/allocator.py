"""The canary of an allocator: who holds which block, in a process that may know nothing of the blocks' bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvcanary_agent.settings import Settings

from .violation import CheckCounts, Kind, KVCanaryError, Sink, Violation

# Past holders of a block that reports name.
_REMEMBERED_HOLDERS = 4
# A pass is told to the sink so often (and when it found something): a span for each step would cost more than the step.
_STEPS_PER_PASS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorLayout:
    """What an allocator hands out.

    Attributes:
        engine: The engine's name, for example ``"vllm"``, and ``engine_version``, or ``""``.
        num_blocks: Blocks are numbered from 0 to below this.
        block_size: Slots per block; 0 if it differs between the groups of layers that share the allocator.
        null_block: The block that is never handed out, if there is one.
        pool: Name for reports, unique within the process.
    """

    engine: str
    num_blocks: int
    block_size: int
    null_block: int | None = None
    engine_version: str = ""
    pool: str = "allocator"


class AllocatorCanary:
    """Follows every act of an allocator and reports those that its own rules forbid, at once.

    Each method takes the blocks of one act, after it was done, and costs O(blocks). ``counts`` are the allocator's own
    reference counters of these blocks afterwards, and ``indexed`` whether the prefix index still leads to them; None
    where the allocator has no such thing. A block that is on loan to somebody who is no request (a transfer that pins
    it) has a reference without a holder: request None.

    Holds no tensors. Not safe for concurrent use.
    """

    def __init__(self, layout: AllocatorLayout, settings: Settings, sink: Sink) -> None:
        """Start with every block free.

        Args:
            layout: The blocks.
            settings: ``mode`` counts.
            sink: Hears of violations and, now and then, of how many blocks were checked.
        """
        self.layout = layout
        self._raises = settings.mode == "raise"
        self._sink = sink
        self._step = 1
        self._references = [0] * layout.num_blocks
        self._cached = bytearray(layout.num_blocks)
        self._holders: dict[int, list[str]] = {}
        self._history: dict[int, tuple[str, ...]] = {}
        self._used = 0
        # Said already, until the block is handed out anew (-1: until the totals agree again).
        self._miscounted: set[int] = set()
        self._checked = self._failed = 0
        self._found: list[Violation] = []
        self._audit_start: int | None = None

    @property
    def step(self) -> int:
        """The number of the step that is being scheduled; the first is 1."""
        return self._step

    # Acts

    def allocated(
        self,
        blocks: Sequence[int],
        request: str | None,
        counts: Sequence[int] | None = None,
        indexed: Sequence[bool] | None = None,
    ) -> None:
        """Blocks are handed out as new; whoever held one of them before has lost it."""
        self._checked += len(blocks)
        for at, block in enumerate(blocks):
            held, other = self._references[block] > 0, self._a_holder(block)
            self._used += not held
            self._references[block], self._cached[block] = 1, 0
            self._miscounted.discard(block)
            self._holders[block] = []
            if request is not None:
                self._hold(block, request)
            if block == self.layout.null_block:
                self._misused(block, request, None, "the null block was handed out")
            if held:
                told = f"handed out while {other or 'somebody'} still holds it: double allocation"
                self._misused(block, request, other, told)
            if indexed is not None and indexed[at]:
                told = "handed out as new while the prefix index still promises its former contents"
                self._misused(block, request, self._previous(block), told, Kind.INDEX)
            if counts is not None and counts[at] != 1:
                self._miscount(block, request, counts[at])

    def shared(
        self,
        blocks: Sequence[int],
        request: str | None,
        counts: Sequence[int] | None = None,
        indexed: Sequence[bool] | None = None,
    ) -> None:
        """One more reference to each block: a request hit them in the prefix index, or somebody pins them."""
        self._checked += len(blocks)
        for at, block in enumerate(blocks):
            if not self._references[block]:
                self._used += 1
                if not self._cached[block]:
                    self._misused(block, request, self._a_holder(block), "shared after it was freed and not cached")
            elif indexed is not None and request is not None and not indexed[at]:
                told = "shared though the prefix index does not lead to it: it may still be written"
                self._misused(block, request, self._a_holder(block), told)
            self._references[block] += 1
            self._holders.setdefault(block, [])
            if request is not None:
                self._hold(block, request)
            if counts is not None and counts[at] < self._references[block]:
                self._miscount(block, request, counts[at])

    def freed(
        self,
        blocks: Sequence[int],
        request: str | None,
        counts: Sequence[int] | None = None,
        indexed: Sequence[bool] | None = None,
    ) -> None:
        """A reference to each block is taken back: the request's, or one without a holder."""
        self._checked += len(blocks)
        for at, block in enumerate(blocks):
            holders = self._holders.get(block, [])
            if not self._references[block]:
                told = "freed although nobody holds it: double free"
            elif request is not None and request not in holders:
                told = f"freed by a request that does not hold it: double free, {self._a_holder(block)} holds it"
            elif request is None and len(holders) == self._references[block]:
                told = f"freed though {holders[-1]} did not give it back: double free"
            else:
                self._let_go(block, request, indexed is not None and indexed[at])
                if counts is not None and counts[at] < self._references[block]:
                    self._miscount(block, request, counts[at])
                continue
            self._misused(block, request, self._a_holder(block), told)
            # The allocator's counter is wrong from now on, which follows from what has just been said.
            self._miscounted.add(block)

    def given_up(self, blocks: Sequence[int], request: str) -> None:
        """The request uses the blocks no longer, but its references stay until they are freed on nobody's behalf."""
        for block in blocks:
            holders = self._holders.get(block, [])
            if request in holders:
                holders.remove(request)
            else:
                told = "given up by a request that does not hold it"
                self._misused(block, request, self._a_holder(block), told)

    def in_table(self, blocks: Sequence[int], request: str) -> None:
        """The request's table has these blocks: it must hold each."""
        self._checked += len(blocks)
        for block in blocks:
            if request not in self._holders.get(block, ()):
                told = "in the table of a request that took no reference to it"
                self._misused(block, request, self._a_holder(block), told)

    def indexed(self, blocks: Sequence[int], request: str) -> None:
        """The prefix index now leads to these blocks, as ones that hold tokens of the request."""
        self._checked += len(blocks)
        for block in blocks:
            if request not in self._holders.get(block, ()):
                told = f"the prefix index takes it for a block of {request}, which does not hold it"
                self._misused(block, request, self._a_holder(block), told, Kind.INDEX)

    def wrong_hit(self, block: int, request: str) -> None:
        """The prefix index gave the request a block that is registered for another prefix than the request's."""
        told = "the prefix index gave out a block that is registered for another prefix than was asked for"
        self._misused(block, request, self._previous(block), told, Kind.INDEX)

    def evicted(self, blocks: Sequence[int]) -> None:
        """The prefix index no longer leads to these blocks: those that nobody holds may not be shared any more."""
        for block in blocks:
            self._cached[block] = 0

    def index_reset(self) -> None:
        """The prefix index was emptied: no block that nobody holds may be shared any more."""
        self._cached = bytearray(self.layout.num_blocks)

    # Audits

    def audit(self, first: int, counts: Sequence[int], free: Sequence[bool]) -> None:
        """Compare a run of blocks, whether or not anything happened to them, with what the allocator has.

        Args:
            first: Number of the run's first block.
            counts: The allocator's own reference counters.
            free: Whether each block is in the list of those that may be handed out.
        """
        self._audit_start = time.time_ns()
        self._checked += len(counts)
        for block, (count, is_free) in enumerate(zip(counts, free, strict=True), first):
            if block == self.layout.null_block:
                continue
            if count < self._references[block]:
                self._miscount(block, self._a_holder(block), count)
            elif is_free and self._references[block] and block not in self._miscounted:
                self._miscounted.add(block)
                holder = self._a_holder(block)
                self._misused(block, holder, None, "in the list of free blocks while it is held")

    def balance(self, free: int) -> None:
        """Compare the number of free blocks with what must be left of the pool."""
        expected = self.layout.num_blocks - self._used - (self.layout.null_block is not None)
        if free == expected:
            self._miscounted.discard(-1)
        elif -1 not in self._miscounted:
            self._miscounted.add(-1)
            more = "more" if free > expected else "fewer"
            told = f"{free} blocks are free where {expected} should be: {more} than are in nobody's use"
            self._misused(-1, None, None, told)

    def step_finished(self) -> None:
        """A step has been scheduled, and nothing of it runs yet.

        Raises:
            KVCanaryError: In raise mode, if anything was wrong since the step before.
        """
        found, self._found = tuple(self._found), []
        if found or self._step % _STEPS_PER_PASS == 0:
            now = time.time_ns()
            counts = CheckCounts(slots={"allocator": (self._checked, self._failed)})
            self._checked = self._failed = 0
            self._sink.pass_finished("audit", self._step, self._audit_start or now, now, counts, found)
        self._step += 1
        self._audit_start = None
        if found and self._raises:
            self._sink.flush()
            raise KVCanaryError(list(found))

    def close(self) -> None:
        """Nothing more will be told."""
        self._sink.close()

    def _hold(self, block: int, request: str) -> None:
        self._holders[block].append(request)
        self._history[block] = (*self._history.get(block, ()), request)[-_REMEMBERED_HOLDERS:]

    def _let_go(self, block: int, request: str | None, cached: bool) -> None:
        self._references[block] -= 1
        if request is not None:
            self._holders[block].remove(request)
        if not self._references[block]:
            self._used -= 1
            self._cached[block] = cached

    def _a_holder(self, block: int) -> str | None:
        """A request that holds the block, or else the last that did."""
        holders = self._holders.get(block)
        return holders[-1] if holders else self._last(block, 1)

    def _previous(self, block: int) -> str | None:
        """The request before the last that was given the block."""
        return self._last(block, 2)

    def _last(self, block: int, turns: int) -> str | None:
        history = self._history.get(block, ())
        return history[-turns] if len(history) >= turns else None

    def _miscount(self, block: int, request: str | None, count: int) -> None:
        if block in self._miscounted:
            return
        self._miscounted.add(block)
        others = [holder for holder in self._holders.get(block, ()) if holder != request]
        told = (
            f"the allocator counts {count} references where {self._references[block]} were taken: the block may be "
            "handed out while it is held"
        )
        self._misused(block, request, others[-1] if others else None, told)

    def _misused(
        self, block: int, request: str | None, other: str | None, detail: str, kind: Kind = Kind.OWNERSHIP
    ) -> None:
        size = self.layout.block_size
        violation = Violation(
            kind=kind,
            pool=self.layout.pool,
            group="blocks",
            slot=block * size if size and block >= 0 else -1,
            block=block,
            offset=0,
            step=self._step,
            request=request,
            writer=other,
            block_history=self._history.get(block, ()),
            detail=detail,
        )
        self._failed += 1
        self._found.append(violation)
        self._sink.violation(violation)
