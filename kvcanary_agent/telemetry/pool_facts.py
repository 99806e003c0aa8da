"""What a pool consists of, as plain data: what a diagnosis and an incident need of its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcanary_agent.canary.layout import KVLayout


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """One group of layers.

    Attributes:
        name, blocks, block_size, null_block, window: As in the layout.
        layers: The names of its layers, in order.
        parts: How many parts a slot has: K, V, scales of each layer.
        bytes_per_slot: Bytes of all parts of one slot.
        dtypes: Of its tensors, sorted.
        device: Of its tensors.
    """

    name: str
    blocks: int
    block_size: int
    null_block: int | None
    window: int | None
    layers: tuple[str, ...]
    parts: int
    bytes_per_slot: int
    dtypes: tuple[str, ...]
    device: str


@dataclass(frozen=True, kw_only=True)
class PoolFacts:
    """Every group of a pool, in its order, whether the adapter tells who holds which block, and of how many ranks it is
    one."""

    groups: tuple[GroupFacts, ...]
    reports_ownership: bool = False
    world_size: int = 1

    @classmethod
    def of(cls, layout: KVLayout) -> PoolFacts:
        groups = tuple(
            GroupFacts(
                name=group.name,
                blocks=group.num_blocks,
                block_size=group.block_size,
                null_block=group.null_block,
                window=group.window,
                layers=tuple(dict.fromkeys(part.layer for part in group.parts)),
                parts=len(group.parts),
                bytes_per_slot=group.bytes_per_slot,
                dtypes=tuple(
                    sorted({str(part.number_type or part.view.dtype).removeprefix("torch.") for part in group.parts})
                ),
                device=str(group.device),
            )
            for group in layout.groups
        )
        return cls(groups=groups, reports_ownership=layout.reports_ownership, world_size=layout.world_size)

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """How many parts a slot has, for each group by its name."""
        return {group.name: group.parts for group in self.groups}


NOTHING_KNOWN = PoolFacts(groups=())
