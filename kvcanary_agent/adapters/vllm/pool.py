"""Describe the KV pool of a vLLM model runner, of either generation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcanary_agent.adapters.vllm.slot_probe import WriteToken, joined_blocks, learn_parts
from kvcanary_agent.canary.layout import KVGroup, KVLayout, KVPart, LayoutError

# BlockPool takes block 0 out of circulation: padding and positions that left a window point at it.
NULL_BLOCK = 0

# Specs whose positions live one per slot of the block table, kept for as long as the table holds the block.
_COVERED_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"})
# Stored values are the K and V themselves or those times one factor for the tensor: all of a slot's bytes are in it.
_COVERED_QUANTISATION = frozenset({"NONE", "FP8_PER_TENSOR"})
# What the two halves of a latent cache are called in reports: the latent makes both K and V, the rotary half K alone.
_MLA_PARTS = {"k": "kv", "v": "k"}
# Methods of speculation that keep no K/V of their own.
DRAFTERS_WITHOUT_LAYERS = frozenset({"ngram", "ngram_gpu", "suffix", "medusa"})

# Shape, strides and offset of a part within its layer's cache.
_Pattern = tuple[tuple[int, ...], tuple[int, ...], int]


class NotCovered(Exception):
    """Something that this adapter does not check yet; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolSource:
    """Where a runner keeps what describes its pool; each generation of runners has its own places.

    Attributes:
        kv_cache_config: vLLM's ``KVCacheConfig`` of the pool.
        layers: Every attention layer by name; its ``kv_cache`` is its part of the pool.
        dtype: Of the model, and so of the K and V that its layers hand to their cache's update.
        tables: For each group of ``kv_cache_config``, the index of its block table in a step; None if it has none.
        draft_layers: Names of the layers that a drafter runs by itself.
    """

    kv_cache_config: Any
    layers: Mapping[str, Any]
    dtype: torch.dtype
    tables: Sequence[int | None]
    draft_layers: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """A runner's pool.

    Attributes:
        layout: What the canary checks.
        tables: For each group of ``layout``, the index of its block table in a step.
        group_ids: For each group of ``layout``, vLLM's number of the group: the index into every ``block_ids``.
    """

    layout: KVLayout
    tables: tuple[int, ...]
    group_ids: tuple[int, ...]


def describe_pool(source: PoolSource) -> Pool:
    """Describe a pool that has just been allocated.

    Raises:
        NotCovered: If nothing of the pool can be checked.
        LayoutError: If the layout found contradicts itself.
    """
    config = source.kv_cache_config
    left_out: dict[str, str] = {}
    probe = _LayerProbe(source.layers, source.dtype)
    groups: list[KVGroup] = []
    tables: list[int] = []
    group_ids: list[int] = []
    for group_id, (group, table) in enumerate(zip(config.kv_cache_groups, source.tables, strict=True)):
        if table is None:
            continue
        parts: list[KVPart] = []
        window: int | None = None
        seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
        for layer in group.layer_names:
            if getattr(source.layers.get(layer), "kv_sharing_target_layer_name", None) is not None:
                continue  # reads another layer's cache, which is described under that layer's name
            if layer in source.draft_layers:
                left_out[layer] = "layer of a draft model: it is written outside the model's step"
                continue
            spec = _layer_spec(group.kv_cache_spec, layer)
            try:
                found = probe.parts(layer, spec, config.num_blocks)
            except (NotCovered, LayoutError) as reason:
                left_out[layer] = str(reason)
                continue
            if type(spec).__name__ == "SlidingWindowSpec":
                window = spec.sliding_window
            for part in found:
                identity = (part.view.data_ptr(), tuple(part.view.shape), part.view.stride())
                if identity not in seen:
                    seen.add(identity)
                    parts.append(part)
        if not parts:
            continue
        name = "full" if window is None else "sliding_window"
        groups.append(
            KVGroup(
                name=name if len(config.kv_cache_groups) == 1 else f"{name}{group_id}",
                block_size=group.kv_cache_spec.block_size,
                parts=tuple(parts),
                null_block=NULL_BLOCK,
                window=window,
            )
        )
        tables.append(table)
        group_ids.append(group_id)
    if not groups:
        reasons = "; ".join(sorted(set(left_out.values()))) or "the model has no layer with a KV cache"
        raise NotCovered(reasons)
    rank, world_size = _tensor_parallel_rank()
    layout = KVLayout(
        engine="vllm",
        engine_version=engine_version(),
        groups=tuple(groups),
        rank=rank,
        world_size=world_size,
        not_covered=left_out,
    )
    return Pool(layout=layout, tables=tuple(tables), group_ids=tuple(group_ids))


def has_block_table(group: Any) -> bool:
    """Whether a group of layers keeps anything: encoder-only attention does not."""
    return type(group.kv_cache_spec).__name__ != "EncoderOnlyAttentionSpec"


def refuse_what_spreads_blocks(context_parallel_ranks: int, kernel_blocks: int) -> None:
    """Refuse a configuration in which a block table's entry is not a whole block of the allocator's on this worker.

    Args:
        context_parallel_ranks: How many ranks hold the positions of a block.
        kernel_blocks: How many entries of a block table a block has, at most.

    Raises:
        NotCovered: If it is one.
    """
    if kernel_blocks > 1:
        raise NotCovered("block tables number the attention kernel's blocks, which are smaller than the allocator's")
    if context_parallel_ranks > 1:
        raise NotCovered("context parallelism spreads the positions of a block over several ranks")


def speculates_without_layers(vllm_config: Any) -> bool:
    """Whether there is no drafter, or only one that keeps no K/V of its own."""
    config = vllm_config.speculative_config
    return config is None or config.method in DRAFTERS_WITHOUT_LAYERS


def _layer_spec(spec: Any, layer: str) -> Any:
    """The layer's own spec; groups of layers of different sizes hold one for each."""
    return spec.kv_cache_specs[layer] if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec


class _LayerProbe:
    """Finds the parts of layers, probing each kind of layer once."""

    def __init__(self, layers: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype
        self._patterns: dict[tuple[object, ...], dict[str, _Pattern]] = {}

    def parts(self, name: str, spec: Any, num_blocks: int) -> list[KVPart]:
        """The parts of one layer.

        Raises:
            NotCovered: If the layer's cache is of a kind that this adapter does not check.
            LayoutError: If the probe could not make sense of what the layer writes.
        """
        if type(spec).__name__ not in _COVERED_SPECS or getattr(spec, "tokens_per_state", 1) != 1:
            raise NotCovered(f"cache of kind {type(spec).__name__}")
        if getattr(spec.kv_quant_mode, "name", "NONE") not in _COVERED_QUANTISATION:
            raise NotCovered(f"cache quantised as {spec.kv_quant_mode.name}")
        layer = self._layers[name]
        cache = layer.kv_cache
        kernel_blocks, rest = divmod(cache.shape[0], num_blocks)
        if rest or not kernel_blocks or spec.block_size % kernel_blocks:
            raise NotCovered(
                f"a cache of shape {tuple(cache.shape)} for {num_blocks} blocks of {spec.block_size} slots"
            )
        impl = getattr(layer, "impl", None)
        if not hasattr(impl, "do_kv_cache_update"):
            raise NotCovered(f"{type(impl).__name__} writes the cache inside its forward")
        kind = "mla" if type(spec).__name__ == "MLAAttentionSpec" else "attention"
        # What the written bytes depend on: layers that agree in all of it pack their slots alike.
        signature = (
            kind,
            type(impl),
            cache.dtype,
            tuple(cache.shape),
            cache.stride(),
            spec.block_size,
            layer.kv_cache_dtype,
            layer.num_kv_heads,
            layer.head_size,
        )
        pattern = self._patterns.get(signature)
        if pattern is None:
            write = _mla_write(layer, self._dtype) if kind == "mla" else _attention_write(layer, self._dtype)
            views = learn_parts(cache, spec.block_size // kernel_blocks, write)
            views = {part: joined_blocks(view, kernel_blocks) for part, view in views.items()}
            pattern = self._patterns[signature] = {
                part: (tuple(view.shape), view.stride(), view.storage_offset() - cache.storage_offset())
                for part, view in views.items()
            }
        return [
            KVPart(
                layer=name,
                part=_MLA_PARTS[part] if kind == "mla" else part,
                view=cache.as_strided(shape, stride, cache.storage_offset() + offset),
            )
            for part, (shape, stride, offset) in pattern.items()
        ]


def _attention_write(layer: Any, dtype: torch.dtype) -> WriteToken:
    """The write of one token by an ``Attention`` layer."""

    def write(cache: torch.Tensor, slot: int, key: float, value: float) -> None:
        layer.impl.do_kv_cache_update(
            layer,
            torch.full((1, layer.num_kv_heads, layer.head_size), key, dtype=dtype, device=cache.device),
            torch.full((1, layer.num_kv_heads, layer.head_size_v), value, dtype=dtype, device=cache.device),
            cache,
            torch.tensor([slot], device=cache.device),
        )

    return write


def _mla_write(layer: Any, dtype: torch.dtype) -> WriteToken:
    """The write of one token by an ``MLAAttention`` layer: the latent stands for K, the rotary key for V."""

    def write(cache: torch.Tensor, slot: int, key: float, value: float) -> None:
        layer.impl.do_kv_cache_update(
            torch.full((1, layer.kv_lora_rank), key, dtype=dtype, device=cache.device),
            torch.full((1, 1, layer.qk_rope_head_dim), value, dtype=dtype, device=cache.device),
            cache,
            torch.tensor([slot], device=cache.device),
            layer.kv_cache_dtype,
            layer._k_scale,
        )

    return write


def _tensor_parallel_rank() -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def engine_version() -> str:
    """Of the vLLM in this process, or ``""``."""
    import vllm

    return str(getattr(vllm, "__version__", ""))
