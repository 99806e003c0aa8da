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


class DelayedCopy:
    """What a small device tensor held when the host looked last: looking never waits for the device."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._on_its_way = False
        if source.device.type == "cuda":
            self._host = torch.zeros(source.shape, dtype=source.dtype, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's, unannotated

    def look(self) -> list[int] | None:
        """The tensor's values, those of the look before on a GPU; None if they are still on their way."""
        if self._source.device.type != "cuda":
            now: list[int] = self._source.tolist()
            return now
        values: list[int] | None = None
        if self._on_its_way:
            if not self._arrived.query():  # type: ignore[no-untyped-call]  # torch's, unannotated
                return None
            values = self._host.tolist()
        self._host.copy_(self._source, non_blocking=True)
        self._arrived.record()
        self._on_its_way = True
        return values


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
        self._copy = DelayedCopy(self.count)

    @property
    def num_bytes(self) -> int:
        return (self.entries.numel() + self.count.numel()) * self.entries.element_size()

    def append(self, rows: torch.Tensor) -> None:
        """Append ``rows``, ``[n, len(Field)]`` int64."""
        at = torch.arange(rows.shape[0], device=rows.device) + self.count
        self.entries[at.clamp_(max=self.capacity)] = rows
        self.count += rows.shape[0]

    def poll(self) -> tuple[list[list[int]], int]:
        """As `drain`, but waits for the device only if there was something at the look before."""
        counts = self._copy.look()
        return self.drain() if counts and counts[0] else ([], 0)

    def drain(self) -> tuple[list[list[int]], int]:
        """Take everything out: the entries, and how many more there were than fit."""
        count = int(self.count)
        if count == 0:
            return [], 0
        kept = min(count, self.capacity)
        entries: list[list[int]] = self.entries[:kept].tolist()
        self.count.zero_()
        return entries, count - kept
