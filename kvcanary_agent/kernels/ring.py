"""The device-side buffer that violations wait in until the host looks at them."""

from __future__ import annotations

from enum import IntEnum

import torch

from .plan import Fault
from .transit import Answer, is_asynchronous


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


class Tally(IntEnum):
    """What kernels count beside the faults, each fault at its own number: slots looked at, for each check."""

    READS = len(Fault)
    CONTENT = len(Fault) + 1
    TRANSFER = len(Fault) + 2
    RECORDED = len(Fault) + 3


_TALLIES = len(Fault) + len(Tally)


class ViolationRing:
    """Violations of the steps since the last drain, in the order in which they were found.

    Attributes:
        entries: ``[capacity + 1, len(Field)]`` int64 on the pool's device; the last row takes what does not fit.
        count: ``[1]`` int64: violations appended since the last drain, kept or not.
    """

    def __init__(self, capacity: int, device: torch.device, groups: int = 1) -> None:
        """Make an empty ring for so many groups of layers."""
        self.capacity = capacity
        self.entries = torch.zeros((capacity + 1, len(Field)), dtype=torch.int64, device=device)
        # One tensor, so that one copy brings everything that is counted.
        self._counters = torch.zeros(1 + groups * _TALLIES, dtype=torch.int64, device=device)
        self.count = self._counters[:1]
        self._known = [0] * self._counters.shape[0]
        self._answer, self._entries = Answer(self._counters), Answer(self.entries)
        # Whether the entries are on their way, and the answer that is says how many.
        self._fetching = False

    @property
    def num_bytes(self) -> int:
        return (self.entries.numel() + self._counters.numel()) * self.entries.element_size()

    def tallies(self, group: int) -> torch.Tensor:
        """``[faults and len(Tally)]`` int64: what the kernels of a group have counted, ever; a view."""
        return self._counters[1 + group * _TALLIES :][:_TALLIES]

    def known_tallies(self, group: int) -> list[int]:
        """The values of `tallies` as of the last look."""
        return self._known[1 + group * _TALLIES :][:_TALLIES]

    def append(self, rows: torch.Tensor) -> None:
        """Append ``rows``, ``[n, len(Field)]`` int64."""
        at = torch.arange(rows.shape[0], device=rows.device) + self.count
        self.entries[at.clamp_(max=self.capacity)] = rows
        self.count += rows.shape[0]

    def poll(self) -> tuple[list[list[int]], int]:
        """As `drain`, but a GPU is not waited for: what one look sees is fetched, and returned by the next one."""
        if not is_asynchronous(self.count.device):
            return self.drain()
        found: tuple[list[list[int]], int] = [], 0
        if self._answer.on_its_way:
            known = self._answer.look()
            if known is None:
                return found
            self._known = known
            if self._fetching:
                found = self._fetched()
        self._fetching = self._known[0] > 0
        if self._fetching:
            # In the order of the stream, so nothing can be appended between what is fetched and the empty ring.
            self._entries.ask()
        self._answer.ask()
        if self._fetching:
            self.count.zero_()
        return found

    def drain(self) -> tuple[list[list[int]], int]:
        """Take everything out: the entries, and how many more there were than fit."""
        before: tuple[list[list[int]], int] = [], 0
        if self._fetching:
            self._known = self._answer.look(wait=True)
            before = self._fetched()
        self._known = self._counters.tolist()
        count, self._known[0] = self._known[0], 0
        if count == 0:
            return before
        kept = min(count, self.capacity)
        entries: list[list[int]] = self.entries[:kept].tolist()
        self.count.zero_()
        return before[0] + entries, before[1] + count - kept

    def _fetched(self) -> tuple[list[list[int]], int]:
        self._fetching = False
        count, self._known[0] = self._known[0], 0
        kept = min(count, self.capacity)
        # Sent before the answer that has arrived.
        entries: list[list[int]] = self._entries.look(rows=kept) or []
        return entries, count - kept
