"""NaN and infinity are found in every dtype of a cache, and nothing else is taken for them."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from kvcanary_agent.kernels.hashing import as_words
from kvcanary_agent.kernels.reference.numbers import has_nonfinite

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def flags(payload: torch.Tensor, number_type: torch.dtype) -> list[bool]:
    """Which rows are flagged, whether or not the canary has looked at them as words first."""
    result = has_nonfinite(payload, number_type)
    of_words = has_nonfinite(as_words(payload), number_type)
    assert (result is None) == (of_words is None)
    if result is None or of_words is None:
        return [False] * payload.shape[0]
    assert torch.equal(result, of_words)
    return [bool(flag) for flag in result]


def value_of_fp8(octet: int, dtype: torch.dtype) -> float:
    return float(torch.tensor([octet], dtype=torch.uint8).view(dtype).to(torch.float32))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_each_of_the_256_fp8_values_is_judged_as_torch_converts_it(dtype: torch.dtype) -> None:
    for octet in range(256):
        payload = torch.tensor([[octet], [0x38]], dtype=torch.uint8).view(dtype)
        assert flags(payload, dtype) == [not math.isfinite(value_of_fp8(octet, dtype)), False], hex(octet)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_an_fp8_cache_kept_as_uint8_is_judged_by_its_number_type(dtype: torch.dtype) -> None:
    octets = torch.arange(256, dtype=torch.uint8)[:, None]
    wanted = [not math.isfinite(value_of_fp8(octet, dtype)) for octet in range(256)]
    assert flags(octets, dtype) == wanted


def is_finite_half(bits: int) -> bool:
    return math.isfinite(struct.unpack("<e", bits.to_bytes(2, "little"))[0])


def is_finite_bfloat16(bits: int) -> bool:
    return math.isfinite(struct.unpack("<f", (bits << 16).to_bytes(4, "little"))[0])


@pytest.mark.parametrize(
    ("dtype", "is_finite"), [(torch.float16, is_finite_half), (torch.bfloat16, is_finite_bfloat16)]
)
def test_each_of_the_65536_values_of_a_16_bit_type_is_judged(dtype: torch.dtype, is_finite: object) -> None:
    assert callable(is_finite)
    payload = torch.arange(65536).to(torch.int16).view(dtype)[:, None]
    assert flags(payload, dtype) == [not is_finite(bits) for bits in range(65536)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_finite_values_of_a_16_bit_type_together_are_no_alarm(dtype: torch.dtype) -> None:
    payload = torch.arange(65536).to(torch.int16).view(dtype)
    finite = payload[payload.isfinite()].view(2, -1)
    assert has_nonfinite(finite, dtype) is None


def test_sampled_bits_of_float32_are_judged() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=generator)
    exponent = torch.randint(0, 2, (20_000,), generator=generator, dtype=torch.bool)
    bits = torch.where(exponent, bits | 0x7F80_0000, bits).to(torch.int32)
    edges = torch.tensor(
        [0x7F80_0000, 0x7F80_0001, 0x7F7F_FFFF, 0x0000_0001, 0x0080_0000, -(2**31), -1], dtype=torch.int32
    )
    bits = torch.cat([bits, edges])
    wanted = [not math.isfinite(struct.unpack("<f", (word % 2**32).to_bytes(4, "little"))[0]) for word in bits.tolist()]
    assert flags(bits.view(torch.float32)[:, None], torch.float32) == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_that_overflows_is_no_false_alarm(dtype: torch.dtype) -> None:
    largest = torch.full((4, 64), torch.finfo(dtype).max, dtype=dtype)
    assert has_nonfinite(largest, dtype) is None
    assert has_nonfinite(-largest, dtype) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_anywhere_flags_its_row_alone(dtype: torch.dtype, bad: float) -> None:
    for at in range(15):
        payload = torch.ones(3, 3, 5, dtype=dtype)
        payload[1].view(-1)[at] = bad
        assert flags(payload, dtype) == [False, True, False]


def test_opposite_infinities_do_not_cancel() -> None:
    payload = torch.tensor([[math.inf, -math.inf], [1.0, 2.0]])
    assert flags(payload, torch.float32) == [True, False]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_never_alarm(dtype: torch.dtype) -> None:
    payload = torch.tensor([[-1, 127, 0]]).to(dtype)
    assert has_nonfinite(payload, dtype) is None
    assert has_nonfinite(torch.full((2, 8), 255, dtype=torch.uint8).view(dtype), dtype) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2])
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    # Slots of a block in which K lies transposed: [head_dim, block_size].
    payload = torch.ones(8, 4).to(dtype).t()
    assert has_nonfinite(payload, dtype) is None
    payload[2, 3] = math.nan
    assert flags(payload, dtype) == [False, False, True, False]


def test_one_number_per_slot_may_lie_apart() -> None:
    scales = torch.ones(4, 6)[:, 2]
    scales[3] = math.inf
    assert flags(scales, torch.float32) == [False, False, False, True]
