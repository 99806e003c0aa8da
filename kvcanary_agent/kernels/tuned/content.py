"""Bytes on a CPU: as few gathers and comparisons as the layout of the parts allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvcanary_agent.kernels.plan import Fault, Reads, Rows, Written
from kvcanary_agent.kernels.records import UNKNOWN, Column, Records
from kvcanary_agent.kernels.reference.content import report_differences, report_written
from kvcanary_agent.kernels.reference.numbers import has_nonfinite
from kvcanary_agent.kernels.ring import ViolationRing

from .few import FEW
from .fingerprint import Fingerprinter
from .images import BlockPrints
from .memory import RecordMemory, numbers_in, tensor_of
from .reads import CleanReads
from .states import ALL, NOTHING, BlockStates

_FEW_SLOTS = 4 * FEW
"""Up to so many slots are compared one by one."""


class ContentChecks:
    """Fingerprints of one group's parts: recorded, and compared."""

    def __init__(self, records: Records, ring: ViolationRing, group: int) -> None:
        self._records, self._ring, self._group = records, ring, group
        self._fingerprinter = Fingerprinter(records.views, records.number_types)
        self._carries_tokens = torch.tensor(records.carries_tokens, dtype=torch.bool)[:, None]
        self._blocks = BlockPrints(records, self._fingerprinter)
        self._states = BlockStates(records)
        self._memory = RecordMemory(records)
        self._prints = numbers_in(records.fingerprints)
        self._all_prints = records.fingerprints.view(-1)
        # The parts that are gathered together, and where among all fingerprints theirs begin, ``[parts, 1]`` int64.
        self._parts_of: dict[tuple[int, torch.dtype], tuple[list[int], torch.Tensor]] = {}
        for kind, stacks in self._fingerprinter.stacks.items():
            parts = [part for stack in stacks for part in stack.parts]
            self._parts_of[kind] = parts, torch.tensor(parts)[:, None] * records.num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of scratch."""
        return self._fingerprinter.num_bytes + self._blocks.num_bytes + self._states.num_bytes

    @contextmanager
    def changes(self, slots: torch.Tensor | Sequence[int]) -> Iterator[None]:
        """Around a change of the records of ``[n]`` slots, which the step will write to."""
        size = self._records.block_size
        if isinstance(slots, torch.Tensor):
            at = slots // size
            self._records.forget_block_prints(at)
            blocks = set(at.tolist())
        else:
            blocks = {slot // size for slot in slots}
            self._blocks.forget(blocks)
        with self._states.changes(blocks):
            yield

    def read_everything(self) -> None:
        """From now on every step compares all bytes that it reads."""
        self._blocks.join_neighbours()

    def verify(self, rows: Rows, reads: CleanReads | Reads, part: int, block_class: tuple[int, int]) -> tuple[int, int]:
        """Compare one part in the sound slots that the step reads, in blocks of that class.

        Returns:
            Slots compared, and how many of them differ.
        """
        if isinstance(reads, CleanReads):
            return self._verify_clean(rows, reads, part, block_class)
        remainder, modulus = block_class
        entries = None
        if modulus > 1:
            entries = (reads.blocks % modulus == remainder).nonzero().view(-1)
            if not entries.numel():
                return 0, 0
        return self._verify_slots(rows, reads, part, entries)

    def _verify_clean(self, rows: Rows, reads: CleanReads, part: int, block_class: tuple[int, int]) -> tuple[int, int]:
        if not reads.num_slots:
            return 0, 0  # of a block table that nobody has looked at
        due = reads.due(block_class)
        if not due.num_slots:
            return 0, 0
        changed = self._blocks.changed(part, due.blocks)
        if changed is None:
            return due.num_slots, 0
        if changed.shape[0] == due.blocks.shape[0]:
            return self._verify_slots(rows, reads, part, due.entries)
        entries = changed if due.entries is None else due.entries.index_select(0, changed)
        spans = reads.spans(entries)
        checked = due.num_slots - sum(end - begin for begin, end in spans)
        if entries.shape[0] * self._records.block_size <= _FEW_SLOTS:
            few = self._few_as_recorded(part, due.blocks.index_select(0, changed), spans)
            if few is not None:
                return checked + few, 0
        counts = self._verify_slots(rows, reads, part, entries)
        return checked + counts[0], counts[1]

    def _few_as_recorded(self, part: int, blocks: torch.Tensor, spans: Sequence[tuple[int, int]]) -> int | None:
        """Compare a few blocks, each in the slots of its span, one after the other.

        Returns:
            How many slots were compared, all of them as recorded; None is no verdict.
        """
        size, memory = self._records.block_size, self._memory
        prints = self._fingerprinter.of_blocks(part, blocks).view(-1).tolist()
        first, checked, whole = part * self._records.num_slots, 0, []
        for index, (block, (begin, end)) in enumerate(zip(blocks.tolist(), spans, strict=True)):
            found = prints[index * size + begin : index * size + end]
            at = block * size + begin
            kept = self._prints[first + at : first + at + len(found)].tolist()
            counts = memory.have_prints(block, begin, end)
            if found != kept:
                if any(count and one != other for one, other, count in zip(found, kept, counts, strict=True)):
                    return None
            elif len(found) == size and all(counts):
                whole.append(index)
            checked += sum(counts)
        if whole:
            self._blocks.remember(blocks[whole], part)
        return checked

    def verify_all(self, rows: Rows, reads: CleanReads) -> tuple[int, int]:
        """Compare all parts in all slots that the step reads; a block that several rows read, once for all of them.

        Returns:
            Payloads compared, and how many of them differ.
        """
        records, parts = self._records, len(self._records.views)
        if not reads.num_slots:
            return 0, 0
        changed = self._blocks.changed_in_any_part(reads.blocks)
        if changed is None:
            return reads.num_slots * parts, 0
        entries = changed.index_select(0, reads.blocks).nonzero().view(-1)
        unchanged = (reads.num_slots - reads.num_live(entries)) * parts
        blocks, mask = reads.blocks.index_select(0, entries), reads.live(entries)
        mask.logical_and_(self._comparable(blocks, None))
        slots = (blocks * records.block_size)[:, None] + torch.arange(records.block_size)
        if not self._as_recorded(slots[mask]):
            checked, failed = self._verify_parts(rows, reads, entries)
            return unchanged + checked, failed
        self._blocks.remember(blocks[mask.all(1)])
        return unchanged + int(mask.sum()) * parts, 0

    def _verify_parts(self, rows: Rows, reads: CleanReads, entries: torch.Tensor) -> tuple[int, int]:
        counts = [self._verify_slots(rows, reads, part, entries) for part in range(len(self._records.views))]
        return sum(checked for checked, _ in counts), sum(failed for _, failed in counts)

    def _as_recorded(self, slots: torch.Tensor) -> bool:
        """Whether ``[n]`` slots have, in all parts, the fingerprints on record."""
        return all(torch.equal(prints, self._all_prints.take(at)) for at, prints, _, _ in self._prints_of(slots))

    def _verify_slots(
        self, rows: Rows, reads: CleanReads | Reads, part: int, entries: torch.Tensor | None
    ) -> tuple[int, int]:
        """Compare one part in the sound slots of all or of ``[n]`` entries, one slot after the other."""
        blocks = reads.blocks if entries is None else reads.blocks.index_select(0, entries)
        if isinstance(reads, CleanReads):
            mask = reads.live(entries)
        else:
            mask = reads.sound if entries is None else reads.sound.index_select(0, entries)
        written = self._comparable(blocks, None)
        mask = written & mask
        differing = self._differing(part, blocks, mask, written)
        if differing is None:
            return int(mask.sum()), 0
        at, offset = differing[0].nonzero(as_tuple=True)
        entry = at if entries is None else entries[at]
        if isinstance(reads, CleanReads):
            position = reads.positions(entry).gather(1, offset[:, None]).view(-1)
        else:
            position = reads.positions[entry, offset]
        self._report(rows.step, part, blocks, differing, rows.owners[reads.rows[entry]], position)
        return int(mask.sum()), at.shape[0]

    def patrol(self, first_block: int, num_blocks: int, part: int, step: int) -> tuple[int, int]:
        """Compare one part's bytes in a run of blocks, whoever may or may not read them.

        Returns:
            Slots compared, and how many of them differ.
        """
        of_blocks = self._states.of(first_block, num_blocks)
        if of_blocks == NOTHING * num_blocks:
            return 0, 0
        blocks = torch.arange(first_block, first_block + num_blocks)
        if of_blocks == ALL * num_blocks:
            mask, checked = None, num_blocks * self._records.block_size
        else:
            mask = self._states.mask(first_block, num_blocks)
            checked = int(mask.sum())
            if not checked:
                return 0, 0
            some = mask.any(1).nonzero().view(-1)
            blocks, mask = blocks.index_select(0, some), mask.index_select(0, some)
        changed = self._blocks.changed(part, blocks)
        if changed is None:
            return checked, 0
        blocks, size = blocks.index_select(0, changed), self._records.block_size
        few = blocks.shape[0] * size <= _FEW_SLOTS
        if few and self._few_as_recorded(part, blocks, [(0, size)] * blocks.shape[0]) is not None:
            return checked, 0
        every = torch.ones((blocks.shape[0], size), dtype=torch.bool)
        mask = every if mask is None else mask.index_select(0, changed)
        differing = self._differing(part, blocks, mask, mask)
        if differing is None:
            return checked, 0
        failed = int(differing[0].sum())
        self._report(step, part, blocks, differing, 0, -1)
        return checked, failed

    def verify_transfer(self, blocks: torch.Tensor, owner: int, step: int) -> tuple[int, int]:
        """Compare all parts of whole blocks with the records that came along.

        Returns:
            Payloads compared, and how many of them differ.
        """
        records = self._records
        generation = records.generation.view(-1, records.block_size)[blocks]
        mask = self._comparable(blocks, generation == records.block_generation[blocks][:, None])
        positions = records.position.view(-1, records.block_size)[blocks].to(torch.int64)
        failed = 0
        for part in range(len(records.views)):
            differing = self._differing(part, blocks, mask, mask)
            if differing is None:
                continue
            failed += int(differing[0].sum())
            self._report(step, part, blocks, differing, owner, positions[differing[0]], Fault.TRANSFER)
        return int(mask.sum()) * len(records.views), failed

    def record(self, written: Written) -> dict[Fault, tuple[int, int]]:
        """Fingerprint what the forward has written, and check that it was written and is finite.

        Returns:
            Slots checked and failed, for `Fault.LOST_WRITE` and `Fault.NONFINITE`.
        """
        records, slots = self._records, written.slots
        blocks = set((slots // records.block_size).tolist())
        with self._states.changes(blocks):
            records.fingerprinted.index_fill_(0, slots, 1)
        before, not_finite, any_same = self._set_prints(slots)
        # Fewer cannot fill a block.
        if slots.shape[0] >= records.block_size + len(blocks) - 1:
            self._blocks.remember_written(slots)
        if not not_finite and not any_same:
            return {Fault.LOST_WRITE: (slots.shape[0], 0), Fault.NONFINITE: (slots.shape[0], 0)}
        same = records.fingerprints.index_select(1, slots) == before
        unchanged = same.all(0) & written.other_write
        lost = same & self._carries_tokens & (written.other_token & ~unchanged) & (before != 0)
        return report_written(records, written, unchanged, lost, not_finite, self._ring, self._group)

    def measure(self, slots: torch.Tensor) -> None:
        """Set the fingerprints of ``[n]`` slots to what they hold now."""
        for at, prints, _, _ in self._prints_of(slots):
            self._all_prints.put_(at, prints)

    def _set_prints(self, slots: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]], bool]:
        """Set the fingerprints of ``[n]`` slots to what they hold now.

        Returns:
            What they were, ``[parts, n]`` int64; for each part that holds numbers that are not finite, which of the
            slots do, ``[n]`` bool; and whether any fingerprint is what it was.
        """
        before = self._records.fingerprints.index_select(1, slots)
        bad: dict[int, torch.Tensor] = {}
        any_same = False
        for at, prints, (parts, chunk), (octets, number_type) in self._prints_of(slots):
            if not any_same:
                # Of two writes to one slot, the second finds what the first has left: that is no harm, as it only asks
                # for a closer look.
                any_same = bool((self._all_prints.take(at) == prints).any())
            self._all_prints.put_(at, prints)
            if _is_finite(octets, number_type):
                continue
            found = has_nonfinite(octets, number_type)
            if found is None:
                continue
            found = found.view(len(parts), -1)
            for index in found.any(1).nonzero().view(-1).tolist():
                of_part = bad.setdefault(parts[index], torch.zeros_like(slots, dtype=torch.bool))
                of_part[chunk] = found[index]
        return before, sorted(bad.items()), any_same

    def _prints_of(
        self, slots: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[list[int], slice], tuple[torch.Tensor, torch.dtype]]]:
        """What ``[n]`` slots hold, some parts and some slots at a time.

        Yields:
            Where among all fingerprints those of these parts and slots are, ``[parts, slots]`` int64; what they are, of
            that shape; the parts, and which of the slots; and the payloads, ``[parts * slots, bytes]`` uint8, with the
            type of their numbers.
        """
        size, fingerprinter, count = self._records.block_size, self._fingerprinter, slots.shape[0]
        if count <= FEW:
            numbers = slots.tolist()
            block = tensor_of([slot // size for slot in numbers])
            offset = tensor_of([slot % size for slot in numbers])
        else:
            block = slots // size
            offset = slots - block * size
        for (length, number_type), stacks in fingerprinter.stacks.items():
            parts, first = self._parts_of[length, number_type]
            step = fingerprinter.slots_per_chunk(length * len(parts))
            if 0 < count <= step:
                octets, prints = fingerprinter.of_slots(stacks, block, offset)
                yield first + slots, prints, (parts, slice(None)), (octets.view(-1, length), number_type)
                continue
            for start in range(0, count, step):
                chunk = slice(start, start + step)
                octets, prints = fingerprinter.of_slots(stacks, block[chunk], offset[chunk])
                yield first + slots[chunk], prints, (parts, chunk), (octets.view(-1, length), number_type)

    def _comparable(self, blocks: torch.Tensor, written: torch.Tensor | None) -> torch.Tensor:
        """Which slots of these blocks have a fingerprint that counts: ``[n, block_size]`` bool."""
        records = self._records
        size, width = records.block_size, records.table.shape[1]
        taken = records.table.view(records.num_blocks, -1).index_select(0, blocks).view(torch.int32)
        taken = taken.view(-1, size, 2 * width)
        mask = taken[..., 2 * Column.STATE] != 0
        if written is not None:
            mask &= written
        elif records.has_unknown:
            mask &= taken[..., 2 * Column.PLACE + 1] != UNKNOWN
        return mask

    def null_block_is_finite(self, part: int, null_block: int) -> bool:
        """Whether the sum of one part's numbers in the null block is finite; False is no verdict."""
        return self._blocks.is_finite(part, null_block)

    def _differing(
        self, part: int, blocks: torch.Tensor, mask: torch.Tensor, written: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Where the fingerprints of whole blocks are not those on record, those on record and those found.

        Args:
            part: Index of the part.
            blocks: ``[n]`` int64.
            mask, written: ``[n, block_size]`` bool: which slots to compare, and which have a fingerprint that counts.
        """
        records = self._records
        found = self._fingerprinter.of_blocks(part, blocks)
        kept = records.fingerprints[part].view(-1, records.block_size).index_select(0, blocks)
        same = found == kept
        whole = same.logical_and(written).all(1)
        if bool(whole.any()):
            self._blocks.remember(blocks[whole], part)
        differs = same.logical_not_().logical_and_(mask)
        return (differs, kept, found) if bool(differs.any()) else None

    def _report(
        self,
        step: int,
        part: int,
        blocks: torch.Tensor,
        differing: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        owner: torch.Tensor | int,
        position: torch.Tensor | int,
        fault: Fault = Fault.CONTENT,
    ) -> None:
        report_differences(
            self._records, self._ring, self._group, step, part, blocks, differing, owner, position, fault
        )


def _is_finite(octets: torch.Tensor, number_type: torch.dtype) -> bool:
    """Whether the sum of numbers, ``[rows, bytes]`` uint8, is finite, so that all are; False is no verdict."""
    if number_type is not torch.float32 and number_type is not torch.bfloat16:
        return False
    return math.isfinite(octets.view(number_type).sum(dtype=torch.float32).item())
