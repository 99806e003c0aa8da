"""Fingerprints of what slots hold, as a definition: the keys that every backend multiplies with.

A slot's payload, in row-major order and filled up with zeros, is cut into segments of 128 bytes. Each segment, as
signed bytes, is multiplied with two fixed vectors of odd keys, which gives two exact sums of at most 2^21. Each sum is
multiplied with an odd 32-bit key of its segment; summed over the segments modulo 2^32, the first ones are the low half
of the fingerprint and the second ones its high half.

- Whatever happens to one byte or two bytes of a segment shows: no two bytes' pairs of keys are multiples of each
  other, so at least one of the exact sums changes, and an odd factor keeps it from vanishing modulo 2^32.
- Changes of one bit in each of two segments cancel only if both halves' keys happen to agree up to sign in their low 25
  bits at least: 2^-48 of all pairs of segments.
- Anything larger (swapped words, heads, layers or tokens) has to make both halves equal by chance.

The sums do not depend on the order in which they are taken, so every device and every tiling gives the same bits.
Products of signed bytes are what CPUs (VNNI) and GPUs do fastest, and 32-bit arithmetic is enough for the rest.
"""

from __future__ import annotations

from math import gcd

import torch

from .hashing import mix

SEGMENT = 128
"""Bytes per segment."""


def byte_keys() -> torch.Tensor:
    """The two keys of each byte of a segment: ``[2, SEGMENT]`` int8, odd.

    The magnitudes of byte i's keys are a pair of odd numbers below 128 whose quotient no other byte has. Pairs and
    signs are drawn with SplitMix64's finaliser (see :func:`kvcanary_agent.kernels.hashing.mix`), so they are the same
    on every machine.
    """
    drawn: dict[tuple[int, int], tuple[int, int]] = {}
    bits = mix(torch.arange(4 * SEGMENT), torch.full((4 * SEGMENT,), -1)).tolist()
    for number in bits:
        first, second = 2 * (number >> 8 & 63) + 1, 2 * (number >> 16 & 63) + 1
        divisor = gcd(first, second)
        signs = (1 if number & 1 else -1), (1 if number & 2 else -1)
        drawn.setdefault((first // divisor, second // divisor), (signs[0] * first, signs[1] * second))
    pairs = list(drawn.values())[:SEGMENT]
    return torch.tensor(pairs, dtype=torch.int8).t().contiguous()


def segment_keys(num_segments: int) -> torch.Tensor:
    """The two keys of each segment: ``[2, num_segments]`` int32, odd."""
    index = torch.arange(num_segments)
    return mix(index, torch.full_like(index, -2)).view(torch.int32).view(-1, 2).t().contiguous() | 1


def num_segments(num_bytes: int) -> int:
    """How many segments a payload of that many bytes has."""
    return -(-num_bytes // SEGMENT)
