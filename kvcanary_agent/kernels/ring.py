"""The device-side buffer that violations wait in until the host looks at them."""

from __future__ import annotations

from enum import IntEnum

import torch


class Field(IntEnum):
    """Columns of a ring entry, all int64."""

    KIND = 0
    GROUP = 1
    STEP = 2
    OWNER = 3
    POSITION = 4
    SLOT = 5
    PART = 6
    EXPECTED = 7
    FOUND = 8
    WRITER = 9
    WRITTEN_STEP = 10
    RECORDED_POSITION = 11


class ViolationRing:
    """Violations of the steps since the last drain, in the order in which they were found.

    Attributes:
        entries: ``[capacity + 1, len(Field)]`` int64 on the pool's device; the last row takes what does not fit.
        count: ``[1]`` int64: violations appended since the last drain, kept or not.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.entries = torch.zeros((capacity + 1, len(Field)), dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        return (self.entries.numel() + self.count.numel()) * self.entries.element_size()

    def append(self, rows: torch.Tensor) -> None:
        """Append ``rows``, ``[n, len(Field)]`` int64."""
        at = torch.arange(rows.shape[0], device=rows.device) + self.count
        self.entries[at.clamp_(max=self.capacity)] = rows
        self.count += rows.shape[0]

    def drain(self) -> tuple[list[list[int]], int]:
        """Take everything out: the entries, and how many more there were than fit."""
        count = int(self.count)
        if count == 0:
            return [], 0
        kept = min(count, self.capacity)
        entries: list[list[int]] = self.entries[:kept].tolist()
        self.count.zero_()
        return entries, count - kept
