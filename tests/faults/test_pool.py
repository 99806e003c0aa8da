"""The embedded pool: the numbers that its model writes, and what it does with slots and copies."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_agent.faults.dtypes import DTYPES
from kvcanary_agent.faults.operations import CopyBlock, Geometry, LayerGroup, Poke
from kvcanary_agent.faults.pool import EmbeddedPool, token_contexts

GEOMETRY = Geometry(
    blocks=4,
    block_size=3,
    kv_heads=2,
    head_dim=5,
    dtype="float32",
    null_block=0,
    ranks=2,
    groups=(LayerGroup(layers=(0, 1), window=None),),
)


def context(**changes: Any) -> bytes:
    given: dict[str, Any] = {"history": [1, 2], "tokens": [3], "positions": [2], "namespace": None, "epoch": 0}
    (only,) = token_contexts(**{**given, **changes})
    return only


def payloads(pool: EmbeddedPool) -> list[torch.Tensor]:
    return [part.view for group in pool.layout().groups for part in group.parts]


def pool_with_a_token(dtype: str = "float32", rank: int = 0, slot: int = 4) -> EmbeddedPool:
    pool = EmbeddedPool(dataclasses.replace(GEOMETRY, dtype=dtype), rank)
    pool.write(0, [slot], [context()])
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_model_writes_is_finite_and_not_zero(dtype: str) -> None:
    for view in payloads(pool_with_a_token(dtype)):
        numbers = view[1, 1].to(torch.float32)
        assert numbers.isfinite().all()
        assert numbers.ne(0).all()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if DTYPES[dtype].nan])
@given(octets=st.binary(min_size=8, max_size=8), bit=st.integers(0, 63))
def test_a_number_stays_finite_when_a_bit_of_it_flips(dtype: str, octets: bytes, bit: int) -> None:
    changed = bytearray(DTYPES[dtype].number_like(octets))
    changed[bit // 8] ^= 1 << bit % 8
    numbers = torch.frombuffer(changed, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float32).tolist()

    assert all(map(math.isfinite, numbers))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if DTYPES[dtype].nan])
def test_nan_is_nan(dtype: str) -> None:
    pool = pool_with_a_token(dtype)
    pool.poke(Poke(block=1, offset=1, layer=0, part="k", xor=(), value="nan", rank=None))

    assert payloads(pool)[0][1, 1].to(torch.float32).isnan().all()


def test_the_same_prefix_gives_the_same_bytes() -> None:
    whole = token_contexts([], [1, 2, 3], [0, 1, 2], namespace=None, epoch=0)

    assert context() == whole[2]
    for one, other in zip(payloads(pool_with_a_token()), payloads(pool_with_a_token()), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(
    "changes",
    [{"history": [2, 1]}, {"history": [1]}, {"tokens": [4]}, {"positions": [3]}, {"namespace": "x"}, {"epoch": 1}],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_the_bytes_depend_on_changes_them(changes: dict[str, Any]) -> None:
    assert context(**changes) != context()


def test_layers_parts_and_ranks_have_bytes_of_their_own() -> None:
    views = [view[1, 1] for rank in (0, 1) for view in payloads(pool_with_a_token(rank=rank))]

    assert len({tuple(view.flatten().tolist()) for view in views}) == 8


def test_slots_are_skipped_wrapped_around_or_outside() -> None:
    pool = EmbeddedPool(GEOMETRY, 0)
    pool.write(0, [-1, 12, -13, 10**9], [context()] * 4)
    assert not any(view.any() for view in payloads(pool))

    pool.write(0, [-2], [context()])
    assert all(view[3, 1].all() for view in payloads(pool))


def test_a_part_of_a_copy_ends_in_the_middle_of_a_layer() -> None:
    pool = pool_with_a_token(slot=3)
    for slot in (4, 5):
        pool.write(0, [slot], [context(positions=[slot])])
    pool.copy_block(CopyBlock(source=1, destination=2, fraction=0.6, group=0))
    first_k, first_v, second_k, second_v = payloads(pool)

    assert first_k[2].equal(first_k[1])
    assert first_v[2].equal(first_v[1])
    # 2.4 of 4 parts: the third has its first token, and of its second the first 2 of 10 numbers.
    assert second_k[2, 0].equal(second_k[1, 0])
    assert second_k[2, 1].flatten()[:2].equal(second_k[1, 1].flatten()[:2])
    assert not second_k[2, 1].flatten()[2:].any()
    assert not second_v[2].any()


def test_a_load_of_some_layers_leaves_the_others_alone() -> None:
    pool = pool_with_a_token()
    pool.load(pool.store(0, [1]), [2], layers=[1])
    first_k, _, second_k, _ = payloads(pool)

    assert not first_k[2].any()
    assert second_k[2].equal(second_k[1])
