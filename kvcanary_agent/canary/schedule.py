"""Which bytes are due when not every byte is compared at every read."""

from __future__ import annotations

from collections.abc import Callable

from .layout import KVGroup


def scrub_schedule(step: int, parts: int, period: int) -> list[tuple[int, tuple[int, int]]]:
    """What a step scrubs: ``(part, (remainder, modulus))`` pairs, the part in every block of that remainder.

    Over any ``period`` consecutive steps each (block, part) pair is due at least once. A step handles as few parts
    as that allows, because every part is a gather of its own.
    """
    if parts >= period:
        return [(part, (0, 1)) for part in range(step % period, parts, period)]
    modulus = period // parts
    return [(step % parts, (step // parts % modulus, modulus))]


class Patrol:
    """Walks over a group's whole pool, one part after the other, a bounded number of bytes per step.

    A budget of n slots per step buys n times all parts; spent on one part at a time it is one gather instead of many.
    A round over every part of every block takes ``parts * ceil(blocks / blocks per step)`` steps.
    """

    def __init__(self, group: KVGroup) -> None:
        self._parts = len(group.parts)
        self._blocks = group.num_blocks
        self._block_size = group.block_size
        self._block = self._part = 0

    def advance(self, slots_per_step: int, check: Callable[[int, int, int], None]) -> None:
        """Call ``check(first_block, num_blocks, part)`` for what is due in this step."""
        blocks = max(1, slots_per_step * self._parts // self._block_size)
        count = min(blocks, self._blocks - self._block)
        check(self._block, count, self._part)
        self._block += count
        if self._block == self._blocks:
            self._block, self._part = 0, (self._part + 1) % self._parts
