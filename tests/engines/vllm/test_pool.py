"""Which layers of a pool are described, and which are named with the reason why not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_agent.adapters.vllm import pool as pool_module
from kvcanary_agent.adapters.vllm.pool import NotCovered, Pool, PoolSource, describe_pool

BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 8, 2, 4


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_tensor_parallel_rank", lambda: (1, 2))
    monkeypatch.setattr(pool_module, "engine_version", lambda: "0.32.0")


class Layer:
    """An attention layer that keeps K and V as ``[blocks, 2, block_size, heads, dim]``."""

    def __init__(self, cache: torch.Tensor, *, shares: str | None = None) -> None:
        self.kv_cache, self.kv_sharing_target_layer_name = cache, shares
        self.impl = self
        self.kv_cache_dtype, self.num_kv_heads, self.head_size, self.head_size_v = "auto", HEADS, DIM, DIM

    @staticmethod
    def do_kv_cache_update(
        layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        block, offset = divmod(int(slots[0]), cache.shape[2])
        cache[block, 0, offset], cache[block, 1, offset] = key[0], value[0]


class WritesInsideItsForward(Layer):
    do_kv_cache_update = None  # type: ignore[assignment]

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__(cache)
        self.impl = SimpleNamespace()  # type: ignore[assignment]


def spec(kind: str, **more: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(block_size=BLOCK_SIZE, kv_quant_mode=SimpleNamespace(name="NONE"), **more)


def cache(blocks: int = BLOCKS, block_size: int = BLOCK_SIZE) -> torch.Tensor:
    return torch.zeros(blocks, 2, block_size, HEADS, DIM)


def describe(
    layers: dict[str, Layer],
    *groups: tuple[Any, Sequence[str]],
    tables: Sequence[int | None],
    draft: Sequence[str] = (),
) -> Pool:
    config = SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind, layer_names=list(names)) for kind, names in groups],
    )
    source = PoolSource(
        kv_cache_config=config, layers=layers, dtype=torch.float32, tables=tables, draft_layers=frozenset(draft)
    )
    return describe_pool(source)


def names(pool: Pool) -> list[list[str]]:
    return [[part.name for part in group.parts] for group in pool.layout.groups]


def test_layers_that_share_a_cache_appear_once() -> None:
    layers = {"a": Layer(cache()), "b": Layer(cache())}
    layers["c"] = Layer(layers["a"].kv_cache, shares="a")
    layers["d"] = Layer(layers["b"].kv_cache)

    found = describe(layers, (spec("FullAttentionSpec"), "abcd"), tables=[0])

    assert names(found) == [["a.k", "a.v", "b.k", "b.v"]]
    assert found.layout.not_covered == {}


def test_what_is_not_covered_is_named_with_its_reason() -> None:
    layers = {
        "own": Layer(cache()),
        "draft": Layer(cache()),
        "inside": WritesInsideItsForward(cache()),
        "state": Layer(cache()),
        "odd": Layer(cache(BLOCKS + 1)),
    }

    found = describe(
        layers,
        (spec("FullAttentionSpec"), ["own", "draft", "inside", "odd"]),
        (spec("MambaSpec"), ["state"]),
        tables=[0, 1],
        draft=["draft"],
    )

    assert names(found) == [["own.k", "own.v"]]
    reasons = found.layout.not_covered
    assert "draft model" in reasons["draft"]
    assert "inside its forward" in reasons["inside"]
    assert reasons["state"] == "cache of kind MambaSpec"
    assert f"shape {(BLOCKS + 1, 2, BLOCK_SIZE, HEADS, DIM)} for {BLOCKS} blocks" in reasons["odd"]


def test_each_group_knows_its_table_its_number_and_its_window() -> None:
    layers = {"encoder": Layer(cache()), "full": Layer(cache()), "window": Layer(cache())}

    found = describe(
        layers,
        (spec("EncoderOnlyAttentionSpec"), ["encoder"]),
        (spec("SlidingWindowSpec", sliding_window=5), ["window"]),
        (spec("FullAttentionSpec"), ["full"]),
        tables=[None, 0, 1],
    )

    assert (found.tables, found.group_ids) == ((0, 1), (1, 2))
    assert [(group.name, group.window) for group in found.layout.groups] == [("sliding_window1", 5), ("full2", None)]
    assert (found.layout.rank, found.layout.world_size) == (1, 2)


def test_a_block_of_the_allocator_is_a_run_of_kernel_blocks() -> None:
    tokens_first = torch.zeros(2, 2 * BLOCKS, BLOCK_SIZE // 2, HEADS, DIM).transpose(0, 1)
    apart = cache(2 * BLOCKS, BLOCK_SIZE // 2)

    found = describe(
        {"run": Layer(tokens_first), "apart": Layer(apart)}, (spec("FullAttentionSpec"), ["run", "apart"]), tables=[0]
    )

    (group,) = found.layout.groups
    assert [tuple(part.view.shape[:2]) for part in group.parts] == [(BLOCKS, BLOCK_SIZE)] * 2
    tokens_first[5, 1, 3, 1, 2] = 7.0
    assert group.parts[1].view[2, BLOCK_SIZE - 1].sum() == 7.0
    assert "no single run of slots" in found.layout.not_covered["apart"]


def test_a_pool_without_a_layer_that_can_be_checked_is_refused_with_all_reasons() -> None:
    with pytest.raises(NotCovered, match="cache of kind MambaSpec"):
        describe({"state": Layer(cache())}, (spec("MambaSpec"), ["state"]), tables=[0])
