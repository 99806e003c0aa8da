"""Before a forward: one answer for all slots that a step reads.

What has been proven and has not changed since is not proven again: of a request that decodes, nothing but the block
that it writes to is looked at anew. Every input of a proof is either compared with what it was then (block table,
seeds, the request's own tokens) or is the records' own memory, whose changes are seen by their tensors' versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcanary_agent.kernels.plan import KnownTokens, Rows
from kvcanary_agent.kernels.records import UNKNOWN, Column, Records

from .few import few_reads, slots_of_sound_reads

_ROOM_FOR_TOKENS = 1024
"""How many more tokens of each row a proof has room for than it rests upon at first."""
_CHUNK_SLOTS = 16384
"""Records gathered at a time: few calls, and yet they stay in the cache from one comparison to the next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Walk:
    """Columns of a block table, from ``first`` on and ``counts`` of them in each row; an *entry* is one of them.

    Attributes:
        first, counts: ``[rows]`` int64.
        rows, columns: ``[entries]`` int64.
        positions: ``[entries, block_size]`` int64.
        starts: ``[rows that have entries]`` int64: where each row's entries begin.
        readers: ``[rows that have entries]`` int64: which rows these are; None if all.
    """

    first: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    readers: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Proven:
    """What is known to be as it should be, and the inputs of the proof.

    Attributes:
        low, lengths: ``[rows]`` int64: the positions proven in each row; ``low`` is None if 0 in all.
        seeds: ``[rows]`` int64.
        block_table: ``[rows, columns]`` int64.
        tokens: ``[rows, any]``: what the requests were known to consist of; None if nothing was known.
        relevant: Of that shape, bool: the tokens that the proof rests upon.
    """

    low: torch.Tensor | None
    lengths: torch.Tensor
    seeds: torch.Tensor
    block_table: torch.Tensor
    tokens: torch.Tensor | None
    relevant: torch.Tensor | None


class CleanReads:
    """What a step reads, all of it as it should be. An *entry* is one block that a row reads.

    Attributes:
        num_slots: How many slots are read.
        window: Of the group.
    """

    def __init__(self, rows: Rows, low: torch.Tensor | None, ends: torch.Tensor, block_size: int, window: int | None):
        self.window = window
        self._rows, self._low, self._ends, self._block_size = rows, low, ends, block_size

    @cached_property
    def num_slots(self) -> int:
        lengths = self._rows.prefix_lens
        return int((lengths if self._low is None else (lengths - self._low).clamp_(min=0)).sum())

    @cached_property
    def _entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.zeros_like(self._ends) if self._low is None else self._low // self._block_size
        return _entries(first, (self._ends - first).clamp_(min=0))[:2]

    @property
    def rows(self) -> torch.Tensor:
        """``[entries]`` int64."""
        return self._entries[0]

    @cached_property
    def blocks(self) -> torch.Tensor:
        """``[entries]`` int64."""
        return self._rows.block_table[self._entries]

    def positions(self, entries: torch.Tensor | None) -> torch.Tensor:
        """Of all or of ``[n]`` entries: ``[n, block_size]`` int64."""
        columns = self._entries[1] if entries is None else self._entries[1].index_select(0, entries)
        return (columns * self._block_size)[:, None] + torch.arange(self._block_size)

    def live(self, entries: torch.Tensor | None) -> torch.Tensor:
        """Which slots of all or of ``[n]`` entries the row reads: ``[n, block_size]`` bool."""
        rows = self.rows if entries is None else self.rows.index_select(0, entries)
        positions = self.positions(entries)
        live = positions < self._rows.prefix_lens.index_select(0, rows)[:, None]
        if self._low is not None:
            live &= positions >= self._low.index_select(0, rows)[:, None]
        return live

    def num_live(self, entries: torch.Tensor | None) -> int:
        """How many slots of all or of ``[n]`` entries the row reads."""
        if entries is None:
            return self.num_slots
        rows, columns = (of_all.index_select(0, entries) for of_all in self._entries)
        begin = columns * self._block_size
        end = torch.minimum(self._rows.prefix_lens.index_select(0, rows), begin + self._block_size)
        if self._low is not None:
            begin = torch.maximum(self._low.index_select(0, rows), begin)
        return int((end - begin).sum())


class ReadScreen:
    """Whether any slot that a step reads fails any check of metadata."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._offsets = torch.arange(records.block_size)
        self._walk: _Walk | None = None
        self._proven: _Proven | None = None
        # The slots that the proof rests upon, and perhaps others; and the generations that it has seen.
        self._in_proof = torch.zeros(records.num_slots, dtype=torch.bool)
        self._generation = records.block_generation.clone()
        self._versions = self._current_versions()

    @property
    def num_bytes(self) -> int:
        """Bytes of scratch."""
        return self._in_proof.numel() + self._generation.numel() * self._generation.element_size()

    def forget(self) -> None:
        """Nothing counts as proven any more."""
        self._proven = None

    @contextmanager
    def changes(self, slots: torch.Tensor | None) -> Iterator[None]:
        """Around a change of the records of these slots, ``[n]`` int64, alone; None: of nothing that a proof rests on.

        After any other change of the records everything is proven anew.
        """
        self._settle()
        if slots is not None and self._proven is not None and bool(self._in_proof.index_select(0, slots).any()):
            self._proven = None
        yield
        self._versions = self._current_versions()

    def clean(self, rows: Rows, window: int | None, known: KnownTokens | None) -> CleanReads | None:
        """What the step reads if all is well with it, otherwise None.

        None is no verdict: it may be that nothing is wrong after all.
        """
        size, lengths, table = self._records.block_size, rows.prefix_lens, rows.block_table
        low = None if window is None else (lengths - window + 1).clamp_(min=0)
        ends = (lengths + (size - 1)) // size
        reads = CleanReads(rows, low, ends, size, window)
        if not reads.num_slots:
            return reads
        if int(ends.max()) > table.shape[1]:
            return None
        if known is not None and known.lengths is not None and bool((known.lengths < lengths).any()):
            return None
        if rows.held is not None:
            outside = (reads.blocks < 0) | (reads.blocks >= self._records.num_blocks)
            if bool(outside.any()):
                return None
            not_held = rows.not_held(reads.rows, reads.blocks)
            if not_held is not None and bool(not_held.any()):
                return None
        self._settle()
        start = self._first_unproven(rows, low, known)
        if start is not None and self._prove_few(rows, start, low, known):
            return reads
        slots = self._sound_slots(rows, ends, start, low, known)
        if slots is None:
            self._proven = None
            return None
        self._remember(rows, ends, low, known, slots, anew=start is None)
        return reads

    # What is proven

    def _current_versions(self) -> tuple[int, int]:
        return self._records.table._version, self._records.block_generation._version

    def _settle(self) -> None:
        """Drop the proofs if the records have changed behind their back."""
        table, generation = self._versions
        self._versions = self._current_versions()
        if self._versions[0] != table:
            self._proven = None
        if self._versions[1] != generation:
            if self._proven is not None:
                changed = (self._records.block_generation != self._generation).nonzero().view(-1)
                in_proof = self._in_proof.view(-1, self._records.block_size)
                if changed.numel() and bool(in_proof.index_select(0, changed).any()):
                    self._proven = None
            self._generation.copy_(self._records.block_generation)

    def _first_unproven(self, rows: Rows, low: torch.Tensor | None, known: KnownTokens | None) -> torch.Tensor | None:
        """The position in each row, ``[rows]`` int64, from which on its slots are yet to be looked at; None: all."""
        proven = self._proven
        if proven is None or proven.lengths.shape != rows.prefix_lens.shape or (proven.low is None) != (low is None):
            return None
        width = proven.block_table.shape[1]
        if rows.block_table.shape[1] < width or (proven.tokens is None) != (known is None):
            return None
        if known is not None and proven.tokens is not None and proven.relevant is not None:
            now = _tokens_of_rows(known, proven.tokens.shape[1])
            if now.shape != proven.tokens.shape or bool((now != proven.tokens).logical_and_(proven.relevant).any()):
                return None
        start = proven.lengths
        table = rows.block_table[:, :width]
        if not torch.equal(table, proven.block_table):
            same = (table == proven.block_table).to(torch.int8).cumprod(1).sum(1)
            start = torch.minimum(start, same * self._records.block_size)
        if rows.seeds is not proven.seeds and not torch.equal(rows.seeds, proven.seeds):
            start = torch.where(rows.seeds == proven.seeds, start, 0)
        if low is None or proven.low is None:
            return start
        return torch.where(low >= proven.low, torch.maximum(low, start), low)

    def _prove_few(self, rows: Rows, start: torch.Tensor, low: torch.Tensor | None, known: KnownTokens | None) -> bool:
        """Look at what is yet to be looked at one slot after the other, if that is little; whether it is sound."""
        proven = self._proven
        if proven is None or self._records.has_unknown:
            return False
        few = few_reads(rows, start, low)
        if few is None:
            return False
        slots = slots_of_sound_reads(self._records, rows, few, known)
        if slots is None:
            return False
        lengths, block_table = rows.prefix_lens, rows.block_table
        if not slots and torch.equal(lengths, proven.lengths):
            return True
        tokens, relevant = proven.tokens, proven.relevant
        if known is not None and tokens is not None and relevant is not None:
            width, known_width = tokens.shape[1], known.tokens.shape[1]
            if few.end > width and width < known_width:
                return False
            at = [row * width + position for row, position in few.places if position < width]
            flat = torch.tensor(at, dtype=torch.int64)
            tokens.view(-1).index_copy_(0, flat, torch.take(_tokens_of_rows(known, width), flat))
            relevant.view(-1).index_fill_(0, flat, True)
        self._in_proof.index_fill_(0, torch.tensor(slots, dtype=torch.int64), True)
        width = -(-few.end // self._records.block_size)
        if not torch.equal(block_table[:, :width], proven.block_table):
            block_table = block_table[:, :width].clone()
        else:
            block_table = proven.block_table
        self._proven = _Proven(
            low=low,
            lengths=lengths.clone(),
            seeds=rows.seeds,
            block_table=block_table,
            tokens=tokens,
            relevant=relevant,
        )
        return True

    def _remember(
        self,
        rows: Rows,
        ends: torch.Tensor,
        low: torch.Tensor | None,
        known: KnownTokens | None,
        slots: torch.Tensor,
        *,
        anew: bool,
    ) -> None:
        """All that the step reads is proven: these slots just now, and before, unless ``anew``, the others."""
        if anew:
            self._in_proof.zero_()
        self._in_proof.index_fill_(0, slots, True)
        tokens = relevant = None
        width = int(ends.max())
        if known is not None:
            tokens = _tokens_of_rows(known, width * self._records.block_size + _ROOM_FOR_TOKENS).clone()
            positions = torch.arange(tokens.shape[1])
            relevant = positions < rows.prefix_lens[:, None]
            if low is not None:
                relevant &= positions >= low[:, None]
        self._proven = _Proven(
            low=low,
            lengths=rows.prefix_lens.clone(),
            seeds=rows.seeds,
            block_table=rows.block_table[:, :width].clone(),
            tokens=tokens,
            relevant=relevant,
        )

    # The proof

    def _sound_slots(
        self,
        rows: Rows,
        ends: torch.Tensor,
        start: torch.Tensor | None,
        low: torch.Tensor | None,
        known: KnownTokens | None,
    ) -> torch.Tensor | None:
        """The slots from position ``start`` of each row on, ``[n]`` int64, if their records are those of their rows."""
        size = self._records.block_size
        first = torch.zeros_like(ends) if low is None else low // size
        column = first if start is None else torch.maximum(first, start // size)
        walk = self._walk_of(column, (ends - column).clamp_(min=0))
        if not walk.rows.shape[0]:
            return walk.rows
        blocks = rows.block_table[walk.rows, walk.columns]
        smallest, largest = torch.aminmax(blocks)
        if int(smallest) < 0 or int(largest) >= self._records.num_blocks:
            return None
        live = walk.positions < rows.prefix_lens.index_select(0, walk.rows)[:, None]
        if low is not None:
            live &= walk.positions >= low.index_select(0, walk.rows)[:, None]
        seeds = rows.seeds.index_select(0, walk.rows)
        heads = self._heads(rows, walk, first, low)
        before: torch.Tensor | None = None
        per_chunk = max(1, _CHUNK_SLOTS // size)
        for begin in range(0, blocks.shape[0], per_chunk):
            chunk = slice(begin, begin + per_chunk)
            record = self._gather(blocks[chunk])
            bad = record[..., Column.PLACE] != self._places(walk.positions[chunk], blocks[chunk])
            bad |= record[..., Column.SEED] != seeds[chunk, None]
            if known is not None:
                bad |= self._other_tokens(record[..., Column.TOKEN], walk.rows[chunk], walk.columns[chunk], known)
            flat = record.view(-1, record.shape[2])
            bad.view(-1).logical_or_(_breaks(flat, before, begin * size, heads))
            before = flat[-1:, Column.CHAIN_AFTER]
            bad &= live[chunk]
            if self._records.has_unknown:
                bad &= record.view(torch.int32)[..., 2 * Column.PLACE + 1] != UNKNOWN
            if bool(bad.any()):
                return None
        return ((blocks * size)[:, None] + self._offsets)[live]

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """The records of blocks: ``[n, block_size, len(Column)]`` int64."""
        records = self._records
        taken = records.table.view(records.num_blocks, -1).index_select(0, blocks)
        return taken.view(-1, records.block_size, records.table.shape[1])

    def _places(self, positions: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Position and generation as they ought to be: ``[n, block_size]`` int64."""
        generation = self._records.block_generation.index_select(0, blocks).to(torch.int64)
        return torch.add(positions, generation.unsqueeze_(1), alpha=1 << 32)

    def _heads(
        self, rows: Rows, walk: _Walk, first: torch.Tensor, low: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The first slot of each row that has entries.

        Returns:
            Where it stands among the walk's slots, the chain before it, and whether that is known (None: everywhere),
            ``[rows that have entries]`` each.
        """
        size, records = self._records.block_size, self._records
        at, start, chain, table = walk.starts * size, walk.first, rows.seeds, rows.block_table
        if walk.readers is not None:
            start, chain = start.index_select(0, walk.readers), chain.index_select(0, walk.readers)
            first, table = first.index_select(0, walk.readers), table.index_select(0, walk.readers)
            low = None if low is None else low.index_select(0, walk.readers)
        continues = start > first
        if bool(continues.any()):
            previous = table.gather(1, (start - 1).clamp_(min=0)[:, None]).view(-1) * size + (size - 1)
            previous = torch.where(continues, previous, 0)
            chain = torch.where(continues, records.chain_after.index_select(0, previous), chain)
        if low is None:
            return at, chain, None
        at = at + torch.where(continues, 0, low % size)
        return at, chain, continues.logical_or_(low == 0)

    def _other_tokens(
        self, token: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, known: KnownTokens
    ) -> torch.Tensor:
        """Which slots hold another token than their request is known to have there; ``[n, block_size]`` bool."""
        size, tokens = self._records.block_size, known.tokens
        width = (int(columns.max()) + 1) * size
        if tokens.shape[1] < width:
            tokens = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1)
        of_block = tokens[:, :width].view(tokens.shape[0], -1, size)
        expected = of_block[known.rows.to(torch.int64).index_select(0, rows), columns]
        return (token != expected).logical_and_(expected >= 0)

    def _walk_of(self, first: torch.Tensor, counts: torch.Tensor) -> _Walk:
        kept = self._walk
        if kept is not None and torch.equal(kept.first, first) and torch.equal(kept.counts, counts):
            return kept
        rows, columns, starts = _entries(first, counts)
        readers = None if bool((counts > 0).all()) else counts.nonzero().view(-1)
        self._walk = _Walk(
            first=first,
            counts=counts,
            rows=rows,
            columns=columns,
            positions=(columns * self._records.block_size)[:, None] + self._offsets,
            starts=starts if readers is None else starts.index_select(0, readers),
            readers=readers,
        )
        return self._walk


def _tokens_of_rows(known: KnownTokens, width: int) -> torch.Tensor:
    """The first tokens that each row of the step is known to consist of, ``[rows, width or fewer]``."""
    return known.tokens[:, :width].index_select(0, known.rows.to(torch.int64))


def _entries(first: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row and column of each entry, ``[entries]`` int64, and where the entries of each row begin, ``[rows]`` int64."""
    rows = torch.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return rows, torch.arange(rows.shape[0]) + (first - starts).index_select(0, rows), starts


def _breaks(
    record: torch.Tensor,
    before: torch.Tensor | None,
    start: int,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """Which slots do not continue the chain of the slot before, or what their row begins with; ``[slots]`` bool.

    Args:
        record: ``[slots, len(Column)]`` int64, those from ``start`` on of a walk.
        before: The chain after the slot before them.
        heads: As from `ReadScreen._heads`.
    """
    chain, after = record[:, Column.CHAIN], record[:, Column.CHAIN_AFTER]
    broken = torch.empty(chain.shape[0], dtype=torch.bool)
    torch.ne(chain[1:], after[:-1], out=broken[1:])
    broken[0] = False if before is None else bool(before != chain[0])
    at, wanted, known = heads
    here = (at >= start).logical_and_(at < start + chain.shape[0])
    if not bool(here.all()):
        at, wanted = at[here], wanted[here]
        known = None if known is None else known[here]
    at = at - start
    other = chain.index_select(0, at) != wanted
    broken[at] = other if known is None else other & known
    return broken
