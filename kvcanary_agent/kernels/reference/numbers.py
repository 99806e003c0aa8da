"""NaN and infinity, for every number type that a cache may hold."""

from __future__ import annotations

import math

import torch

from kvcanary_agent.kernels.hashing import octets_of

# The types that torch's own arithmetic covers; for the others, the bits that are all set in NaN and infinity.
_ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FP8_MASK = {torch.float8_e5m2: (0x7C, 0x7C), torch.float8_e4m3fn: (0x7F, 0x7F)}
_FP8_NAN_ONLY = {torch.float8_e4m3fnuz: (0xFF, 0x80), torch.float8_e5m2fnuz: (0xFF, 0x80)}
_OCTETS = _FP8_MASK | _FP8_NAN_ONLY | {torch.float8_e8m0fnu: (0xFF, 0xFF)}


def has_nonfinite(payload: torch.Tensor, number_type: torch.dtype) -> torch.Tensor | None:
    """Which rows hold a NaN or an infinity: ``[rows]`` bool, or None if none does (integers have none).

    Args:
        payload: ``[rows, *payload]`` of any dtype and strides, the bytes of numbers of ``number_type``.
    """
    octets = octets_of(payload)
    if number_type in _ARITHMETIC:
        numbers = octets.view(number_type)
        # A sum is finite only if every number is; it may overflow, so only the exact test decides.
        if math.isfinite(float(numbers.sum(dtype=None if number_type.itemsize > 2 else torch.float32))):
            return None
        bad = ~numbers.isfinite().all(1)
    elif number_type in _OCTETS:
        mask, pattern = _OCTETS[number_type]
        bad = ((octets & mask) == pattern).any(1)
    else:
        return None
    return bad if bool(bad.any()) else None
