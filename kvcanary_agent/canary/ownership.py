"""Who holds which block, followed from the allocator's events."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvcanary_agent.kernels.transit import lists_to_device

# How many past holders of a block are remembered, for reports, and how many requests that hold nothing any more.
_REMEMBERED_HOLDERS = 4
_REMEMBERED_ENDED = 1 << 16
# The row of `held` of every request that has given everything back: it stays False.
_HOLDS_NOTHING = 0
# How many changes wait for the device at most.
_MOST_WAITING = 1 << 16


@dataclass(slots=True)
class _Block:
    references: int = 0
    counted: bool = False
    """Whether every reference is known: from its first allocation on, not if it was first seen shared."""
    holders: list[str] = field(default_factory=list)
    first_holder: str | None = None
    """The request that it was allocated to, while that holds it."""
    cached: bool = False
    history: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_HOLDERS))


@dataclass(frozen=True, slots=True)
class Misuse:
    """An event that the allocator's own rules forbid."""

    block: int
    request: str | None
    other: str | None
    detail: str


class Ownership:
    """The state of each block of one group: how many references, whose, and whether it is cached.

    A block is known from its first event on; nothing is said about blocks and requests never heard of, so that an
    agent that attaches late, or an adapter without these events, reports nothing wrong.

    Events change the host's books at once and the tensors when they are settled, in one copy for all events since the
    last time, which the host does not wait for.

    Attributes:
        held: ``[rows, blocks]`` bool on the pool's device: the request of that row holds the block.
        references: ``[blocks]`` int32 on the pool's device.
        first_holders: ``[blocks]`` int32 on the pool's device: the row of the request that the block was allocated to,
            while it holds it; -1 otherwise.
    """

    def __init__(self, num_blocks: int, null_block: int | None, device: torch.device) -> None:
        self._null_block = null_block
        self._blocks: dict[int, _Block] = {}
        self._tables: dict[str, list[int]] = {}
        self._row_of: dict[str, int] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._free_rows: list[int] = []
        self._rows_used = 1
        self.held = torch.zeros((16, num_blocks), dtype=torch.bool, device=device)
        self.references = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.first_holders = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
        # Where `held` changed, as an index into all of it, and the blocks whose counts did.
        self._held_changes: dict[int, bool] = {}
        self._counted: set[int] = set()

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.held, self.references, self.first_holders))

    def remember(self, blocks: Sequence[int], request: str | None) -> None:
        """Note for reports, and for nothing else, that blocks were handed to a request."""
        if request is not None:
            for number in blocks:
                self._blocks.setdefault(number, _Block()).history.append(request)

    def allocated(self, blocks: Sequence[int], request: str | None) -> list[Misuse]:
        """The allocator hands blocks out as new; whoever held one of them before has lost it."""
        misuses = []
        for number in blocks:
            block = self._blocks.setdefault(number, _Block())
            if number == self._null_block:
                misuses.append(Misuse(number, request, None, "the null block was handed out"))
            if block.references > 0 and block.counted:
                other = block.holders[-1] if block.holders else None
                detail = f"handed out while {other or 'another request'} still holds it: double allocation"
                misuses.append(Misuse(number, request, other, detail))
            self._drop_holders(number, block)
            block.references, block.counted, block.cached = 0, True, False
            self._hold(number, block, request)
            block.first_holder = request
        self._counted.update(blocks)
        return misuses

    def shared(self, blocks: Sequence[int], request: str | None) -> list[Misuse]:
        """A prefix hit adds a reference to each block."""
        misuses = []
        for number in blocks:
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = _Block()
            elif block.counted and block.references == 0 and not block.cached:
                last = block.history[-1] if block.history else None
                misuses.append(Misuse(number, request, last, "shared after it was freed and not cached"))
            self._hold(number, block, request)
        self._counted.update(blocks)
        return misuses

    def freed(self, blocks: Sequence[int], request: str | None, cached: bool) -> list[Misuse]:
        """References are taken back; without a request it is not known whose."""
        misuses = []
        for number in blocks:
            block = self._blocks.get(number)
            if block is None:
                continue
            if block.references == 0:
                if block.counted:
                    last = block.history[-1] if block.history else None
                    misuses.append(Misuse(number, request, last, "freed although nobody holds it: double free"))
                continue
            if request is not None and request not in block.holders:
                if block.counted:
                    other = block.holders[-1] if block.holders else None
                    misuses.append(Misuse(number, request, other, "freed by a request that does not hold it"))
                continue
            block.references -= 1
            block.cached = block.cached or cached
            if request is not None:
                block.holders.remove(request)
                if request == block.first_holder and request not in block.holders:
                    block.first_holder = None
                if request not in block.holders:
                    self._set_held(request, number, False)
                    self._forget_if_empty(request)
            if block.references == 0:
                self._drop_holders(number, block)
        self._counted.update(blocks)
        return misuses

    def loaded(self, blocks: Sequence[int], request: str) -> list[Misuse]:
        """Bytes arrive from another tier for a request, which is to hold the blocks that they go to."""
        return [
            Misuse(number, request, block.holders[-1], "loaded for a request that does not hold the block")
            for number in blocks
            if (block := self._blocks.get(number)) and block.counted and block.holders and request not in block.holders
        ]

    def unreadable(self, blocks: Sequence[int]) -> list[int]:
        """Those of ``blocks`` whose contents nobody may read any more: they are free and not cached."""
        return [
            number
            for number in blocks
            if (block := self._blocks.get(number)) and block.counted and not block.references and not block.cached
        ]

    def uncached(self) -> list[int]:
        """No free block is cached any more: those that were."""
        void = [number for number, block in self._blocks.items() if block.cached and not block.references]
        for block in self._blocks.values():
            block.cached = False
        return void

    def forget(self) -> None:
        """Nothing is known about any block any more, and nothing held."""
        self._blocks.clear()
        for request in list(self._tables):
            self._end(request)
        self._held_changes.clear()
        self._counted.clear()
        self.held.zero_()
        self.references.zero_()
        self.first_holders.fill_(-1)

    def settle(self) -> None:
        """Bring the tensors up to date."""
        self.apply(lists_to_device(self.take_changes(), self.references.device))

    @property
    def has_changes(self) -> bool:
        """Whether anything has changed since the tensors were settled last."""
        return bool(self._counted or self._held_changes)

    def take_changes(self) -> list[list[int]]:
        """What `apply` wants, as lists: what has changed since the last time."""
        blocks = sorted(self._counted)
        known = [self._blocks.get(number) for number in blocks]
        changes = [
            [at for at, held in self._held_changes.items() if held],
            [at for at, held in self._held_changes.items() if not held],
            blocks,
            [block.references if block else 0 for block in known],
            [self._row_of.get(block.first_holder or "", -1) if block else -1 for block in known],
        ]
        self._held_changes.clear()
        self._counted.clear()
        return changes

    def apply(self, changes: Sequence[torch.Tensor]) -> None:
        """Change the tensors.

        Args:
            changes: ``[n]`` int64 each: where in ``held`` a block is now held, and where not any more; blocks, their
                references and their first holders' rows.
        """
        gained, lost, blocks, references, first_holders = changes
        held = self.held.view(-1)
        for at, value in ((gained, True), (lost, False)):
            if at.numel():
                held.index_fill_(0, at, value)
        if blocks.numel():
            self.references.index_copy_(0, blocks, references.to(torch.int32))
            self.first_holders.index_copy_(0, blocks, first_holders.to(torch.int32))

    def rows(self, requests: Sequence[str]) -> list[int]:
        """The row of ``held`` for each request; -1 for a request that no event has named."""
        return [self._row_of.get(request, _HOLDS_NOTHING if request in self._ended else -1) for request in requests]

    def table(self, request: str) -> Sequence[int]:
        """The blocks handed to a request, in order, as far as events have told."""
        return self._tables.get(request, ())

    def history(self, block: int) -> tuple[str, ...]:
        """The last requests that the block was handed to or shared with, oldest first."""
        known = self._blocks.get(block)
        return tuple(known.history) if known else ()

    def _hold(self, number: int, block: _Block, request: str | None) -> None:
        block.references += 1
        if request is None:
            return
        block.holders.append(request)
        block.history.append(request)
        self._tables.setdefault(request, []).append(number)
        if request not in self._row_of:
            self._row_of[request] = self._take_row()
            self._ended.pop(request, None)
        self._set_held(request, number, True)

    def _take_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        row = self._rows_used
        self._rows_used += 1
        if row == self.held.shape[0]:
            # In-place updates must work in and outside inference mode, whichever the engine is in now.
            with torch.inference_mode(False):
                self.held = torch.cat([self.held, torch.zeros_like(self.held)])
        return row

    def _set_held(self, request: str, block: int, held: bool) -> None:
        row = self._row_of.get(request)
        if row is not None:
            self._held_changes[row * self.references.shape[0] + block] = held
            if len(self._held_changes) > _MOST_WAITING:
                self.settle()

    def _drop_holders(self, number: int, block: _Block) -> None:
        holders, block.holders, block.first_holder = block.holders, [], None
        for holder in holders:
            self._set_held(holder, number, False)
            self._forget_if_empty(holder)

    def _forget_if_empty(self, request: str) -> None:
        table = self._tables.get(request)
        if table is not None and not any(request in self._blocks[number].holders for number in table):
            self._end(request)

    def _end(self, request: str) -> None:
        del self._tables[request]
        self._free_rows.append(self._row_of.pop(request))
        self._ended[request] = None
        if len(self._ended) > _REMEMBERED_ENDED:
            self._ended.popitem(last=False)
