"""Describe the KV pool of an SGLang model runner: which bytes each slot has, in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcanary_agent.adapters.sglang.allocator import allocators_of
from kvcanary_agent.canary.layout import KVGroup, KVLayout, KVPart

# Page 0 is never handed out: padding rows write to its first slot.
NULL_PAGE = 0

# Beside its keys, a page of the DSA index holds one float32 scale for each block of this many key elements.
_INDEX_QUANT_BLOCK = 128


class NotCovered(Exception):
    """Something that this adapter does not check yet; the message is the reason."""


@dataclass(slots=True)
class _Description:
    """What is found while a pool is described.

    Attributes:
        page_size: Slots per page.
        parts: Parts found so far.
        left_out: Layers or buffers that are not checked, with the reason.
    """

    page_size: int
    parts: list[KVPart] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, layer: str, part: str, view: torch.Tensor, number_type: torch.dtype | None = None) -> None:
        """Enter a view ``[pages, page_size, *payload]``; buffers without rows are placeholders and left out."""
        if view.numel():
            self.parts.append(KVPart(layer=layer, part=part, view=view, number_type=number_type))

    def by_slot(self, buffer: torch.Tensor) -> torch.Tensor:
        """A ``[slots, ...]`` buffer as ``[pages, page_size, ...]``; rows beyond the last whole page are padding."""
        pages = buffer.shape[0] // self.page_size
        return buffer[: pages * self.page_size].view(pages, self.page_size, *buffer.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """A runner's pool.

    Attributes:
        layout: What the canary checks: one group, or full attention and a sliding window.
        sliding: The index of the sliding-window group in ``layout.groups``; None if there is none.
        allocators: The allocator of each group; empty if they cannot be followed.
    """

    layout: KVLayout
    sliding: int | None
    allocators: Sequence[Any]


def describe_pool(runner: Any) -> Pool:
    """Describe the pool of a ``ModelRunner`` whose memory pools are allocated.

    Raises:
        NotCovered: If nothing of the pool can be checked.
        LayoutError: If what was found contradicts itself.
    """
    pool = runner.token_to_kv_pool
    groups, left_out = describe_groups(pool, _window(runner))
    sliding = next((index for index, group in enumerate(groups) if group.window is not None), None)
    allocators = allocators_of(runner.token_to_kv_pool_allocator, sliding)
    if allocators is None:
        left_out["allocator"] = f"an allocator of class {type(runner.token_to_kv_pool_allocator).__name__}"
    rank, world_size = _tensor_parallel_rank()
    layout = KVLayout(
        engine="sglang",
        engine_version=_version(),
        groups=groups,
        rank=rank,
        world_size=world_size,
        reports_occupancy=allocators is not None,
        not_covered=left_out,
    )
    return Pool(layout=layout, sliding=sliding, allocators=allocators or ())


def _tensor_parallel_rank() -> tuple[int, int]:
    from sglang.srt.distributed import parallel_state

    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _version() -> str:
    import sglang

    return str(sglang.__version__)


def _window(runner: Any) -> int | None:
    """How many tokens a query of a sliding-window layer sees, itself included.

    The engine counts the tokens before the query.
    """
    size = runner.sliding_window_size
    return None if size is None or size < 0 else int(size) + 1


def describe_groups(pool: Any, window: int | None = None) -> tuple[tuple[KVGroup, ...], dict[str, str]]:
    """The groups of layers of a pool object, and what is left out, with reasons.

    Args:
        pool: A ``KVCache`` of the engine.
        window: The tokens that its sliding-window layers see; needed by pools that free what has left the window.

    Raises:
        NotCovered: If nothing of the pool can be checked.
    """
    left_out: dict[str, str] = {}
    groups = []
    for name, part_of_pool, group_window, layer_names in _sub_pools(pool, window):
        found = _Description(int(part_of_pool.page_size))
        _describe(part_of_pool, layer_names, found)
        left_out.update(found.left_out)
        if found.parts:
            pages = min(part.view.shape[0] for part in found.parts)
            groups.append(
                KVGroup(
                    name=name,
                    block_size=found.page_size,
                    parts=tuple(dataclasses.replace(part, view=part.view[:pages]) for part in found.parts),
                    null_block=NULL_PAGE,
                    window=group_window,
                )
            )
    states = getattr(pool, "mamba_pool", None)
    if states is not None:
        left_out["states of linear-attention layers"] = "one state for each request, not one slot for each token"
    if not groups:
        raise NotCovered("; ".join(sorted(set(left_out.values()))) or f"{type(pool).__name__} has no layers")
    return tuple(groups), left_out


def _sub_pools(pool: Any, window: int | None) -> Iterator[tuple[str, Any, int | None, Callable[[int], str]]]:
    """Group name, pool, window and layer names of every pool that has a token table of its own."""
    kind = type(pool).__name__
    if kind == "SWAKVPool":
        if window is None:
            raise NotCovered("the model's sliding window is not known")
        of_layer = {place: layer for layer, place in pool.layers_mapping.items()}
        if pool.full_layer_nums:
            yield "full", pool.full_kv_pool, None, lambda index: f"layers.{of_layer[index, False]}"
        yield "sliding_window", pool.swa_kv_pool, window, lambda index: f"layers.{of_layer[index, True]}"
    elif kind == "HybridLinearKVPool":
        of_index = {index: layer for layer, index in pool.full_attention_layer_id_mapping.items()}
        yield "full", pool.full_kv_pool, None, lambda index: f"layers.{of_index[index]}"
    else:
        first = int(getattr(pool, "start_layer", 0) or 0)
        yield "full", pool, None, lambda index: f"layers.{first + index}"


def _describe(pool: Any, name_of: Callable[[int], str], found: _Description) -> None:
    """Enter the parts of one pool."""
    describe = _KNOWN.get(type(pool).__name__)
    if describe is None:
        found.left_out[f"layers of {type(pool).__name__}"] = f"a pool of class {type(pool).__name__}"
    else:
        describe(pool, name_of, found)


def _describe_mha(pool: Any, name_of: Callable[[int], str], found: _Description) -> None:
    """Keys and values, token by token or page by page, and the scales beside them."""
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout not in ("nhd", "hnd"):
        found.left_out[f"layers of {type(pool).__name__}"] = f"cache in the layout {layout!r}"
        return
    for part, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
        for index, buffer in enumerate(buffers):
            # Head by head inside a page: [pages, heads, page_size, dim].
            view = buffer.transpose(1, 2) if layout == "hnd" else found.by_slot(buffer)
            found.add(name_of(index), part, view, _number_type(pool, buffer))
    for part, name in (("k_scale", "k_scale_buffer"), ("v_scale", "v_scale_buffer")):
        _describe_scales(part, getattr(pool, name, None), pool, name_of, found)
    if getattr(pool, "native_k_scale_buffer", None) is not None:
        found.left_out["native FP4 scales"] = "interleaved between the tokens of a page"


def _describe_scales(
    part: str, buffers: Sequence[torch.Tensor] | None, pool: Any, name_of: Callable[[int], str], found: _Description
) -> None:
    for index, buffer in enumerate(buffers or ()):
        if getattr(pool, "mxfp8_sf_interleaved", False) or buffer.shape[0] < pool.size:
            found.left_out[f"{part} of {type(pool).__name__}"] = "interleaved between the tokens of a page"
            return
        found.add(name_of(index), part, found.by_slot(buffer), torch.uint8)


def _describe_mla(pool: Any, name_of: Callable[[int], str], found: _Description) -> None:
    """One latent for each token, with its rotary key behind it, and its scales."""
    for index, buffer in enumerate(pool.kv_buffer):
        found.add(name_of(index), "kv", found.by_slot(buffer), _number_type(pool, buffer))
    _describe_scales("kv_scale", getattr(pool, "kv_scale_buffer", None), pool, name_of, found)


def _describe_dsa(pool: Any, name_of: Callable[[int], str], found: _Description) -> None:
    """A latent cache with an index: each page of the index holds the keys of its tokens, then their scales."""
    _describe_mla(pool, name_of, found)
    if pool.index_kpool != 1:
        found.left_out["index of the sparse attention"] = f"one key for {pool.index_kpool} tokens"
        return
    keys = pool.index_head_dim
    scales = keys // _INDEX_QUANT_BLOCK * torch.float32.itemsize
    size = found.page_size
    for index, buffer in enumerate(pool.index_k_with_scale_buffer):
        if not buffer.numel():
            continue  # a layer that uses the index of another
        pages = buffer.shape[0]
        stride = buffer.stride(0)
        if buffer.dtype != torch.uint8 or buffer[0].numel() != size * (keys + scales):
            found.left_out["index of the sparse attention"] = f"index pages of shape {tuple(buffer.shape[1:])}"
            return
        found.add(name_of(index), "index_k", buffer.as_strided((pages, size, keys), (stride, keys, 1)))
        start = buffer.storage_offset() + size * keys
        found.add(name_of(index), "index_k_scale", buffer.as_strided((pages, size, scales), (stride, scales, 1), start))


def _describe_keys_only(pool: Any, name_of: Callable[[int], str], found: _Description) -> None:
    for index, buffer in enumerate(pool.k_buffer):
        found.add(name_of(index), "k", found.by_slot(buffer), _number_type(pool, buffer))


def _describe_minimax_sparse(pool: Any, name_of: Callable[[int], str], found: _Description) -> None:
    """A cache of all layers, and keys (or keys and values) of the index of sparse layers, all in the same slots."""
    if pool.dense_pool is not None:
        raise NotCovered("hierarchical sparse attention keeps the tokens of sparse layers in slots of their own")
    _describe(pool.main_pool, name_of, found)
    for index_pool, layers in (
        (pool.index_kv_pool, pool.index_kv_layer_id_mapping),
        (pool.index_k_pool, pool.index_k_layer_id_mapping),
    ):
        if index_pool is None:
            continue
        of_index = {index: layer for layer, index in layers.items()}
        inner = _Description(found.page_size)
        _describe(index_pool, lambda index, names=of_index: f"layers.{names[index]}", inner)  # type: ignore[misc]
        for part in inner.parts:
            found.add(part.layer, f"index_{part.part}", part.view, part.number_type)
        found.left_out.update(inner.left_out)


def _number_type(pool: Any, buffer: torch.Tensor) -> torch.dtype | None:
    """What the bytes of a buffer mean where its dtype does not say: an 8-bit float is stored as a byte.

    A byte of two 4-bit floats, or of a row that mixes formats, is no number.
    """
    dtype: torch.dtype = pool.dtype
    packed = "FP4" in type(pool).__name__ or getattr(pool, "dsa_kv_cache_store_fp8", False)
    return None if packed or dtype == buffer.dtype or dtype.itemsize != buffer.element_size() else dtype


_KNOWN: dict[str, Callable[[Any, Callable[[int], str], _Description], None]] = {
    "MHATokenToKVPool": _describe_mha,
    "MHATokenToKVPoolFP4": _describe_mha,
    "MHATokenToKVPoolMXFP8": _describe_mha,
    "MLATokenToKVPool": _describe_mla,
    "MLATokenToKVPoolFP4": _describe_mla,
    "DSATokenToKVPool": _describe_dsa,
    "MHATokenToKOnlyPool": _describe_keys_only,
    "MiniMaxSparseKVPool": _describe_minimax_sparse,
}
"""How to describe each class of pool. A class that is not here may keep its bytes anywhere: it is not covered."""
