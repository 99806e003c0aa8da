"""Which blocks are full, or empty, of slots that a patrol has to compare, for as long as their records stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from kvcanary_agent.kernels.records import Column, Records

NOTHING, ALL = b"\1", b"\2"
"""No slot of the block, or every one, has a fingerprint that counts."""
_SOME = b"\3"


class BlockStates:
    """Whether the slots of each block have fingerprints that count: most blocks are full, or empty, for a long time."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._states = bytearray(records.num_blocks)
        self._generation = records.block_generation.clone()
        self._versions = self._current_versions()

    @property
    def num_bytes(self) -> int:
        """Bytes of scratch."""
        return self._generation.numel() * self._generation.element_size() + len(self._states)

    @contextmanager
    def changes(self, blocks: Iterable[int]) -> Iterator[None]:
        """Around a change of the records of these blocks alone."""
        self._settle()
        yield
        for block in blocks:
            self._states[block] = 0
        self._versions = self._current_versions()

    def of(self, first: int, count: int) -> bytes:
        """The states of a run of blocks; unless all are `NOTHING` or all are `ALL`, `mask` has more to say."""
        self._settle()
        return bytes(self._states[first : first + count])

    def mask(self, first: int, count: int) -> torch.Tensor:
        """Which slots of a run of blocks have a fingerprint that counts: ``[count, block_size]`` bool."""
        records, run = self._records, slice(first, first + count)
        record = records.table.view(torch.int32).view(records.num_blocks, records.block_size, -1)[run]
        mask = record[..., 2 * Column.PLACE + 1] == records.block_generation[run, None]
        mask.logical_and_(record[..., 2 * Column.STATE] != 0)
        counts = mask.sum(1).tolist()
        self._states[run] = b"".join(
            NOTHING if not of_block else ALL if of_block == records.block_size else _SOME for of_block in counts
        )
        return mask

    def _settle(self) -> None:
        """Forget what has changed without a word."""
        before, self._versions = self._versions, self._current_versions()
        if self._versions[0] != before[0]:
            self._states = bytearray(self._records.num_blocks)
        if self._versions[1] != before[1]:
            generation = self._records.block_generation
            for block in (generation != self._generation).nonzero().view(-1).tolist():
                self._states[block] = 0
            self._generation.copy_(generation)

    def _current_versions(self) -> tuple[int, int]:
        return self._records.table._version, self._records.block_generation._version
