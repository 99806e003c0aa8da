"""The checks of one group on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcanary_agent.kernels import reference
from kvcanary_agent.kernels.checks import Checks, Due
from kvcanary_agent.kernels.plan import Fault, KnownTokens, Reads, Rows, Writes, Written
from kvcanary_agent.kernels.records import Records
from kvcanary_agent.kernels.ring import ViolationRing

from .content import ContentChecks
from .few import FEW, few_writes
from .memory import RecordMemory, tensor_of
from .reads import CleanReads, ReadScreen
from .writes import enter_writes, writes_are_clean


class TunedChecks(Checks):
    """Screens that say whether everything is right, with the reference for what they find."""

    def __init__(
        self, records: Records, ring: ViolationRing, group: int, count: Callable[[str, int, int], None]
    ) -> None:
        super().__init__(records, ring, group, count)
        self._memory = RecordMemory(records)
        self._screen = ReadScreen(records)
        self._content = ContentChecks(records, ring, group)
        self._everything = [(part, (0, 1)) for part in range(len(records.views))]

    @property
    def num_bytes(self) -> int:
        return self._screen.num_bytes + self._content.num_bytes

    def integers(self, values: torch.Tensor) -> torch.Tensor:
        return values if values.dtype is torch.int64 else values.to(torch.int64)

    def write_rows(self, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if num_tokens > FEW:
            return super().write_rows(offsets, num_tokens)
        bounds = offsets.tolist()
        counts = map(int.__sub__, bounds[1:], bounds)
        return tensor_of(row for row, count in enumerate(counts) for _ in range(count))

    def enter(
        self,
        rows: Rows,
        writes: Writes,
        pad_slots: torch.Tensor | None,
        null_block: int | None,
        measure_before: bool,
    ) -> Any:
        if measure_before:
            self._content.read_everything()
        few = few_writes(self._memory, rows, writes) if pad_slots is None else None
        if few is None:
            return super().enter(rows, writes, pad_slots, null_block, measure_before)
        if measure_before:
            self._measure(writes.slots)
        with self._screen.changes(few.slots), self._content.changes(few.slots):
            written = few.enter()
        self.count("write", writes.slots.shape[0], 0)
        return written

    def _check_writes(self, rows: Rows, writes: Writes) -> dict[Fault, int]:
        if writes_are_clean(self.records, rows, writes):
            return {}
        return super()._check_writes(rows, writes)

    def _enter_writes(self, rows: Rows, writes: Writes) -> tuple[Written, int]:
        slots = writes.slots.clamp(0, self.records.num_slots - 1)
        with self._screen.changes(slots), self._content.changes(slots):
            return enter_writes(self.records, rows, writes, self.ring, self.group)

    def _measure(self, slots: torch.Tensor) -> None:
        self._content.measure(slots)

    def verify_reads(self, rows: Rows, window: int | None, known: KnownTokens | None) -> CleanReads | Reads:
        reads = self._screen.clean(rows, window, known)
        if reads is None:
            return super().verify_reads(rows, window, known)  # type: ignore[no-any-return]  # the reference's Reads
        self._count_reads(reads.num_slots, {}, rows, known)
        return reads

    def verify_content(self, rows: Rows, reads: Any, due: Sequence[Due]) -> None:
        if isinstance(reads, CleanReads) and due == self._everything:
            self.count("content", *self._content.verify_all(rows, reads))
            return
        for part, block_class in due:
            self.count("content", *self._content.verify(rows, reads, part, block_class))

    def check_null_block(self, parts: range, null_block: int, step: int) -> None:
        for part in parts:
            if self._content.null_block_is_finite(part, null_block):
                self.count("nonfinite", self.records.block_size, 0)
            else:
                super().check_null_block(range(part, part + 1), null_block, step)

    def record_content(self, written: Written) -> None:
        if not written.slots.numel():
            return
        with self._screen.changes(None):
            counts = self._content.record(written)
        for fault, of_fault in counts.items():
            self.count(fault.name.lower(), *of_fault)

    def patrol(self, first_block: int, num_blocks: int, part: int, step: int) -> None:
        self.count("content", *self._content.patrol(first_block, num_blocks, part, step))

    def verify_transfer(self, blocks: torch.Tensor, owner: int, step: int) -> None:
        self.count("transfer", *self._content.verify_transfer(blocks, owner, step))

    def digest(self, rows: Rows, reads: Any) -> torch.Tensor:
        if isinstance(reads, CleanReads):
            reads = reference.plan_reads(self.records, rows, reads.window)
        return super().digest(rows, reads)
