"""Chain hashes and the bytes of payloads, in torch; every other backend must give the same bits.

All arithmetic is on 64-bit integers that wrap, kept in ``torch.int64`` because torch has few operations on
``uint64``; a logical right shift is an arithmetic one followed by a mask.
"""

from __future__ import annotations

import hashlib
import math

import torch

# Odd constants that make distinct (token, position) pairs distinct before the finaliser: the golden ratio and the
# square root of 2, scaled to 64 bits.
TOKEN_FACTOR = -0x61C8864680B583EB
POSITION_FACTOR = 0x6A09E667F3BCC909
# Multipliers of the SplitMix64 finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# OOPSLA 2014), as signed 64-bit numbers.
FINALISER_1 = 0xBF58476D1CE4E5B9 - 2**64
FINALISER_2 = 0x94D049BB133111EB - 2**64

_MASK = (1 << 64) - 1

_WORDS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _finalise(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 30) & 0x3_FFFF_FFFF)) * FINALISER_1
    x = (x ^ ((x >> 27) & 0x1F_FFFF_FFFF)) * FINALISER_2
    return x ^ ((x >> 31) & 0x1_FFFF_FFFF)


def mix(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What one token at one position adds to the chain of its request.

    Args:
        tokens, positions: Integer tensors of the same shape.

    Returns:
        int64 of that shape. The position is inside the mix, so that the wrapping sum over a prefix identifies the
        ordered prefix, and a prefix sum computes the chains of a whole prefill in parallel.
    """
    return _finalise(tokens.to(torch.int64) * TOKEN_FACTOR + positions.to(torch.int64) * POSITION_FACTOR)


def mix_of(token: int, position: int) -> int:
    """`mix` of one token at one position, in Python's numbers: a signed 64-bit one."""
    x = token * TOKEN_FACTOR + position * POSITION_FACTOR & _MASK
    x = (x ^ x >> 30) * FINALISER_1 & _MASK
    x = (x ^ x >> 27) * FINALISER_2 & _MASK
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def chain_seed(namespace: str | None, epoch: int) -> int:
    """The chain before position 0: what, beside its tokens, a request's K/V depends on. A signed 64-bit number."""
    text = f"{epoch}:" + ("" if namespace is None else "=" + namespace)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"kvcanary-chain").digest()
    return int.from_bytes(digest, "little", signed=True)


def as_words(view: torch.Tensor) -> torch.Tensor:
    """The same memory under an integer dtype of the same size, so that gathers work for every dtype of a cache."""
    if view.is_complex():
        view = torch.view_as_real(view)
    return view.view(_WORDS_OF_SIZE[view.element_size()])


def octets_of(payload: torch.Tensor) -> torch.Tensor:
    """The bytes of each row, ``[rows, bytes]`` uint8, contiguous and aligned for every number type.

    Args:
        payload: ``[rows, *payload]``, any dtype, any strides.
    """
    words = payload.reshape(payload.shape[0], math.prod(payload.shape[1:])).contiguous()
    if words.stride(1) != 1:
        # A single column counts as contiguous whatever its stride.
        words = words.clone(memory_format=torch.contiguous_format)
    octets = words.view(torch.uint8)
    return octets.clone() if octets.storage_offset() % 8 else octets
