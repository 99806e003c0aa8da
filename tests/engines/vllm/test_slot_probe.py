"""The probe finds the slots of any packing that is regular, and refuses those that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcanary_agent.adapters.vllm.slot_probe import joined_blocks, learn_parts
from kvcanary_agent.canary.layout import LayoutError

BLOCKS, HEADS, BLOCK_SIZE, DIM = 5, 3, 8, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]

# A cache's shape, and its view of K and of V as [blocks, block_size, ...], however they lie in memory.
Packing = tuple[tuple[int, ...], Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]

PACKINGS: dict[str, Packing] = {
    "k_and_v_side_by_side": (
        (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM),
        lambda cache: (cache[..., :DIM].transpose(1, 2), cache[..., DIM:].transpose(1, 2)),
    ),
    "k_transposed_before_v": (
        (BLOCKS, HEADS, 2, BLOCK_SIZE * DIM),
        lambda cache: (
            cache[:, :, 0].view(-1, HEADS, DIM, BLOCK_SIZE).permute(0, 3, 1, 2),
            cache[:, :, 1].view(-1, HEADS, BLOCK_SIZE, DIM).transpose(1, 2),
        ),
    ),
    "halves_of_a_block": ((BLOCKS, 2, BLOCK_SIZE, HEADS, DIM), lambda cache: (cache[:, 0], cache[:, 1])),
    "heads_first": (
        (BLOCKS, 2, HEADS, BLOCK_SIZE, DIM),
        lambda cache: (cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)),
    ),
    "latent_and_rotary": (
        (BLOCKS, BLOCK_SIZE, 2 * HEADS * DIM),
        lambda cache: (cache[..., :DIM], cache[..., DIM:]),
    ),
    "dimensions_in_packs": (
        (BLOCKS, 2, HEADS, DIM // 2, BLOCK_SIZE, 2),
        lambda cache: (cache[:, 0].permute(0, 3, 1, 2, 4), cache[:, 1].permute(0, 3, 1, 2, 4)),
    ),
}


def bits(values: torch.Tensor) -> torch.Tensor:
    """Values as bytes, so that equality is that of every bit."""
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PACKINGS)
def test_each_slot_shows_what_was_written_to_it_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    shape, places = PACKINGS[name]
    generator = torch.Generator().manual_seed(1)
    memory = torch.randint(0, 256, (BLOCKS, 2 * HEADS * BLOCK_SIZE * DIM * dtype.itemsize), generator=generator)
    cache = memory.to(torch.uint8).view(dtype).view(shape)

    def write(cache: torch.Tensor, slot: int, key: float, value: float) -> None:
        for place, number in zip(places(cache), (key, value), strict=True):
            place[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = torch.full((), number).to(dtype)

    before = bits(cache).clone()
    parts = learn_parts(cache, BLOCK_SIZE, write)

    assert torch.equal(bits(cache), before)
    for part, place in zip(("k", "v"), places(cache), strict=True):
        assert parts[part].shape[:2] == (BLOCKS, BLOCK_SIZE)
        assert torch.equal(bits(parts[part].flatten(2)), bits(place.flatten(2)))


def test_layers_that_lie_between_each_others_blocks_keep_their_distance() -> None:
    pool = torch.zeros(BLOCKS, 2, BLOCK_SIZE, 2 * DIM)
    cache = pool[:, 1]

    def write(cache: torch.Tensor, slot: int, key: float, value: float) -> None:
        cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE, :DIM] = key
        cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE, DIM:] = value

    parts = learn_parts(cache, BLOCK_SIZE, write)
    parts["k"][2, 3] = 1.0
    parts["v"][2, 3] = 2.0

    assert torch.equal(pool[2, 1, 3], torch.tensor([1.0] * DIM + [2.0] * DIM))
    assert pool.count_nonzero() == 2 * DIM


def test_a_packing_that_interleaves_tokens_is_refused() -> None:
    cache = torch.zeros(BLOCKS, 2, BLOCK_SIZE // 2, DIM, 2)

    def write(cache: torch.Tensor, slot: int, key: float, value: float) -> None:
        block, offset = divmod(slot, BLOCK_SIZE)
        cache[block, 0, offset // 2, :, offset % 2] = key
        cache[block, 1, offset // 2, :, offset % 2] = value

    with pytest.raises(LayoutError, match="interleaves tokens"):
        learn_parts(cache, BLOCK_SIZE, write)


def test_a_write_that_leaves_no_trace_is_refused() -> None:
    with pytest.raises(LayoutError, match="changed no byte of k"):
        learn_parts(torch.zeros(BLOCKS, BLOCK_SIZE, DIM), BLOCK_SIZE, lambda cache, slot, key, value: None)


def test_blocks_of_a_kernel_are_joined_to_those_of_the_allocator() -> None:
    joined = BLOCK_SIZE // 2
    cache = torch.arange(6 * joined * HEADS * DIM).view(6, joined, HEADS, DIM)

    view = joined_blocks(cache, 2)

    assert torch.equal(view, cache.view(3, BLOCK_SIZE, HEADS, DIM))
    assert view.data_ptr() == cache.data_ptr()


def test_blocks_of_a_kernel_that_keep_heads_apart_are_refused() -> None:
    heads_first = torch.zeros(6, HEADS, BLOCK_SIZE // 2, DIM).transpose(1, 2)

    with pytest.raises(LayoutError, match="no single run of slots"):
        joined_blocks(heads_first, 2)


@pytest.mark.parametrize(
    ("dtype", "isa", "described"),
    [
        (torch.float32, "vec", True),
        (torch.float16, "vec", True),
        (torch.bfloat16, "vec", True),
        (torch.bfloat16, "amx", False),
    ],
    ids=str,
)
def test_vllms_own_packings_for_cpus(dtype: torch.dtype, isa: str, described: bool) -> None:
    from vllm import _custom_ops as ops

    block_size, dim = 32, 32
    cache = torch.zeros(BLOCKS, HEADS, 2 * block_size, dim, dtype=dtype)

    def write(cache: torch.Tensor, slot: int, key: float, value: float) -> None:
        keys, values = (torch.full((1, HEADS, dim), number, dtype=dtype) for number in (key, value))
        ops.cpu_attn_reshape_and_cache(keys, values, *cache.chunk(2, dim=2), torch.tensor([slot]), isa)

    if not described:
        with pytest.raises(LayoutError, match="interleaves tokens"):
            learn_parts(cache, block_size, write)
        return
    parts = learn_parts(cache, block_size, write)
    write(cache, 2 * block_size + 5, 3.0, 4.0)
    for part, number in (("k", 3.0), ("v", 4.0)):
        assert parts[part].shape[:2] == (BLOCKS, block_size)
        assert bool((parts[part][2, 5] == number).all())
        assert parts[part].count_nonzero() == HEADS * dim
