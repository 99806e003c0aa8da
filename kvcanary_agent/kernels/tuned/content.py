"""Bytes on a CPU: as few gathers and comparisons as the layout of the parts allows."""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.plan import Fault, Reads, Rows, Written
from kvcanary_agent.kernels.records import UNKNOWN, Column, Records
from kvcanary_agent.kernels.reference.content import report_differences, report_written
from kvcanary_agent.kernels.reference.numbers import has_nonfinite
from kvcanary_agent.kernels.ring import ViolationRing

from .fingerprint import Fingerprinter
from .reads import CleanReads


class ContentChecks:
    """Fingerprints of one group's parts: recorded, and compared."""

    def __init__(self, records: Records, ring: ViolationRing, group: int) -> None:
        self._records, self._ring, self._group = records, ring, group
        self._fingerprinter = Fingerprinter(records.views, records.number_types)
        self._carries_tokens = torch.tensor(records.carries_tokens, dtype=torch.bool)[:, None]

    @property
    def num_bytes(self) -> int:
        """Bytes of scratch."""
        return self._fingerprinter.num_bytes

    def verify(self, rows: Rows, reads: CleanReads | Reads, part: int, block_class: tuple[int, int]) -> tuple[int, int]:
        """Compare one part in the sound slots that the step reads, in blocks of that class.

        Returns:
            Slots compared, and how many of them differ.
        """
        remainder, modulus = block_class
        entries, blocks = None, reads.blocks
        if modulus > 1:
            entries = (blocks % modulus == remainder).nonzero().view(-1)
            blocks = blocks.index_select(0, entries)
        if not blocks.numel():
            return 0, 0
        if isinstance(reads, CleanReads):
            mask = reads.live(entries)
        else:
            mask = reads.sound if entries is None else reads.sound.index_select(0, entries)
        mask = self._comparable(blocks, None) & mask

        def owners(at: torch.Tensor) -> torch.Tensor:
            entry = at if entries is None else entries[at]
            return rows.owners[reads.rows[entry]]

        def positions(at: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
            entry = at if entries is None else entries[at]
            if isinstance(reads, CleanReads):
                return reads.positions(entry).gather(1, offset[:, None]).view(-1)
            return reads.positions[entry, offset]

        differing = self._differing(part, blocks, mask)
        if differing is None:
            return int(mask.sum()), 0
        at, offset = differing[0].nonzero(as_tuple=True)
        self._report(rows.step, part, blocks, differing, owners(at), positions(at, offset))
        return int(mask.sum()), at.shape[0]

    def patrol(self, first_block: int, num_blocks: int, part: int, step: int) -> tuple[int, int]:
        """Compare one part's bytes in a run of blocks, whoever may or may not read them.

        Returns:
            Slots compared, and how many of them differ.
        """
        records = self._records
        run = slice(first_block, first_block + num_blocks)
        generation = records.generation.view(-1, records.block_size)[run]
        written = generation == records.block_generation[run, None]
        blocks = written.any(1).nonzero().view(-1)
        if not blocks.numel():
            return 0, 0
        written = written.index_select(0, blocks)
        blocks += first_block
        mask = self._comparable(blocks, written)
        differing = self._differing(part, blocks, mask)
        if differing is None:
            return int(mask.sum()), 0
        failed = int(differing[0].sum())
        self._report(step, part, blocks, differing, 0, -1)
        return int(mask.sum()), failed

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
            differing = self._differing(part, blocks, mask)
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
        before = records.fingerprints.index_select(1, slots)
        not_finite = self.measure(slots)
        same = records.fingerprints.index_select(1, slots) == before
        records.fingerprinted.index_fill_(0, slots, 1)
        if not not_finite and not bool(same.any()):
            return {Fault.LOST_WRITE: (slots.shape[0], 0), Fault.NONFINITE: (slots.shape[0], 0)}
        unchanged = same.all(0) & written.other_write
        lost = same & self._carries_tokens & (written.other_token & ~unchanged) & (before != 0)
        return report_written(records, written, unchanged, lost, not_finite, self._ring, self._group)

    def measure(self, slots: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Set the fingerprints of ``[n]`` slots to what they hold now.

        Returns:
            For each part that holds numbers that are not finite: which of the slots do, ``[n]`` bool.
        """
        records, fingerprinter = self._records, self._fingerprinter
        size = records.block_size
        block, offset = slots // size, slots % size
        bad: dict[int, torch.Tensor] = {}
        for (length, number_type), stacks in fingerprinter.stacks.items():
            parts = [part for stack in stacks for part in stack.parts]
            at_parts = torch.tensor(parts)[:, None]
            step = fingerprinter.slots_per_chunk(length * len(parts))
            for start in range(0, slots.shape[0], step):
                chunk = slice(start, start + step)
                octets, prints = fingerprinter.of_slots(stacks, block[chunk], offset[chunk])
                records.fingerprints[at_parts, slots[chunk]] = prints
                found = has_nonfinite(octets.view(-1, length), number_type)
                if found is None:
                    continue
                found = found.view(len(parts), -1)
                for index in found.any(1).nonzero().view(-1).tolist():
                    of_part = bad.setdefault(parts[index], torch.zeros_like(slots, dtype=torch.bool))
                    of_part[chunk] = found[index]
        return sorted(bad.items())

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

    def _differing(
        self, part: int, blocks: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Where the fingerprints of whole blocks are not those on record, those on record and those found."""
        records = self._records
        found = self._fingerprinter.of_blocks(part, blocks)
        kept = records.fingerprints[part].view(-1, records.block_size).index_select(0, blocks)
        differs = (found != kept).logical_and_(mask)
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
