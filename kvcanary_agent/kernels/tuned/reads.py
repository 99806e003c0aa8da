"""Before a forward: one answer for all slots that a step reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcanary_agent.kernels.plan import KnownTokens, Rows
from kvcanary_agent.kernels.records import UNKNOWN, Column, Records

_CHUNK_SLOTS = 16384
"""Records gathered at a time: few calls, and yet they stay in the cache from one comparison to the next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Walk:
    """Which blocks a batch reads; it depends on nothing but block table, lengths in blocks and window.

    Attributes:
        counts, first: ``[rows]`` int64: how many blocks each row reads, and the first one's column.
        block_table: A copy, to compare with.
        outside: Whether a block lies outside the pool.
        rows, blocks: ``[entries]`` int64.
        positions: ``[entries, block_size]`` int64.
        starts: ``[rows that read]`` int64: where each row's entries begin.
        readers: ``[rows that read]`` int64: which rows these are; None if all.
    """

    counts: torch.Tensor
    first: torch.Tensor
    block_table: torch.Tensor
    outside: bool
    rows: torch.Tensor
    blocks: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    readers: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CleanReads:
    """What a step reads, all of it as it should be. An *entry* is one block that a row reads.

    Attributes:
        rows, blocks: ``[entries]`` int64.
        positions: ``[entries, block_size]`` int64.
        live: ``[entries, block_size]`` bool: the row reads this slot.
        num_slots: How many slots are read.
        window: Of the group.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    positions: torch.Tensor
    live: torch.Tensor
    num_slots: int
    window: int | None


class ReadScreen:
    """Whether any slot that a step reads fails any check of metadata."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._walk: _Walk | None = None
        self._offsets = torch.arange(records.block_size)

    def clean(self, rows: Rows, window: int | None, known: KnownTokens | None) -> CleanReads | None:
        """What the step reads if all is well with it, otherwise None.

        None is no verdict: it may be that nothing is wrong after all.
        """
        size, lengths = self._records.block_size, rows.prefix_lens
        low = torch.zeros_like(lengths) if window is None else (lengths - window + 1).clamp_(min=0)
        walk = self._walk_of(rows.block_table, lengths, low, window)
        if walk.outside:
            return None
        not_held = rows.not_held(walk.rows, walk.blocks)
        if not_held is not None and bool(not_held.any()):
            return None
        live = walk.positions < lengths.index_select(0, walk.rows)[:, None]
        if window is not None:
            live &= walk.positions >= low.index_select(0, walk.rows)[:, None]
        reads = CleanReads(
            rows=walk.rows,
            blocks=walk.blocks,
            positions=walk.positions,
            live=live,
            num_slots=int((lengths - low).clamp_(min=0).sum()),
            window=window,
        )
        per_chunk = max(1, _CHUNK_SLOTS // size)
        seeds = rows.seeds.index_select(0, walk.rows)
        firsts, first_follow = self._first_slots(walk, low)
        before: torch.Tensor | None = None
        for start in range(0, walk.blocks.shape[0], per_chunk):
            chunk = slice(start, start + per_chunk)
            record = self._gather(walk.blocks[chunk])
            bad = record[:, Column.PLACE] != self._places(walk, chunk)
            bad |= record[:, Column.SEED] != seeds[chunk].repeat_interleave(size)
            if known is not None:
                bad |= _other_tokens(record[:, Column.TOKEN], walk, chunk, known)
            bad |= self._breaks(record, before, rows.seeds, walk, start * size, firsts, first_follow)
            before = record[-1:, Column.CHAIN_AFTER]
            bad &= live[chunk].view(-1)
            if self._records.has_unknown:
                bad &= record.view(torch.int32)[:, 2 * Column.PLACE + 1] != UNKNOWN
            if bool(bad.any()):
                return None
        return reads

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        records = self._records
        width = records.table.shape[1]
        taken = records.table.view(records.num_blocks, -1).index_select(0, blocks)
        return taken.view(-1, width)

    def _places(self, walk: _Walk, chunk: slice) -> torch.Tensor:
        """Position and generation as they ought to be: ``[slots]`` int64."""
        generation = self._records.block_generation.index_select(0, walk.blocks[chunk]).to(torch.int64)
        return torch.add(walk.positions[chunk], generation.unsqueeze_(1), alpha=1 << 32).view(-1)

    def _first_slots(self, walk: _Walk, low: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each row's first slot stands among all, and whether it follows the seed (or nothing)."""
        if walk.readers is not None:
            low = low.index_select(0, walk.readers)
        return walk.starts * self._records.block_size + low % self._records.block_size, low == 0

    def _breaks(
        self,
        record: torch.Tensor,
        before: torch.Tensor | None,
        seeds: torch.Tensor,
        walk: _Walk,
        start: int,
        firsts: torch.Tensor,
        from_seed: torch.Tensor,
    ) -> torch.Tensor:
        """Which slots do not continue the chain of the slot before, or of their row's seed; ``[slots]`` bool."""
        chain, after = record[:, Column.CHAIN], record[:, Column.CHAIN_AFTER]
        broken = torch.empty(chain.shape[0], dtype=torch.bool)
        torch.ne(chain[1:], after[:-1], out=broken[1:])
        broken[0] = False if before is None else bool(before != chain[0])
        if start or walk.rows.shape[0] * self._records.block_size > chain.shape[0]:
            here = ((firsts >= start) & (firsts < start + chain.shape[0])).nonzero().view(-1)
            firsts, from_seed = firsts.index_select(0, here) - start, from_seed.index_select(0, here)
            seeds = seeds if walk.readers is None else seeds.index_select(0, walk.readers)
            seeds = seeds.index_select(0, here)
        elif walk.readers is not None:
            seeds = seeds.index_select(0, walk.readers)
        broken[firsts] = (chain.index_select(0, firsts) != seeds) & from_seed
        return broken

    def _walk_of(
        self, block_table: torch.Tensor, lengths: torch.Tensor, low: torch.Tensor, window: int | None
    ) -> _Walk:
        size = self._records.block_size
        counts, first = (lengths + (size - 1)) // size, low
        if window is not None:
            first = low // size
            counts = (counts - first).clamp_(min=0)
        kept = self._walk
        if (
            kept is not None
            and torch.equal(kept.counts, counts)
            and torch.equal(kept.first, first)
            and torch.equal(kept.block_table, block_table)
        ):
            return kept
        rows = torch.repeat_interleave(counts)
        starts = counts.cumsum(0) - counts
        column = torch.arange(rows.shape[0]) + (first - starts).index_select(0, rows)
        width = block_table.shape[1]
        blocks = block_table[rows, column.clamp(max=width - 1)]
        outside = (blocks < 0) | (blocks >= self._records.num_blocks) | (column >= width)
        readers = None if bool((counts > 0).all()) else counts.nonzero().view(-1)
        self._walk = _Walk(
            counts=counts,
            first=first,
            block_table=block_table.clone(),
            outside=bool(outside.any()),
            rows=rows,
            blocks=blocks,
            positions=column[:, None] * size + self._offsets,
            starts=starts if readers is None else starts.index_select(0, readers),
            readers=readers,
        )
        return self._walk


def _other_tokens(token: torch.Tensor, walk: _Walk, chunk: slice, known: KnownTokens) -> torch.Tensor:
    """Which slots hold another token than their request is known to have there; ``[slots]`` bool."""
    positions, width = walk.positions[chunk], known.tokens.shape[1]
    rows = walk.rows[chunk]
    wrong = torch.zeros_like(token, dtype=torch.bool)
    if width:
        of_row = (known.rows.index_select(0, rows) * width)[:, None]
        at = (positions.clamp(max=width - 1) + of_row).view(-1)
        expected = known.tokens.reshape(-1).index_select(0, at)
        wrong = (token != expected) & (expected >= 0) & (positions < width).view(-1)
    if known.lengths is not None:
        wrong |= (positions >= known.lengths.index_select(0, rows)[:, None]).view(-1)
    return wrong
