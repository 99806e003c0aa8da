"""Records of blocks that are on another tier: in host memory, on disk, on another machine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from kvcanary_agent.kernels.hashing import mix
from kvcanary_agent.kernels.records import BlockRecords, Records

# How many times larger than the pool the other tiers may be. A record takes about 0.5 % of what it describes.
_TIERS = 64


class StoredRecords:
    """The records that blocks had when their copy to another tier began, by the key of the copy.

    Those of the latest copies are kept on the pool's device, as many slots as the pool has; older ones move to host
    memory, pinned so that nobody waits for the copy, and the oldest of more than `_TIERS` times the pool are forgotten.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._kept: OrderedDict[Hashable, BlockRecords] = OrderedDict()
        self._on_device: OrderedDict[Hashable, None] = OrderedDict()
        self._slots = self._device_slots = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def keep(self, key: Hashable, blocks: torch.Tensor) -> None:
        """Remember the records of ``blocks``, ``[n]`` int64."""
        self.drop(key)
        records = self._records
        kept = self._kept[key] = records.taken_from(blocks)
        self._on_device[key] = None
        self._slots += kept.num_slots
        self._device_slots += kept.num_slots
        while self._device_slots > records.num_slots and len(self._on_device) > 1:
            oldest, _ = self._on_device.popitem(last=False)
            self._device_slots -= self._kept[oldest].num_slots
            self._kept[oldest] = self._kept[oldest].in_host_memory()
        while self._slots > _TIERS * records.num_slots:
            self.drop(next(iter(self._kept)))

    def restore(self, key: Hashable, blocks: torch.Tensor, picked: torch.Tensor | None = None) -> bool:
        """Make what was kept under ``key`` the records of ``blocks``; whether anything was.

        Args:
            key: Of the copy.
            blocks: ``[n]`` int64.
            picked: ``[n]`` int64: which of the kept blocks each of them is; None: the first ones, in order.
        """
        kept = self._kept.get(key)
        if kept is None:
            return False
        if picked is not None:
            self._records.put_into(blocks, kept.on(self._records.device).picked(picked))
            return True
        blocks = blocks[: kept.table.shape[0]]
        self._records.put_into(blocks, kept.first(blocks.shape[0]).on(self._records.device))
        return True

    def drop(self, key: Hashable) -> None:
        """Forget what was kept under ``key``."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        self._slots -= kept.num_slots
        if key in self._on_device:
            del self._on_device[key]
            self._device_slots -= kept.num_slots


def enter_foreign(
    records: Records, blocks: torch.Tensor, tokens: torch.Tensor, *, seed: int, owner: int, step: int
) -> None:
    """Record that ``blocks`` hold ``tokens`` from position 0 on, as if a step had written them; not their bytes.

    Args:
        records: Of the group.
        blocks: ``[n]`` int64.
        tokens: ``[n * block_size]`` int64.
        seed: The chain before position 0.
        owner, step: Of the write.
    """
    size = records.block_size
    slots = (blocks[:, None] * size + torch.arange(size, device=blocks.device)).flatten()
    positions = torch.arange(slots.shape[0], device=blocks.device)
    added = mix(tokens, positions)
    after = added.cumsum(0) + seed
    records.token[slots] = tokens
    records.position[slots] = positions.to(torch.int32)
    records.owner.index_fill_(0, slots, owner)
    records.step.index_fill_(0, slots, step)
    records.seed.index_fill_(0, slots, seed)
    records.chain[slots] = after - added
    records.chain_after[slots] = after
    records.generation[slots] = records.block_generation[blocks][:, None].expand(-1, size).flatten()
    records.fingerprinted.index_fill_(0, slots, 1)
    records.forget_block_prints(blocks)
