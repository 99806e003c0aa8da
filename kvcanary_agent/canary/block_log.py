"""What happened to blocks lately, for reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .violation import BlockEvent

_MAX_EVENTS = 8192
_MAX_BLOCKS = 1 << 18
"""Block numbers that all remembered events together may name: 2 MiB of references."""
_SHOWN = 12


class BlockLog:
    """The last events of a group's blocks: one append for an event, however many blocks; searched for a report only."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, str, str | None, tuple[int, ...]]] = deque()
        self._num_blocks = 0

    def note(self, step: int, event: str, request: str | None, blocks: Sequence[int]) -> None:
        """Remember an event."""
        if not blocks:
            return
        self._events.append((step, event, request, tuple(blocks)))
        self._num_blocks += len(blocks)
        while len(self._events) > _MAX_EVENTS or self._num_blocks > _MAX_BLOCKS:
            self._num_blocks -= len(self._events.popleft()[3])

    def of(self, block: int) -> tuple[BlockEvent, ...]:
        """The last events of one block, oldest first."""
        found: list[BlockEvent] = []
        for step, event, request, blocks in reversed(self._events):
            if block in blocks:
                found.append(BlockEvent(step, event, request))
                if len(found) == _SHOWN:
                    break
        return tuple(reversed(found))
