"""The canary's own memory: what was written to each slot, by whom and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

from .hashing import as_words
from .transit import to_host

UNKNOWN = -1
"""Generation of a slot that came from elsewhere: there is no record that anything could be compared with."""


class Column(IntEnum):
    """Where a slot's record keeps what: eight bytes each, two numbers of four bytes where two are named."""

    PLACE = 0
    """position (low half) and generation (high half)"""
    TOKEN = 1
    SEED = 2
    CHAIN = 3
    CHAIN_AFTER = 4
    WRITE = 5
    """owner (low half) and step (high half)"""
    STATE = 6
    """fingerprinted (low half)"""
    CLAIM = 7
    """Scratch: order (low half) and step (high half) of the write to come; of several, the greatest is the last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRecords:
    """The records of n blocks, apart from their place.

    Attributes:
        table: ``[n, block_size, len(Column)]`` int64.
        valid: ``[n, block_size]`` bool: the slot counted as written.
        fingerprints: ``[parts, n, block_size]`` int64.
    """

    table: torch.Tensor
    valid: torch.Tensor
    fingerprints: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.valid.numel()

    def first(self, blocks: int) -> BlockRecords:
        """Those of the first so many blocks."""
        return BlockRecords(
            table=self.table[:blocks], valid=self.valid[:blocks], fingerprints=self.fingerprints[:, :blocks]
        )

    def picked(self, blocks: torch.Tensor) -> BlockRecords:
        """Those of ``[n]`` int64 blocks, counted from the first."""
        return BlockRecords(
            table=self.table[blocks], valid=self.valid[blocks], fingerprints=self.fingerprints[:, blocks]
        )

    def in_host_memory(self) -> BlockRecords:
        """The same in host memory, good for nothing but to be copied back until the device has arrived here."""
        return self._each(to_host)

    def on(self, device: torch.device) -> BlockRecords:
        """The same on another device."""
        return self._each(lambda values: values.to(device, non_blocking=True))

    def _each(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> BlockRecords:
        return BlockRecords(table=moved(self.table), valid=moved(self.valid), fingerprints=moved(self.fingerprints))


class Records:
    """Records of one group of layers on the pool's device: one row of a table for each slot, and its fingerprints.

    A slot's record counts only while its ``generation`` is that of its block; handing the block out again makes the
    old record void without erasing it, so that it remains as evidence.

    Attributes:
        table: ``[slots, len(Column)]`` int64: a record in one row, so that one gather fetches all of it. The
            attributes that follow are its columns, ``[slots]`` each.
        token: int64. position, owner: int32; ``owner`` is the writing request's number.
        step: int32: the canary's step of the write.
        seed: int64: where the chain starts from, a hash of namespace and epoch.
        chain, chain_after: int64: the chain before and after this token.
        generation: int32; ``block_generation``: ``[blocks]`` int32.
        fingerprinted: int32: 0 between a write and the forward's end, then 1.
        order: int32, scratch: which of its step's new tokens wrote the slot.
        fingerprints: ``[parts, slots]`` int64.
        block_prints: ``[blocks, parts]`` int64: fingerprints of whole blocks, by which checks may tell that a block is
            as it was when all its slots held what is on record; 0 where that is not known.
        has_unknown: Whether any slot was ever given the generation ``UNKNOWN``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        views: list[torch.Tensor],
        number_types: list[torch.dtype] | None = None,
        carries_tokens: list[bool] | None = None,
    ) -> None:
        """Make empty records.

        Args:
            num_blocks, block_size, device: Of the group.
            views: ``[blocks, block_size, *payload]`` of each part whose bytes are to be fingerprinted.
            number_types: What each part's bytes mean as numbers; None: the views' dtypes.
            carries_tokens: Whether each part's bytes must differ where the token differs; None: all do.
        """
        self.number_types = number_types or [view.dtype for view in views]
        self.carries_tokens = carries_tokens or [True] * len(views)
        num_slots = num_blocks * block_size
        self.block_size, self.num_blocks, self.num_slots, self.device = block_size, num_blocks, num_slots, device
        self.views = [as_words(view) for view in views]
        self.has_unknown = False

        self.table = torch.zeros((num_slots, len(Column)), dtype=torch.int64, device=device)
        self.block_generation = torch.ones(num_blocks, dtype=torch.int32, device=device)
        self.fingerprints = torch.zeros((len(views), num_slots), dtype=torch.int64, device=device)
        # Only where checks run on the host: a GPU reads a slot in any layout at the memory's speed.
        blocks_known = num_blocks if device.type == "cpu" else 0
        self.block_prints = torch.zeros((blocks_known, len(views)), dtype=torch.int64, device=device)

        halves = self.table.view(torch.int32)
        self.position, self.generation = halves[:, 2 * Column.PLACE], halves[:, 2 * Column.PLACE + 1]
        self.token, self.seed = self.table[:, Column.TOKEN], self.table[:, Column.SEED]
        self.chain, self.chain_after = self.table[:, Column.CHAIN], self.table[:, Column.CHAIN_AFTER]
        self.owner, self.step = halves[:, 2 * Column.WRITE], halves[:, 2 * Column.WRITE + 1]
        self.fingerprinted, self.order = halves[:, 2 * Column.STATE], halves[:, 2 * Column.CLAIM]

    def forget(self) -> None:
        """Nothing was ever written, as far as anybody knows."""
        self.table.zero_()
        self.fingerprints.zero_()
        self.block_prints.zero_()

    def taken_from(self, blocks: torch.Tensor) -> BlockRecords:
        """A copy of what is on record of ``[n]`` int64 blocks."""
        table = self.table.view(self.num_blocks, self.block_size, -1)[blocks]
        generation = table.view(torch.int32)[..., 2 * Column.PLACE + 1]
        valid = generation == self.block_generation[blocks][:, None]
        return BlockRecords(table=table, valid=valid, fingerprints=self.fingerprints_by_block[:, blocks])

    def put_into(self, blocks: torch.Tensor, records: BlockRecords) -> None:
        """Replace what is on record of ``[n]`` int64 blocks; what was not valid, or not known, where it was taken is
        not here."""
        table = records.table.clone()
        before = table.view(torch.int32)[..., 2 * Column.PLACE + 1]
        invalid = torch.where(before == UNKNOWN, UNKNOWN, 0)
        generation = torch.where(records.valid, self.block_generation[blocks][:, None], invalid)
        table.view(torch.int32)[..., 2 * Column.PLACE + 1] = generation
        by_block = self.table.view(self.num_blocks, self.block_size, -1)
        # Which write of this step claims a slot is a matter of the slot, not of what was there.
        table[..., Column.CLAIM] = by_block[blocks][..., Column.CLAIM]
        by_block[blocks] = table
        self.fingerprints_by_block[:, blocks] = records.fingerprints
        self.forget_block_prints(blocks)

    def forget_block_prints(self, blocks: torch.Tensor) -> None:
        """Something else is on record of ``[n]`` int64 blocks, or will be in them, than their prints were taken of."""
        if self.block_prints.numel():
            self.block_prints.index_fill_(0, blocks, 0)

    @property
    def fingerprints_by_block(self) -> torch.Tensor:
        """``[parts, blocks, block_size]``, a view."""
        return self.fingerprints.view(self.fingerprints.shape[0], self.num_blocks, self.block_size)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.table, self.block_generation, self.fingerprints))
