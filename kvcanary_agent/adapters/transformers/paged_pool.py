"""The pool of continuous batching: where each layer's pages are in the one tensor that all groups of layers share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from kvcanary_agent.canary.layout import KVGroup, KVLayout, KVPart

ENGINE = "transformers"
# The block that padded reads touch, and that is never written.
_READ_TRASH_BLOCK = 0


class NotCovered(Exception):
    """A reason, in words, why a pool or a group of its layers is not covered."""


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """A group of layers of the canary, and the engine's allocator of its blocks.

    Attributes:
        attention: The engine's name of the kind of attention.
        allocator: A ``CacheAllocator``.
        group: What the canary knows of it.
    """

    attention: str
    allocator: Any
    group: KVGroup

    @property
    def ring(self) -> int | None:
        """How many positions a request's pages hold before they are written over, for sliding windows."""
        return self.group.window


def engine_version() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", ""))


def describe_groups(cache: Any) -> tuple[tuple[PagedGroup, ...], dict[str, str]]:
    """The groups of a ``PagedAttentionCache``, and what is left out of them and why.

    Raises:
        NotCovered: If nothing of the pool can be checked.
    """
    groups, left_out = [], {}
    for name, allocator in cache.cache_allocators.items():
        try:
            groups.append(PagedGroup(name, allocator, _describe(allocator)))
        except NotCovered as reason:
            left_out[f"{name} layers"] = str(reason)
    if not groups:
        raise NotCovered("; ".join(sorted(set(left_out.values()))) or "it has no layers")
    return tuple(groups), left_out


def layout_of(groups: tuple[PagedGroup, ...], left_out: dict[str, str], distributed: Any) -> KVLayout:
    """The layout of the pool.

    Args:
        groups, left_out: As from `describe_groups`.
        distributed: The engine's ``DistributedHelper``.
    """
    return KVLayout(
        engine=ENGINE,
        engine_version=engine_version(),
        groups=tuple(each.group for each in groups),
        rank=int(getattr(distributed, "tp_rank", 0)),
        world_size=int(getattr(distributed, "tp_size", 1)),
        reports_ownership=True,
        not_covered=left_out,
    )


def _describe(allocator: Any) -> KVGroup:
    kind = type(allocator).__name__
    if kind not in _NAMES:
        raise NotCovered(f"an allocator of class {kind}")
    size, window = allocator.tokens_per_page, getattr(allocator, "sliding_window", None)
    if window is not None and window % size:
        raise NotCovered(f"a window of {window} tokens does not end with a page of {size}")
    parts = [
        KVPart(layer=f"layers.{layer}", part=part, view=_by_block(allocator, rows))
        for layer in allocator.layer_indices
        for part, rows in zip(("k", "v"), allocator._kv_token_views[layer], strict=True)
    ]
    return KVGroup(name=_NAMES[kind], block_size=size, parts=tuple(parts), null_block=_READ_TRASH_BLOCK, window=window)


def _by_block(allocator: Any, rows: torch.Tensor) -> torch.Tensor:
    """``[blocks, page, heads, dim]`` of a layer's keys or values, trash included.

    Args:
        allocator: Of the layer.
        rows: ``[rows, heads, dim]``, from the layer's first row on; one block is ``block_physical_stride`` of them.
    """
    size, stride = allocator.tokens_per_page, allocator.block_physical_stride
    blocks = (rows.shape[0] - size) // stride + 1
    return rows.as_strided((blocks, size, *rows.shape[1:]), (stride * rows.stride(0), *rows.stride()))


_NAMES = {"FullAttentionCacheAllocator": "full", "SlidingAttentionCacheAllocator": "sliding_window"}
"""The classes of allocators whose ways are known, and the groups' names in reports."""
