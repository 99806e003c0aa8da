"""What all kernels share: the layout of records and ring, the hash of a token, and how a violation is appended."""

# Triton's language has types of its own, which annotations cannot say.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import triton
import triton.language as tl

from kvcanary_agent.kernels.hashing import FINALISER_1, FINALISER_2, POSITION_FACTOR, TOKEN_FACTOR
from kvcanary_agent.kernels.records import UNKNOWN, Column
from kvcanary_agent.kernels.ring import Field

COLUMNS = tl.constexpr(len(Column))
PLACE = tl.constexpr(int(Column.PLACE))
TOKEN = tl.constexpr(int(Column.TOKEN))
SEED = tl.constexpr(int(Column.SEED))
CHAIN = tl.constexpr(int(Column.CHAIN))
CHAIN_AFTER = tl.constexpr(int(Column.CHAIN_AFTER))
WRITE = tl.constexpr(int(Column.WRITE))
STATE = tl.constexpr(int(Column.STATE))
CLAIM = tl.constexpr(int(Column.CLAIM))
UNKNOWN_GENERATION = tl.constexpr(UNKNOWN)
FIELDS = tl.constexpr(len(Field))

_TOKEN_FACTOR = tl.constexpr(TOKEN_FACTOR)
_POSITION_FACTOR = tl.constexpr(POSITION_FACTOR)
_FINALISER_1 = tl.constexpr(FINALISER_1)
_FINALISER_2 = tl.constexpr(FINALISER_2)


_Function = TypeVar("_Function", bound=Callable[..., None])


def kernel(function: _Function) -> Any:
    """A kernel that is compiled once for its constants and types, not again for values that change from step to step.

    Nothing is lost: records are gathered, and payloads are addressed through tables that no compiler sees through.
    """
    values = [name for name, p in signature(function).parameters.items() if "constexpr" not in str(p.annotation)]
    return triton.jit(function, do_not_specialize=values, do_not_specialize_on_alignment=values)


@triton.jit
def mix(token, position):
    """As :func:`kvcanary_agent.kernels.hashing.mix`, on int64."""
    x = token * _TOKEN_FACTOR + position * _POSITION_FACTOR
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FINALISER_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _FINALISER_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def low_half(packed):
    """The low four bytes of eight, as a signed number."""
    return packed.to(tl.int32).to(tl.int64)


@triton.jit
def high_half(packed):
    """The high four bytes of eight, as a signed number."""
    return packed >> 32


@triton.jit
def halves(low, high):
    """Eight bytes of a record, from what `low_half` and `high_half` say of them."""
    return (high << 32) | (low & 0xFFFFFFFF)


@triton.jit
def append_with(
    ring, ring_count, tallies, capacity, mask, fault, group, step, owner, position, slot, part, expected, found,
    writer, written_step, recorded_position,
):  # fmt: skip
    """Append a violation for each lane of ``mask`` and count it; blocks of int64, or scalars where all are the same."""
    at = tl.atomic_add(ring_count + slot * 0, 1, mask=mask)
    entry = ring + at * FIELDS
    kept = mask & (at < capacity)
    tl.store(entry + 0, fault, mask=kept)
    tl.store(entry + 1, slot * 0 + group, mask=kept)
    tl.store(entry + 2, slot * 0 + step, mask=kept)
    tl.store(entry + 3, slot * 0 + owner, mask=kept)
    tl.store(entry + 4, position, mask=kept)
    tl.store(entry + 5, slot, mask=kept)
    tl.store(entry + 6, slot * 0 + part, mask=kept)
    tl.store(entry + 7, expected, mask=kept)
    tl.store(entry + 8, found, mask=kept)
    tl.store(entry + 9, writer, mask=kept)
    tl.store(entry + 10, written_step, mask=kept)
    tl.store(entry + 11, recorded_position, mask=kept)
    tl.atomic_add(tallies + fault, 1, mask=mask)


@triton.jit
def append(
    ring, ring_count, tallies, capacity, mask, fault, group, step, owner, position, slot, part, expected, found,
    table, num_slots,
):  # fmt: skip
    """As `append_with`, with what the slot's record says at this moment."""
    if tl.max(mask.to(tl.int32), 0) > 0:
        inside = (slot >= 0) & (slot < num_slots)
        record = table + tl.where(inside, slot, 0) * COLUMNS
        place = tl.load(record + PLACE, mask=mask & inside, other=-1)
        write = tl.load(record + WRITE, mask=mask & inside, other=0)
        append_with(
            ring, ring_count, tallies, capacity, mask, fault, group, step, owner, position,
            tl.where(inside, slot, -1), part, expected, found,
            low_half(write), high_half(write), low_half(place),
        )  # fmt: skip
