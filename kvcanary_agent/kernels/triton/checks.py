"""The checks of one group on a GPU: which kernel is launched when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from kvcanary_agent.kernels import reference
from kvcanary_agent.kernels.checks import Checks, Due
from kvcanary_agent.kernels.plan import Fault, KnownTokens, Rows, Writes
from kvcanary_agent.kernels.records import UNKNOWN, Records
from kvcanary_agent.kernels.ring import Tally, ViolationRing

from .content import check_null_block_kernel, record_content_kernel, verify_blocks_kernel, verify_content_kernel
from .measured_writes import enter_measured_writes_kernel
from .parts import PartTable
from .reads import verify_reads_kernel
from .writes import OTHER_WRITE, check_writes_kernel, enter_writes_kernel

_MOST_WRITES = 1 << 17
"""New tokens of one step that scratch is made for at the start, unless the pool is smaller."""
_PROGRAMS_PER_PROCESSOR = 4
_SLOTS = 3
"""Where `_kept` has the slots: behind the rows, tokens and positions of the step's writes."""
_WRITE_FAULTS = (
    Fault.WRITE_ADDRESS,
    Fault.WRITE_NOT_HELD,
    Fault.WRITE_TWICE,
    Fault.WRITE_SHARED,
    Fault.WRITE_POSITION,
    Fault.WRITE_TOKEN,
    Fault.PAD_OUTSIDE,
    Fault.PAD_LIVE,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entered:
    """The step's rows and how many new tokens they have; the tokens themselves are in scratch."""

    rows: Rows
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reads:
    window: int | None
    known: KnownTokens | None


class TritonChecks(Checks):
    """Kernels, with scratch that is allocated once; the host hears of everything one look later.

    Of slots that break a chain, the first of each run is reported, not the whole run.
    """

    # How many tokens, slots read, words of one payload and words of a block's payloads a program handles at a time.
    token_tile = 128
    read_tile = 128
    word_tile = 256
    block_tile = 512

    def __init__(
        self, records: Records, ring: ViolationRing, group: int, count: Callable[[str, int, int], None]
    ) -> None:
        """Allocate scratch.

        Raises:
            ValueError: The layout is one that the kernels do not follow; the plain checks do.
        """
        super().__init__(records, ring, group, count)
        self._table = PartTable(records)
        self._tallies = ring.tallies(group)
        self._seen = ring.known_tallies(group)
        self._has_held = self._has_tokens = False
        self._nothing = torch.zeros(1, dtype=torch.int64, device=records.device)
        self._reserved = 0
        self._reserve(min(records.num_slots, _MOST_WRITES))
        self._programs = 4
        if records.device.type == "cuda":
            processors = torch.cuda.get_device_properties(records.device).multi_processor_count
            self._programs = _PROGRAMS_PER_PROCESSOR * processors

    @property
    def num_bytes(self) -> int:
        scratch = (self._kept, self._sums, self._totals, self._flags)
        return self._table.num_bytes + sum(tensor.numel() * tensor.element_size() for tensor in scratch)

    def collect(self) -> None:
        values = self.ring.known_tallies(self.group)
        new = [value - seen for value, seen in zip(values, self._seen, strict=True)]
        self._seen = values
        reads, recorded = new[Tally.READS], new[Tally.RECORDED]
        for check, slots, failed in (
            ("write", 0, sum(new[fault] for fault in _WRITE_FAULTS)),
            ("address", reads, new[Fault.READ_ADDRESS]),
            ("ownership", reads if self._has_held else 0, new[Fault.READ_NOT_HELD]),
            ("unwritten", reads, new[Fault.UNWRITTEN]),
            ("position", reads, new[Fault.POSITION]),
            ("token", reads if self._has_tokens else 0, new[Fault.TOKEN]),
            ("chain", reads, new[Fault.CHAIN] + new[Fault.SEED]),
            ("content", new[Tally.CONTENT], new[Fault.CONTENT]),
            ("transfer", new[Tally.TRANSFER], new[Fault.TRANSFER]),
            ("lost_write", recorded, new[Fault.LOST_WRITE]),
            ("nonfinite", recorded, new[Fault.NONFINITE]),
        ):
            if slots or failed:
                self.count(check, slots, failed)

    def integers(self, values: torch.Tensor) -> torch.Tensor:
        if values.dtype not in (torch.int32, torch.int64):
            values = values.to(torch.int64)
        return values if values.stride(-1) == 1 else values.contiguous()

    def write_rows(self, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
        # The first kernel of the step works them out.
        self._reserve(num_tokens)
        return self._kept[0, :num_tokens]

    def enter(
        self, rows: Rows, writes: Writes, pad_slots: torch.Tensor | None, null_block: int | None, measure_before: bool
    ) -> _Entered:
        tile = self.token_tile
        num_tokens = writes.slots.shape[0]
        num_pads = 0 if pad_slots is None else pad_slots.shape[0]
        entered = _Entered(rows=rows, num_tokens=num_tokens)
        self.count("write", num_tokens, 0)
        if not num_tokens + num_pads:
            return entered
        self._reserve(num_tokens)
        table, num_rows = self._table_of(rows), rows.owners.shape[0]
        known, constants = self._known(rows, writes.known)
        tiles = triton.cdiv(num_tokens, tile)
        check_writes_kernel[(tiles + triton.cdiv(num_pads, tile),)](
            *self._records(), rows.owners, rows.prefix_lens, num_rows, *table, *self._held(rows), rows.references,
            rows.first_holders, writes.offsets, writes.tokens, writes.positions, writes.slots, num_tokens, *known,
            self._nothing if pad_slots is None else pad_slots, num_pads, -1 if null_block is None else null_block,
            *self._kept, self._sums, self._totals, self._flags, *self._ring(rows.step), **constants, TILE=tile,
        )  # fmt: skip
        if not num_tokens:
            return entered
        kept_rows, *kept = self._kept
        arguments = (
            *self._records(), rows.owners, rows.seeds, rows.prefix_lens, num_rows, *table, kept_rows, writes.offsets,
            *kept, num_tokens, self._sums, self._totals,
        )  # fmt: skip
        if measure_before and self.records.views:
            enter_measured_writes_kernel[(num_tokens, 2)](
                *arguments, self.records.fingerprints, len(self.records.views), *self._parts(), self._flags,
                *self._ring(rows.step), int(Tally.RECORDED),
                TILE=tile, WORD=self._table.word, PARTS=triton.next_power_of_2(len(self.records.views)),
                WORD_TILE=self._word_tile(),
            )  # fmt: skip
        else:
            enter_writes_kernel[(tiles,)](*arguments, *self._ring(rows.step), TILE=tile)
        return entered

    def abandon(self, written: _Entered) -> None:
        records, slots = self.records, self._kept[_SLOTS, : written.num_tokens]
        inside = (slots >= 0) & (slots < records.num_slots)
        at = torch.where(inside, slots, 0)
        anew = self._flags[: written.num_tokens] & OTHER_WRITE.value != 0
        # A mask over the pool: a selection has a length that the host would have to wait for.
        fate = torch.zeros(records.num_slots, dtype=torch.int32, device=records.device)
        fate.scatter_reduce_(0, at, torch.where(inside, torch.where(anew, 2, 1), 0).to(torch.int32), "amax")
        records.generation.masked_fill_(fate == 1, UNKNOWN).masked_fill_(fate == 2, 0)
        records.step.masked_fill_(fate != 0, UNKNOWN)
        records.has_unknown = True

    def verify_reads(self, rows: Rows, window: int | None, known: KnownTokens | None) -> _Reads:
        self._has_held, self._has_tokens = rows.held is not None, known is not None
        num_rows = rows.owners.shape[0]
        if num_rows:
            tokens, constants = self._known(rows, known)
            verify_reads_kernel[(self._programs,)](
                *self._records(), rows.owners, rows.seeds, rows.prefix_lens, num_rows, window or 0,
                *self._table_of(rows), *self._held(rows), *tokens, *self._ring(rows.step), int(Tally.READS),
                **constants, ROWS=_lanes(num_rows), TILE=self.read_tile,
            )  # fmt: skip
        return _Reads(window=window, known=known)

    def verify_content(self, rows: Rows, reads: _Reads, due: Sequence[Due]) -> None:
        num_rows = rows.owners.shape[0]
        if not due or not num_rows or not self.records.views:
            return
        first, (remainder, modulus) = due[0]
        step = due[1][0] - first if len(due) > 1 else 1
        tokens, constants = self._known(rows, reads.known)
        verify_content_kernel[(self._programs,)](
            *self._records(), self.records.fingerprints, *self._parts(), rows.owners, rows.seeds, rows.prefix_lens,
            num_rows, reads.window or 0, *self._table_of(rows), *self._held(rows), *tokens, first, step, len(due),
            remainder, modulus, *self._ring(rows.step), int(Tally.CONTENT),
            **constants, ROWS=_lanes(num_rows), **self._block_tile(),
        )  # fmt: skip

    def record_content(self, written: _Entered) -> None:
        records, rows = self.records, written.rows
        if not written.num_tokens or not records.views:
            return
        kept_rows, _, positions, slots = self._kept
        record_content_kernel[(written.num_tokens,)](
            records.table, records.num_blocks, records.block_size, records.fingerprints, len(records.views),
            *self._parts(), slots, positions, kept_rows, rows.owners, self._flags,
            *self._ring(rows.step), int(Tally.RECORDED),
            MEASURE_ONLY=False, WORD=self._table.word, PARTS=triton.next_power_of_2(len(records.views)),
            TILE=self._word_tile(),
        )  # fmt: skip

    def check_null_block(self, parts: range, null_block: int, step: int) -> None:
        records = self.records
        if records.views:
            check_null_block_kernel[(len(parts),)](
                records.table, records.num_blocks, records.block_size, self._table.parts, parts.start, null_block,
                *self._ring(step), **self._block_tile(),
            )  # fmt: skip
        self.count("nonfinite", records.block_size * len(parts), 0)

    def patrol(self, first_block: int, num_blocks: int, part: int, step: int) -> None:
        self._verify_blocks(
            (num_blocks, 1), self._nothing, first_block, part, 0, step, int(Tally.CONTENT), transfer=False
        )

    def verify_transfer(self, blocks: torch.Tensor, owner: int, step: int) -> None:
        grid = (blocks.shape[0], len(self.records.views))
        if all(grid):
            self._verify_blocks(grid, blocks, 0, 0, owner, step, int(Tally.TRANSFER), transfer=True)

    def digest(self, rows: Rows, reads: _Reads) -> torch.Tensor:
        plain = replace(
            rows, prefix_lens=rows.prefix_lens.to(torch.int64), block_table=rows.block_table.to(torch.int64)
        )
        return reference.digest(self.records, plain, reference.plan_reads(self.records, plain, reads.window))

    def _verify_blocks(
        self, grid: tuple[int, int], blocks: torch.Tensor, first_block: int, part: int, owner: int, step: int,
        tally: int, *, transfer: bool,
    ) -> None:  # fmt: skip
        verify_blocks_kernel[grid](
            *self._records(), self.records.fingerprints, *self._parts(), blocks, first_block, part, owner,
            *self._ring(step), tally, TRANSFER=transfer, **self._block_tile(),
        )  # fmt: skip

    # Arguments that kernels share

    def _records(self) -> tuple[Any, ...]:
        records = self.records
        return records.table, records.num_blocks, records.block_size, records.block_generation

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._table.parts, self._table.keys

    def _ring(self, step: int) -> tuple[Any, ...]:
        return self.ring.entries, self.ring.count, self._tallies, self.ring.capacity, self.group, step

    def _table_of(self, rows: Rows) -> tuple[Any, ...]:
        return rows.block_table, rows.block_table.stride(0), rows.block_table.shape[1]

    def _held(self, rows: Rows) -> tuple[Any, ...]:
        if rows.held is None:
            return self._nothing, 0, rows.held_rows
        return rows.held.view(torch.uint8), rows.held.stride(0), rows.held_rows

    def _known(self, rows: Rows, known: KnownTokens | None) -> tuple[tuple[Any, ...], dict[str, bool]]:
        constants = {"HAS_HELD": rows.held is not None, "HAS_TOKENS": known is not None, "HAS_LENGTHS": False}
        if known is None:
            return (self._nothing, 0, 0, self._nothing, self._nothing), constants
        constants["HAS_LENGTHS"] = known.lengths is not None
        lengths = self._nothing if known.lengths is None else known.lengths
        tokens = known.tokens if known.tokens.stride(1) == 1 else known.tokens.contiguous()
        of_rows = self.integers(known.rows), self.integers(lengths)
        return (tokens, tokens.stride(0), tokens.shape[1], *of_rows), constants

    def _word_tile(self) -> int:
        all_words: int = triton.next_power_of_2(self._table.most_words)
        return min(self.word_tile, all_words)

    def _block_tile(self) -> dict[str, int]:
        lanes = _lanes(self.records.block_size)
        return {
            "BLOCK": lanes,
            "WORD": self._table.word,
            "TILE": min(max(1, self.block_tile // lanes), triton.next_power_of_2(self._table.most_words)),
        }

    def _reserve(self, num_tokens: int) -> None:
        """Make sure that scratch suffices; it grows only for a step larger than any before and than was foreseen."""
        if self._reserved >= num_tokens:
            return
        self._reserved = num_tokens
        device = self.records.device
        self._kept = torch.empty((4, num_tokens), dtype=torch.int64, device=device)
        self._sums = torch.empty(num_tokens, dtype=torch.int64, device=device)
        self._totals = torch.empty(triton.cdiv(num_tokens, self.token_tile), dtype=torch.int64, device=device)
        self._flags = torch.empty(num_tokens, dtype=torch.int8, device=device)


def _lanes(count: int) -> int:
    lanes: int = triton.next_power_of_2(count)
    return max(16, lanes)
