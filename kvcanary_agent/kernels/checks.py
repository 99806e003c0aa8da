"""One interface to the checks of a group, whatever carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcanary_agent.kernels import reference

from .plan import Fault, KnownTokens, Rows, Writes, Written
from .records import UNKNOWN, Records
from .ring import ViolationRing

Due = tuple[int, tuple[int, int]]
"""A part, and of which blocks: those whose number leaves this remainder when divided by this modulus."""


class Checks:
    """The checks of one group in plain torch, on any device: what the other implementations are measured against.

    Each method counts, through ``count(check, slots, failed)``, what it has looked at, and appends what is wrong to the
    ring.
    """

    def __init__(
        self, records: Records, ring: ViolationRing, group: int, count: Callable[[str, int, int], None]
    ) -> None:
        """Check one group.

        Args:
            records: Of the group.
            ring: Where violations go.
            group: The group's index, for the ring's entries.
            count: Hears how many slots each check has looked at, and how many of them failed.
        """
        self.records, self.ring, self.group, self.count = records, ring, group, count

    @property
    def num_bytes(self) -> int:
        """Bytes of scratch."""
        return 0

    def integers(self, values: torch.Tensor) -> torch.Tensor:
        """An engine's integers in the form that the other methods take: int64."""
        return values.to(torch.int64)

    def write_rows(self, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The row of each of a step's new tokens, ``[num_tokens]`` int64, or memory for it.

        Args:
            offsets: As `Writes` has them.
        """
        # Told how many there are, a device need not be waited for.
        return torch.repeat_interleave(offsets[1:] - offsets[:-1], output_size=num_tokens)

    def enter(
        self,
        rows: Rows,
        writes: Writes,
        pad_slots: torch.Tensor | None,
        null_block: int | None,
        measure_before: bool,
    ) -> Any:
        """Check every write and where padding goes, before it happens; then record who writes what.

        Args:
            rows, writes: Of the step; the engine's numbers as `integers` makes them, the rows from `write_rows`.
            pad_slots: ``[any]``, also from `integers`: where rows beyond the batch write; None if there are none.
            null_block: Where they may.
            measure_before: Fingerprint first what the written slots hold now, so that a lost write can be seen even
                where nobody has ever recorded anything.

        Returns:
            What `record_content` or `abandon` takes.
        """
        failed = self._check_writes(rows, writes)
        if pad_slots is not None:
            failed |= reference.check_padding(self.records, pad_slots, null_block, rows.step, self.ring, self.group)
        if measure_before:
            slots = writes.slots
            self._measure(slots[(slots >= 0) & (slots < self.records.num_slots)])
        written, overwritten = self._enter_writes(rows, writes)
        self.count("write", writes.slots.shape[0], sum(failed.values()) + overwritten)
        return written

    def abandon(self, written: Any) -> None:
        """Nobody knows what the forward has written.

        A slot that was to hold something else than before counts as unwritten; one that was to be given the same once
        more, or was abandoned before, is not judged until it is written anew.
        """
        records = self.records
        records.generation[written.slots] = torch.where(written.other_write, 0, UNKNOWN).to(torch.int32)
        records.step[written.slots] = UNKNOWN
        records.has_unknown = True

    def verify_reads(self, rows: Rows, window: int | None, known: KnownTokens | None) -> Any:
        """Check the metadata of every slot that the step reads; returns what the other methods take as ``reads``."""
        reads = reference.plan_reads(self.records, rows, window)
        expected = None
        if known is not None:
            expected = reference.known_at(known, reads.rows[:, None], reads.positions)
        failed = reference.verify_metadata(self.records, rows, reads, expected, self.ring, self.group)
        self._count_reads(int(reads.live.sum()), failed, rows, known)
        return reads

    def verify_content(self, rows: Rows, reads: Any, due: Sequence[Due]) -> None:
        """Compare the bytes of the due parts in the sound slots that the step reads."""
        for part, block_class in due:
            self.count(
                "content",
                *reference.verify_content(self.records, rows, reads, part, self.ring, self.group, block_class),
            )

    def record_content(self, written: Any) -> None:
        """Fingerprint what the forward has written, and check that it was written and is finite."""
        if not written.slots.numel():
            return
        for fault, counts in reference.record_content(self.records, written, self.ring, self.group).items():
            self.count(fault.name.lower(), *counts)

    def check_null_block(self, parts: range, null_block: int, step: int) -> None:
        """Check that the null block holds finite numbers in these parts, which follow each other."""
        for part in parts:
            self.count(
                "nonfinite", *reference.check_null_block(self.records, part, null_block, step, self.ring, self.group)
            )

    def patrol(self, first_block: int, num_blocks: int, part: int, step: int) -> None:
        """Compare one part's bytes in a run of blocks."""
        self.count(
            "content", *reference.patrol(self.records, first_block, num_blocks, part, self.ring, self.group, step)
        )

    def verify_transfer(self, blocks: torch.Tensor, owner: int, step: int) -> None:
        """Compare what came back into ``blocks`` with the records that came along."""
        self.count("transfer", *reference.verify_transfer(self.records, blocks, owner, step, self.ring, self.group))

    def measure(self, blocks: torch.Tensor) -> None:
        """Fingerprint what is in ``blocks``, ``[n]`` int64, now, and take it for what was written."""
        slots = blocks[:, None] * self.records.block_size + torch.arange(self.records.block_size, device=blocks.device)
        self._measure(slots.flatten())

    def collect(self) -> None:
        """Count what is known of by now; for checks that the host does not wait for."""

    def digest(self, rows: Rows, reads: Any) -> torch.Tensor:
        """What each row reads, in one number per row: ``[rows]`` int64."""
        return reference.digest(self.records, rows, reads)

    def _check_writes(self, rows: Rows, writes: Writes) -> dict[Fault, int]:
        return reference.check_writes(self.records, rows, writes, self.ring, self.group)

    def _enter_writes(self, rows: Rows, writes: Writes) -> tuple[Written, int]:
        return reference.enter_writes(self.records, rows, writes, self.ring, self.group)

    def _measure(self, slots: torch.Tensor) -> None:
        reference.remeasure(self.records, slots)

    def _count_reads(self, slots: int, failed: dict[Fault, int], rows: Rows, known: KnownTokens | None) -> None:
        count = self.count
        count("address", slots, failed.get(Fault.READ_ADDRESS, 0))
        if rows.held is not None:
            count("ownership", slots, failed.get(Fault.READ_NOT_HELD, 0))
        count("unwritten", slots, failed.get(Fault.UNWRITTEN, 0))
        count("position", slots, failed.get(Fault.POSITION, 0))
        if known is not None:
            count("token", slots, failed.get(Fault.TOKEN, 0))
        count("chain", slots, failed.get(Fault.CHAIN, 0) + failed.get(Fault.SEED, 0))
