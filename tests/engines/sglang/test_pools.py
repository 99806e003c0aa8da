"""Every byte that a pool of the engine writes for a token is in the part of that layer and slot, or is named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_agent.adapters.sglang.pool import NotCovered, describe_groups
from kvcanary_agent.canary.layout import KVGroup, KVPart

memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
swa_memory_pool = pytest.importorskip("sglang.srt.mem_cache.swa_memory_pool")

HEADS, DIM, LATENT, ROTARY, INDEX = 2, 32, 512, 64, 128
SIZE, PAGE = 64, 16
# Different in every byte, in every dtype of a cache.
BEFORE, AFTER = 1.0, -5.3

Write = Callable[[Any, int, int, float], None]
"""Writes a token whose keys and values are one number to a slot of a layer (counted within the pool)."""


def plain(cls: str = "MHATokenToKVPool", **options: Any) -> Any:
    arguments = {
        "size": SIZE,
        "page_size": PAGE,
        "dtype": torch.float32,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
        **options,
    }
    return getattr(memory_pool, cls)(**arguments)


def heads(cls: str = "MHATokenToKVPool", **options: Any) -> Any:
    return plain(cls, head_num=HEADS, head_dim=DIM, **options)


def latent(cls: str = "MLATokenToKVPool", **options: Any) -> Any:
    return plain(cls, kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY, **options)


def head_major() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        return heads()


def sparse(**options: Any) -> Any:
    """A pool with an index; its class asks how wide decode context parallelism is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1, dcp_enabled=False))
        return latent("DSATokenToKVPool", size=128, page_size=64, index_head_dim=INDEX, **options)


def write_heads(pool: Any, layer: int, slot: int, value: float) -> None:
    keys = torch.full((1, HEADS, DIM), value)
    pool.set_kv_buffer(None, torch.tensor([slot]), keys, keys.clone(), layer_id_override=layer)


def write_rows(*buffers: str) -> Write:
    """The write of pools whose own needs a GPU: rows of these buffers, at the token's slot."""

    def write(pool: Any, layer: int, slot: int, value: float) -> None:
        for name in buffers:
            row = getattr(pool, name)[layer][slot]
            row.view(torch.uint8).fill_(0 if value == BEFORE else 255)

    return write


def write_latent_and_index(pool: Any, layer: int, slot: int, value: float) -> None:
    write_rows("kv_buffer")(pool, layer, slot, value)
    # The engine's index pages: all keys, one after the other, then one float32 scale for each.
    page, offset = divmod(slot, pool.page_size)
    index_page = pool.index_k_with_scale_buffer[layer][page]
    index_page[offset * INDEX : (offset + 1) * INDEX] = 0 if value == BEFORE else 255
    scales = index_page[pool.page_size * INDEX :].view(torch.float32)
    scales[offset] = value


def write_keys(pool: Any, layer: int, slot: int, value: float) -> None:
    pool.set_k_buffer(layer, torch.tensor([slot]), torch.full((1, HEADS, DIM), value))


COVERED = [
    pytest.param(heads, write_heads, {"k", "v"}, id="plain"),
    pytest.param(lambda: heads(page_size=1), write_heads, {"k", "v"}, id="plain_token_by_token"),
    pytest.param(lambda: heads(dtype=torch.bfloat16), write_heads, {"k", "v"}, id="plain_bfloat16"),
    pytest.param(lambda: heads(dtype=torch.float8_e5m2), write_heads, {"k", "v"}, id="plain_float8"),
    pytest.param(lambda: heads(v_head_dim=2 * DIM), write_rows("k_buffer", "v_buffer"), {"k", "v"}, id="wider_values"),
    pytest.param(head_major, write_heads, {"k", "v"}, id="head_major"),
    pytest.param(
        lambda: heads("MHATokenToKVPoolFP4", dtype=torch.float4_e2m1fn_x2),
        write_rows("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"),
        {"k", "v", "k_scale", "v_scale"},
        id="fp4",
    ),
    pytest.param(
        lambda: heads("MHATokenToKVPoolMXFP8", dtype=torch.float8_e4m3fn),
        write_rows("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"),
        {"k", "v", "k_scale", "v_scale"},
        id="mxfp8",
    ),
    pytest.param(latent, write_rows("kv_buffer"), {"kv"}, id="latent"),
    pytest.param(
        lambda: latent("MLATokenToKVPoolFP4", dtype=torch.float4_e2m1fn_x2),
        write_rows("kv_buffer", "kv_scale_buffer"),
        {"kv", "kv_scale"},
        id="latent_fp4",
    ),
    pytest.param(
        lambda: sparse(dtype=torch.bfloat16, kv_cache_dim=LATENT + ROTARY),
        write_latent_and_index,
        {"kv", "index_k", "index_k_scale"},
        id="sparse_attention",
    ),
    pytest.param(
        lambda: sparse(dtype=torch.float8_e4m3fn, kv_cache_dim=656),
        write_latent_and_index,
        {"kv", "index_k", "index_k_scale"},
        id="sparse_attention_float8",
    ),
    pytest.param(lambda: heads("MHATokenToKOnlyPool"), write_keys, {"k"}, id="keys_only"),
]


def buffers_of(pool: Any) -> list[torch.Tensor]:
    """The bytes of every cache tensor of a pool and of the pools in it, once each."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def look_into(owner: Any) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for value in vars(owner).values():
            if hasattr(value, "__dict__") and type(value).__module__.startswith("sglang.srt.mem_cache"):
                look_into(value)
            for tensor in value if isinstance(value, (list, tuple)) else ():
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)

    look_into(pool)
    return list(found.values())


def changed_bytes(pool: Any, change: Callable[[], None]) -> set[int]:
    """Addresses of the bytes of the pool's buffers that an action changes."""
    buffers = buffers_of(pool)
    before = [buffer.clone() for buffer in buffers]
    change()
    return {
        buffer.data_ptr() + offset
        for buffer, old in zip(buffers, before, strict=True)
        for offset in (buffer != old).nonzero().flatten().tolist()
    }


def bytes_of(part: KVPart, slot: int, block_size: int) -> set[int]:
    """Addresses of the bytes that a part says a slot has."""
    element = part.view[slot // block_size, slot % block_size]
    width = element.element_size()
    addresses = {element.data_ptr()}
    for size, stride in zip(element.shape, element.stride(), strict=True):
        addresses = {address + index * stride * width for address in addresses for index in range(size)}
    return {address + byte for address in addresses for byte in range(width)}


def bytes_of_slot(group: KVGroup, layer: str, slot: int) -> set[int]:
    of_layer = [part for part in group.parts if part.layer == layer]
    return set().union(*(bytes_of(part, slot, group.block_size) for part in of_layer))


@pytest.mark.parametrize(("make", "write", "parts"), COVERED)
def test_every_byte_of_every_layer_is_in_a_part(make: Callable[[], Any], write: Write, parts: set[str]) -> None:
    pool = make()

    (group,), left_out = describe_groups(pool)

    assert left_out == {}
    assert {part.part for part in group.parts} == parts
    last = pool.size + pool.page_size - 1
    for layer in range(2):
        for slot in (0, 1, pool.page_size, pool.size // 2 + 3, last):
            write(pool, layer, slot, BEFORE)
            changed = changed_bytes(pool, lambda layer=layer, slot=slot: write(pool, layer, slot, AFTER))  # type: ignore[misc]
            assert changed == bytes_of_slot(group, f"layers.{layer}", slot), (layer, slot)


def test_a_window_and_full_attention_are_two_groups_with_the_models_own_layer_numbers() -> None:
    pool = swa_memory_pool.SWAKVPool(
        size=SIZE,
        size_swa=SIZE // 2,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        device="cpu",
    )

    groups, left_out = describe_groups(pool, window=65)

    assert left_out == {}
    assert [(group.name, group.window) for group in groups] == [("full", None), ("sliding_window", 65)]
    for layer in range(4):
        group = groups[layer % 2 == 0]
        inner = pool.swa_kv_pool if layer % 2 == 0 else pool.full_kv_pool
        write_heads(inner, layer // 2, 5, BEFORE)
        changed = changed_bytes(pool, lambda inner=inner, layer=layer: write_heads(inner, layer // 2, 5, AFTER))  # type: ignore[misc]
        assert changed == bytes_of_slot(group, f"layers.{layer}", 5)


def test_of_a_model_with_linear_attention_the_other_layers_are_covered_and_its_states_named() -> None:
    pool = memory_pool.HybridLinearKVPool(
        size=SIZE,
        dtype=torch.float32,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        full_attention_layer_ids=[3, 7],
        device="cpu",
        mamba_pool=object(),
    )

    (group,), left_out = describe_groups(pool)

    assert {part.layer for part in group.parts} == {"layers.3", "layers.7"}
    assert list(left_out) == ["states of linear-attention layers"]


def test_the_index_of_sparse_layers_is_a_part_beside_all_layers() -> None:
    pool = memory_pool.MiniMaxSparseKVPool(
        size=SIZE,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        idx_head_dim=DIM,
        dense_layer_ids=[0],
        sparse_layer_ids=[1, 2],
        disable_value_sparse_layer_ids=[2],
        device="cpu",
        start_layer=0,
        end_layer=3,
    )

    (group,), left_out = describe_groups(pool)

    assert left_out == {}
    assert {part.name for part in group.parts} == {
        *(f"layers.{layer}.{part}" for layer in range(3) for part in "kv"),
        "layers.1.index_k",
        "layers.1.index_v",
        "layers.2.index_k",
    }


def test_scales_that_are_interleaved_between_tokens_are_named() -> None:
    pool = heads("MHATokenToKVPoolMXFP8", dtype=torch.float8_e4m3fn, size=256, page_size=128)

    (group,), left_out = describe_groups(pool)

    assert {part.part for part in group.parts} == {"k", "v"}
    assert set(left_out) == {f"{part}_scale of MHATokenToKVPoolMXFP8" for part in "kv"}


@pytest.mark.parametrize("name", ["DeepSeekV4TokenToKVPool", "NoOpMHATokenToKVPool", "PageMajorMHATokenToKVPool"])
def test_a_pool_of_another_class_is_named(name: str) -> None:
    pool = type(name, (), {"page_size": PAGE})()

    with pytest.raises(NotCovered, match=f"a pool of class {name}"):
        describe_groups(pool)
