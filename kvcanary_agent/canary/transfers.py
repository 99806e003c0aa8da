"""Records of blocks that are on another tier: in host memory, on disk, on another machine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from kvcanary_agent.kernels.records import Records


class StoredRecords:
    """The records that blocks had when their copy to another tier began, by the key of the copy.

    Kept on the pool's device, at most as many slots as the pool has; the oldest go first.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._kept: OrderedDict[Hashable, tuple[list[torch.Tensor], torch.Tensor]] = OrderedDict()
        self._slots = 0

    def keep(self, key: Hashable, blocks: torch.Tensor) -> None:
        """Remember the records of ``blocks``, ``[n]`` int64."""
        self._drop(key)
        records = self._records
        valid = records.generation.view(-1, records.block_size)[blocks] == records.block_generation[blocks][:, None]
        values = [values.view(-1, records.block_size)[blocks] for values in records.per_slot]
        generation = values[records.generation_index]
        values[records.generation_index] = torch.where(valid, 1, 0).to(generation.dtype)
        prints = records.fingerprints.view(records.fingerprints.shape[0], -1, records.block_size)[:, blocks]
        self._kept[key] = (values, prints)
        self._slots += blocks.numel() * records.block_size
        while self._slots > records.num_slots and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def restore(self, key: Hashable, blocks: torch.Tensor) -> bool:
        """Make what was kept under ``key`` the records of ``blocks``; whether anything was."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        records = self._records
        values, prints = kept
        blocks = blocks[: values[0].shape[0]]
        for target, source in zip(records.per_slot, values, strict=True):
            target.view(-1, records.block_size)[blocks] = source[: blocks.numel()]
        records.fingerprints.view(prints.shape[0], -1, records.block_size)[:, blocks] = prints[:, : blocks.numel()]
        valid = values[records.generation_index][: blocks.numel()] == 1
        generation = torch.where(valid, records.block_generation[blocks][:, None], 0)
        records.generation.view(-1, records.block_size)[blocks] = generation
        return True

    def _drop(self, key: Hashable) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._slots -= kept[0][0].numel()
