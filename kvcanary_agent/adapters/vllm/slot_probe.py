"""Learn where a cache keeps a token's bytes, by writing tokens through the engine's own write path.

Attention backends pack pages as suits their kernels: K and V side by side or apart, K transposed inside a block, heads
inside or outside the block. Nothing in the tensor's shape tells. Writing a token and looking which bytes change does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvcanary_agent.canary.layout import LayoutError

# Two values that differ in every byte of their representation, and in sign, in float32, float16, bfloat16 and both
# 8-bit floats (3F800000 and C0A9999A, for example): every byte of a K or V that changes from one to the other is seen.
_FIRST_VALUE = 1.0
_SECOND_VALUE = -5.3

_SCRATCH_BLOCKS = 2
_MAX_SCRATCH_BYTES = 256 << 20


class WriteToken(Protocol):
    """The engine's own write of one token."""

    def __call__(self, cache: torch.Tensor, slot: int, key: float, value: float) -> None:
        """Write a token whose K is ``key`` and whose V is ``value`` in every element to ``slot`` of ``cache``."""


def learn_parts(cache: torch.Tensor, block_size: int, write: WriteToken) -> dict[str, torch.Tensor]:
    """Views of ``cache`` that show K and V slot by slot.

    Nothing is written to ``cache``: the probes go to a scratch tensor of two blocks with the same strides.

    Args:
        cache: A layer's cache, blocks first, any strides.
        block_size: Slots per block.
        write: The engine's write of one token into a cache of this shape.

    Returns:
        ``{"k": view, "v": view}``, each ``[num_blocks, block_size, *payload]``, views of the cache itself.

    Raises:
        LayoutError: If a slot's bytes do not lie on a regular grid, or the writes leave no trace.
    """
    scratch = _scratch_like(cache)
    slots = [*range(block_size), _SCRATCH_BLOCKS * block_size - 1]
    traces = [_trace(scratch, slot, write) for slot in slots]
    return {
        "k": _view_from_traces(cache, block_size, [k for k, _ in traces], "k"),
        "v": _view_from_traces(cache, block_size, [v for _, v in traces], "v"),
    }


def joined_blocks(view: torch.Tensor, count: int) -> torch.Tensor:
    """A view of blocks, each of which is ``count`` consecutive blocks of ``view``.

    Args:
        view: ``[num_blocks * count, block_size, *payload]``.
        count: At least 1.

    Returns:
        ``[num_blocks, count * block_size, *payload]``.

    Raises:
        LayoutError: If the slots of consecutive blocks do not lie at equal distances.
    """
    if count == 1:
        return view
    blocks, size, *payload = view.shape
    if view.stride(0) != size * view.stride(1):
        raise LayoutError(
            f"a block of {count * size} slots is {count} kernel blocks of {size} that lie {view.stride(0)} elements "
            f"apart, and its slots {view.stride(1)}: they are no single run of slots"
        )
    return view.as_strided((blocks // count, count * size, *payload), (count * view.stride(0), *view.stride()[1:]))


def _scratch_like(cache: torch.Tensor) -> torch.Tensor:
    shape = (_SCRATCH_BLOCKS, *cache.shape[1:])
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, cache.stride(), strict=True))
    if extent * cache.element_size() > _MAX_SCRATCH_BYTES:
        raise LayoutError(
            f"two blocks of a cache of shape {tuple(cache.shape)} and strides {cache.stride()} span "
            f"{extent * cache.element_size()} bytes, more than the {_MAX_SCRATCH_BYTES} that a probe may allocate"
        )
    memory: torch.Tensor = torch.zeros(extent, dtype=cache.dtype, device=cache.device)
    return memory.as_strided(shape, cache.stride())


def _trace(scratch: torch.Tensor, slot: int, write: WriteToken) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte offsets, ascending, that depend on the K and on the V of ``slot``."""
    memory = torch.empty(0, dtype=torch.uint8, device=scratch.device)
    memory.set_(scratch.untyped_storage())
    write(scratch, slot, _FIRST_VALUE, _FIRST_VALUE)
    before = memory.clone()
    write(scratch, slot, _SECOND_VALUE, _FIRST_VALUE)
    key_changed = memory != before
    write(scratch, slot, _FIRST_VALUE, _SECOND_VALUE)
    value_changed = memory != before
    return key_changed.nonzero().flatten().cpu(), value_changed.nonzero().flatten().cpu()


def _view_from_traces(cache: torch.Tensor, block_size: int, traces: Sequence[torch.Tensor], part: str) -> torch.Tensor:
    """The view that ``traces`` (every slot of block 0, then the last slot of block 1) amount to."""
    slots = [_elements(trace, cache.element_size(), part) for trace in traces]
    first, last = slots[0], slots[-1]
    token_stride = int(slots[1][0] - first[0]) if block_size > 1 else 0
    for offset, slot in enumerate(slots[:block_size]):
        if not torch.equal(slot, first + offset * token_stride):
            raise LayoutError(
                f"{part} of the slots of a block do not lie at equal distances: offset {offset} is not "
                f"{offset} x {token_stride} elements from offset 0 (a packing that interleaves tokens)"
            )
    if not torch.equal(last, slots[block_size - 1] + cache.stride(0)):
        raise LayoutError(f"{part} of the second block is not {cache.stride(0)} elements from that of the first")
    sizes, strides = _grid(first - first[0], part)
    return cache.as_strided(
        (cache.shape[0], block_size, *sizes),
        (cache.stride(0), token_stride, *strides),
        cache.storage_offset() + int(first[0]),
    )


def _elements(trace: torch.Tensor, element_size: int, part: str) -> torch.Tensor:
    """Byte offsets as element offsets; every byte of an element belongs to the slot or none does."""
    if trace.numel() == 0:
        raise LayoutError(f"writing a token changed no byte of {part}")
    elements: torch.Tensor = torch.unique(trace // element_size)
    if trace.numel() != elements.numel() * element_size:
        raise LayoutError(f"writing a token changed only parts of the elements of {part}")
    return elements


def _grid(offsets: torch.Tensor, part: str) -> tuple[list[int], list[int]]:
    """Sizes and strides, outermost first, of the regular grid that ascending ``offsets`` (from 0) are."""
    sizes: list[int] = []
    strides: list[int] = []
    while offsets.numel() > 1:
        steps = offsets.diff()
        irregular = (steps != steps[0]).nonzero()
        size = int(irregular[0]) + 1 if irregular.numel() else offsets.numel()
        if offsets.numel() % size:
            raise LayoutError(f"the elements of {part} of a slot do not form a regular grid")
        rows = offsets.view(-1, size)
        if not torch.equal(rows, rows[:, :1] + torch.arange(size) * steps[0]):
            raise LayoutError(f"the elements of {part} of a slot do not form a regular grid")
        sizes.insert(0, size)
        strides.insert(0, int(steps[0]))
        offsets = rows[:, 0].contiguous()
    return sizes, strides
