"""Blocks that no later request is to be served from, for adapters that can take them out of the prefix cache."""

from __future__ import annotations

from .violation import Kind, Violation

# These say that an address, a claim of ownership or another rank is wrong, not what a block holds.
_NOT_OF_CONTENTS = frozenset({Kind.ADDRESS, Kind.OWNERSHIP, Kind.RANK})
_MOST = 1 << 16


class Condemned:
    """The blocks of one pool whose contents a violation has shown to be other than their readers expect.

    All calls come from the thread that runs the pool's steps.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], None] = {}

    def hear(self, violation: Violation) -> None:
        """A violation was found; beyond 65,536 blocks that nobody has taken, further ones are left out."""
        if violation.kind not in _NOT_OF_CONTENTS and violation.block >= 0 and len(self._blocks) < _MOST:
            self._blocks[violation.group, violation.block] = None

    def take(self) -> list[tuple[str, int]]:
        """Group and block of all that were found since the last call, in that order."""
        if not self._blocks:
            return []
        taken, self._blocks = list(self._blocks), {}
        return taken
