"""Before a forward: one answer for all slots that a step reads.

What has been proven and has not changed since is not proven again: of a request that decodes, nothing but the block
that it writes to is looked at anew. Every input of a proof is either compared with what it was then (block table,
seeds, who holds what, the request's own tokens) or is the records' own memory: the checks of the group tell of what
they change there, and any other change is seen by its tensors' versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcanary_agent.kernels.plan import KnownTokens, Rows
from kvcanary_agent.kernels.records import UNKNOWN, Column, Records

from .few import FEW, Held, Tokens, sound_slots
from .memory import RecordMemory, Rows2D, numbers_in, rows_of, tensor_of

_CHUNK_SLOTS = 16384
"""Records gathered at a time: few calls, and yet they stay in the cache from one comparison to the next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Walk:
    """Columns of a block table, from ``first`` on and ``counts`` of them in each row; an *entry* is one of them.

    Attributes:
        first, counts: ``[rows]`` int64.
        rows, columns: ``[entries]`` int64.
        starts: ``[rows that have entries]`` int64: where each row's entries begin.
        readers: ``[rows that have entries]`` int64: which rows these are; None if all.
    """

    first: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    starts: torch.Tensor
    readers: torch.Tensor | None


@dataclass(slots=True, kw_only=True, eq=False)
class _ProvenRow:
    """What is known to be as it should be in one row, and the inputs of the proof.

    Attributes:
        low, end: The positions proven.
        seed: Of the row.
        blocks: The block table's columns that hold positions below ``end``, int64.
        tokens: The memory of the tokens that the row was known to have below ``end``, from position 0; None if no
            tokens were known.
    """

    low: int
    end: int
    seed: int
    blocks: bytes
    tokens: bytearray | None


@dataclass(frozen=True, slots=True, eq=False)
class _Holders:
    """Who held what, when that was looked at.

    Attributes:
        held: As in `Rows`, kept so that no other tensor can take its place.
        version: Of that tensor.
        rows: Of ``held``, for each row of the step.
    """

    held: torch.Tensor
    version: int
    rows: list[int]

    @staticmethod
    def of(rows: Rows) -> _Holders | None:
        if rows.held is None:
            return None
        return _Holders(rows.held, rows.held._version, rows.held_rows.tolist())

    def are(self, others: _Holders | None) -> bool:
        """Whether others hold the same."""
        return (
            others is not None
            and others.held.data_ptr() == self.held.data_ptr()
            and others.held.shape == self.held.shape
            and others.version == self.version
            and others.rows == self.rows
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Due:
    """Some of the entries of a step.

    Attributes:
        entries: ``[n]`` int64; None if these are all.
        blocks: ``[n]`` int64.
        num_slots: How many slots of them are read.
    """

    entries: torch.Tensor | None
    blocks: torch.Tensor
    num_slots: int


class Entries:
    """The blocks that the rows of a step read, row by row; they are often those of the step before.

    Attributes:
        rows, columns, blocks: ``[entries]`` int64.
    """

    def __init__(self, first: list[int], tables: list[bytes]) -> None:
        """
        Args:
            first: The first column that each row reads.
            tables: Each row's columns up to the last that it reads, int64.
        """
        self._first, self._tables = first, tables
        self._numbers = [memoryview(table).cast("q") for table in tables]
        self._of_class: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def are_those_of(self, first: list[int], tables: list[bytes]) -> bool:
        """Whether these are the entries of rows like that."""
        return self._first == first and self._tables == tables

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = tensor_of(self._first)
        counts = tensor_of(len(table) for table in self._numbers) - first
        return _entries(first, counts.clamp_(min=0))[:2]

    @property
    def rows(self) -> torch.Tensor:
        return self._places[0]

    @property
    def columns(self) -> torch.Tensor:
        return self._places[1]

    @cached_property
    def blocks(self) -> torch.Tensor:
        octets = b"".join(table[8 * first :] for first, table in zip(self._first, self._tables, strict=True))
        return torch.frombuffer(bytearray(octets), dtype=torch.int64) if octets else torch.empty(0, dtype=torch.int64)

    def of_class(self, remainder: int, modulus: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries whose block leaves that remainder, and their blocks, ``[n]`` int64 each."""
        found = self._of_class.get((remainder, modulus))
        if found is None:
            entries = (self.blocks % modulus == remainder).nonzero().view(-1)
            found = self._of_class[remainder, modulus] = entries, self.blocks.index_select(0, entries)
        return found

    def ends(self) -> Iterator[tuple[int, int, int]]:
        """Row, column and block of the first and of the last entry of each row."""
        for row, (first, table) in enumerate(zip(self._first, self._numbers, strict=True)):
            if first < len(table):
                yield row, first, table[first]
                if first < len(table) - 1:
                    yield row, len(table) - 1, table[-1]


class CleanReads:
    """What a step reads, all of it as it should be. An *entry* is one block that a row reads.

    Attributes:
        num_slots: How many slots are read.
        window: Of the group.
    """

    def __init__(self, lengths: list[int], lows: list[int], entries: Entries | None, size: int, window: int | None):
        self.window, self.num_slots = window, sum(map(int.__sub__, lengths, lows))
        self._lengths, self._lows, self._of_step, self._block_size = lengths, lows, entries, size

    @property
    def _all(self) -> Entries:
        assert self._of_step is not None, "nothing is read"
        return self._of_step

    @property
    def rows(self) -> torch.Tensor:
        """``[entries]`` int64."""
        return self._all.rows

    @property
    def blocks(self) -> torch.Tensor:
        """``[entries]`` int64."""
        return self._all.blocks

    def due(self, block_class: tuple[int, int]) -> Due:
        """The entries whose block is of that class."""
        remainder, modulus = block_class
        if modulus == 1:
            return Due(entries=None, blocks=self.blocks, num_slots=self.num_slots)
        entries, blocks = self._all.of_class(remainder, modulus)
        count = entries.shape[0] * self._block_size
        if count:
            for row, column, block in self._all.ends():
                if block % modulus == remainder:
                    begin, end = self._span(row, column)
                    count -= self._block_size - (end - begin)
        return Due(entries=entries, blocks=blocks, num_slots=count)

    def positions(self, entries: torch.Tensor | None) -> torch.Tensor:
        """Of all or of ``[n]`` entries: ``[n, block_size]`` int64."""
        columns = self._all.columns if entries is None else self._all.columns.index_select(0, entries)
        return (columns * self._block_size)[:, None] + torch.arange(self._block_size)

    def live(self, entries: torch.Tensor | None) -> torch.Tensor:
        """Which slots of all or of ``[n]`` entries the row reads: ``[n, block_size]`` bool."""
        rows = self.rows if entries is None else self.rows.index_select(0, entries)
        positions = self.positions(entries)
        live = positions < tensor_of(self._lengths).index_select(0, rows)[:, None]
        if self.window is not None:
            live &= positions >= tensor_of(self._lows).index_select(0, rows)[:, None]
        return live

    def spans(self, entries: torch.Tensor) -> list[tuple[int, int]]:
        """Of ``[n]`` entries, the offsets in the block of the first slot that the row reads, and of the end."""
        return list(map(self._span, *self._rows_and_columns(entries)))

    def num_live(self, entries: torch.Tensor) -> int:
        """How many slots of ``[n]`` entries the row reads."""
        return sum(end - begin for begin, end in self.spans(entries))

    def _rows_and_columns(self, entries: torch.Tensor) -> tuple[list[int], list[int]]:
        return self._all.rows.index_select(0, entries).tolist(), self._all.columns.index_select(0, entries).tolist()

    def _span(self, row: int, column: int) -> tuple[int, int]:
        begin = column * self._block_size
        return max(0, self._lows[row] - begin), min(self._block_size, self._lengths[row] - begin)


class ReadScreen:
    """Whether any slot that a step reads fails any check of metadata."""

    def __init__(self, records: Records) -> None:
        self._records, self._memory = records, RecordMemory(records)
        self._offsets = torch.arange(records.block_size)
        self._walk: _Walk | None = None
        self._entries: Entries | None = None
        self._proven: list[_ProvenRow] = []
        self._token_dtype: torch.dtype | None = None
        self._holders: _Holders | None = None
        # The slots that proofs rest upon, and perhaps others; and the generations that they have seen.
        self._in_proof = torch.zeros(records.num_slots, dtype=torch.bool)
        self._in_proof_numbers = numbers_in(self._in_proof)
        self._generation = records.block_generation.clone()
        self._versions = self._current_versions()

    @property
    def num_bytes(self) -> int:
        """Bytes of scratch."""
        return self._in_proof.numel() + self._generation.numel() * self._generation.element_size()

    def forget(self) -> None:
        """Nothing counts as proven any more."""
        self._proven = []

    @contextmanager
    def changes(self, slots: torch.Tensor | Sequence[int] | None) -> Iterator[None]:
        """Around a change of the records of these slots, ``[n]`` int64, alone; None: of nothing that a proof rests on.

        After any other change of the records everything is proven anew.
        """
        self._settle()
        if slots is not None and self._proven:
            if isinstance(slots, torch.Tensor):
                stale = slots[self._in_proof.index_select(0, slots)].tolist()
            else:
                stale = [slot for slot in slots if self._in_proof_numbers[slot]]
            if stale:
                self._cut_at(stale)
        yield
        self._versions = self._current_versions()

    def clean(self, rows: Rows, window: int | None, known: KnownTokens | None) -> CleanReads | None:
        """What the step reads if all is well with it, otherwise None.

        None is no verdict: it may be that nothing is wrong after all.
        """
        size, lengths = self._records.block_size, rows.prefix_lens.tolist()
        if lengths and min(lengths) < 0:
            return None
        lows = [0] * len(lengths) if window is None else [max(0, length - window + 1) for length in lengths]
        # A window of one token reads nothing of what is there.
        lows = list(map(min, lows, lengths))
        ends = [-(-length // size) for length in lengths]
        if lows == lengths:
            return CleanReads(lengths, lows, None, size, window)
        table = rows_of(rows.block_table)
        if max(ends) > table.width:
            return None
        if known is not None and known.lengths is not None and any(map(int.__lt__, known.lengths.tolist(), lengths)):
            return None
        of_rows = [table.octets(row, 0, end) for row, end in enumerate(ends)]
        first = [low // size for low in lows]
        if self._entries is None or not self._entries.are_those_of(first, of_rows):
            self._entries = Entries(first, of_rows)
        reads = CleanReads(lengths, lows, self._entries, size, window)
        self._settle()
        if not self._prove(rows, table, of_rows, lengths, lows, known, reads):
            self._proven = []
            return None
        return reads

    # What is proven

    def _prove(
        self,
        rows: Rows,
        table: Rows2D,
        of_rows: list[bytes],
        lengths: list[int],
        lows: list[int],
        known: KnownTokens | None,
        reads: CleanReads,
    ) -> bool:
        seeds = rows.seeds.tolist()
        tokens = None if known is None else Tokens(known)
        token_dtype = None if tokens is None else tokens.dtype
        if self._token_dtype != token_dtype:
            self._proven, self._token_dtype = [], token_dtype
        starts = [
            self._first_unproven(row, lows[row], lengths[row], seeds[row], of_rows[row], tokens)
            for row in range(len(lengths))
        ]
        if starts == lows:
            self._proven = []
            self._in_proof.zero_()
        few = sum(max(0, length - start) for start, length in zip(starts, lengths, strict=True)) <= FEW
        before, self._holders = self._holders, _Holders.of(rows)
        held, slots = None, None
        if few:
            if self._holders is not None and self._holders.are(before):
                held = Held(self._holders.held, self._holders.rows)
            spans = [
                (row, start, length)
                for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
                if start < length
            ]
            slots = sound_slots(self._memory, rows, table, spans, lows, tokens, held)
        # Of who holds what there is no proof that could go on, unless it is as it was.
        if self._holders is not None and (held is None or slots is None) and not self._all_held(rows, reads):
            return False
        if slots is not None:
            for slot in slots:
                self._in_proof_numbers[slot] = True
        elif not self._all_sound(rows, reads, starts, lows, known):
            return False
        self._remember(starts, lengths, lows, seeds, of_rows, tokens)
        return True

    def _first_unproven(self, row: int, low: int, length: int, seed: int, blocks: bytes, tokens: Tokens | None) -> int:
        """The position from which on the slots of a row are yet to be looked at."""
        if row >= len(self._proven):
            return low
        proven = self._proven[row]
        if proven.seed != seed or low < proven.low:
            return low
        end = min(proven.end, length)
        if blocks != proven.blocks:
            end = min(end, _common(blocks, proven.blocks) // 8 * self._records.block_size)
        if tokens is not None and proven.tokens is not None and end > low:
            item = tokens.table.item_bytes
            now, then = tokens.octets(row, low, end), proven.tokens
            if low or len(then) > end * item:
                then = then[low * item : end * item]
            if now != then:
                end = low + _common(now, then) // item
        return max(low, end)

    def _remember(
        self,
        starts: list[int],
        lengths: list[int],
        lows: list[int],
        seeds: list[int],
        of_rows: list[bytes],
        tokens: Tokens | None,
    ) -> None:
        """All that the step reads is proven: what comes before ``starts`` was, and the rest has been now."""
        del self._proven[len(lengths) :]
        for row, (start, length, low, seed, blocks) in enumerate(
            zip(starts, lengths, lows, seeds, of_rows, strict=True)
        ):
            proven = self._proven[row] if row < len(self._proven) else None
            known = None
            if tokens is not None:
                known = proven.tokens if proven is not None and proven.tokens is not None else bytearray()
                item = tokens.table.item_bytes
                del known[start * item :]
                known += tokens.octets(row, len(known) // item, length)
            if proven is None:
                self._proven.append(_ProvenRow(low=low, end=length, seed=seed, blocks=blocks, tokens=known))
            else:
                proven.low, proven.end, proven.seed, proven.blocks, proven.tokens = low, length, seed, blocks, known

    def _current_versions(self) -> tuple[int, int]:
        return self._records.table._version, self._records.block_generation._version

    def _settle(self) -> None:
        """Drop the proofs that rest on records which have changed behind their back."""
        table, generation = self._versions
        self._versions = self._current_versions()
        if self._versions[0] != table:
            self._proven = []
        if self._versions[1] != generation:
            if self._proven:
                changed = (self._records.block_generation != self._generation).nonzero().view(-1)
                in_proof = self._in_proof.view(-1, self._records.block_size)
                if changed.numel() and bool(in_proof.index_select(0, changed).any()):
                    self._cut_at((changed * self._records.block_size).tolist())
                    in_proof.index_fill_(0, changed, False)
            self._generation.copy_(self._records.block_generation)

    def _cut_at(self, slots: list[int]) -> None:
        """Nothing that rests on these slots counts as proven any more, nor what follows them in their rows."""
        size = self._records.block_size
        offsets: dict[int, int] = {}
        for slot in slots:
            self._in_proof_numbers[slot] = False
            offsets[slot // size] = min(slot % size, offsets.get(slot // size, size))
        for proven in self._proven:
            for column, block in enumerate(memoryview(proven.blocks).cast("q")):
                if block in offsets:
                    proven.end = min(proven.end, column * size + offsets[block])
                    break

    def _all_held(self, rows: Rows, reads: CleanReads) -> bool:
        """Whether all blocks that are read are blocks of the pool, and none is known not to be held by its reader."""
        if bool(((reads.blocks < 0) | (reads.blocks >= self._records.num_blocks)).any()):
            return False
        not_held = rows.not_held(reads.rows, reads.blocks)
        return not_held is None or not bool(not_held.any())

    # The proof

    def _all_sound(
        self, rows: Rows, reads: CleanReads, starts: list[int], lows: list[int], known: KnownTokens | None
    ) -> bool:
        """Whether the slots from position ``starts`` of each row on have the records of their rows; a proof of it."""
        size = self._records.block_size
        low = None if reads.window is None else tensor_of(lows)
        ends = (rows.prefix_lens + (size - 1)) // size
        first = torch.zeros_like(ends) if low is None else low // size
        column = tensor_of(starts) // size
        walk = self._walk_of(column, (ends - column).clamp_(min=0))
        if not walk.rows.shape[0]:
            return True
        blocks = rows.block_table[walk.rows, walk.columns]
        smallest, largest = torch.aminmax(blocks)
        if int(smallest) < 0 or int(largest) >= self._records.num_blocks:
            return False
        begins = walk.columns * size
        ends_of_rows = rows.prefix_lens.index_select(0, walk.rows)
        lows_of_rows = None if low is None else low.index_select(0, walk.rows)
        seeds = rows.seeds.index_select(0, walk.rows)
        heads = self._heads(rows, walk, first, low)

        def live(entries: slice | torch.Tensor) -> torch.Tensor:
            positions = begins[entries, None] + self._offsets
            read = positions < ends_of_rows[entries, None]
            return read if lows_of_rows is None else read.logical_and_(positions >= lows_of_rows[entries, None])

        before: torch.Tensor | None = None
        per_chunk = max(1, _CHUNK_SLOTS // size)
        for begin in range(0, blocks.shape[0], per_chunk):
            chunk = slice(begin, begin + per_chunk)
            record = self._gather(blocks[chunk])
            bad = record[..., Column.PLACE] != self._places(begins[chunk, None] + self._offsets, blocks[chunk])
            bad.logical_or_(record[..., Column.SEED] != seeds[chunk, None])
            if known is not None:
                other = self._other_tokens(record[..., Column.TOKEN], walk.rows[chunk], walk.columns[chunk], known)
                bad.logical_or_(other)
            flat = record.view(-1, record.shape[2])
            bad.view(-1).logical_or_(_breaks(flat, before, begin * size, heads))
            before = flat[-1:, Column.CHAIN_AFTER]
            if not bool(bad.any()):
                continue
            bad.logical_and_(live(chunk))
            if self._records.has_unknown:
                bad.logical_and_(record.view(torch.int32)[..., 2 * Column.PLACE + 1] != UNKNOWN)
            if bool(bad.any()):
                return False
        in_part = ends_of_rows < begins + size
        if lows_of_rows is not None:
            in_part.logical_or_(lows_of_rows > begins)
        self._in_proof.view(-1, size).index_fill_(0, blocks[in_part.logical_not()], True)
        partly = in_part.nonzero().view(-1)
        slots = (blocks.index_select(0, partly) * size)[:, None] + self._offsets
        self._in_proof.index_fill_(0, slots[live(partly)], True)
        return True

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
            starts=starts if readers is None else starts.index_select(0, readers),
            readers=readers,
        )
        return self._walk


def _common(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """How many octets both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(a), len(b)))


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
