"""Before a forward: every slot that a step reads, found by walking its block tables."""

# Triton's language has types of its own, which annotations cannot say.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary_agent.kernels.plan import Fault

from .common import (
    CHAIN,
    CHAIN_AFTER,
    COLUMNS,
    PLACE,
    SEED,
    TOKEN,
    UNKNOWN_GENERATION,
    append,
    high_half,
    kernel,
    low_half,
)

_ADDRESS = tl.constexpr(int(Fault.READ_ADDRESS))
_NOT_HELD = tl.constexpr(int(Fault.READ_NOT_HELD))
_UNWRITTEN = tl.constexpr(int(Fault.UNWRITTEN))
_POSITION = tl.constexpr(int(Fault.POSITION))
_TOKEN = tl.constexpr(int(Fault.TOKEN))
_SEED = tl.constexpr(int(Fault.SEED))
_CHAIN = tl.constexpr(int(Fault.CHAIN))
NO_FAULT = tl.constexpr(-1)
SILENT = tl.constexpr(-2)
"""Verdict on a slot that cannot be judged."""


@triton.jit
def spans(prefix_lens, num_rows, window, block_size, unit, ROWS: tl.constexpr):
    """How many units of that many slots each row reads, from the block where its window starts: ``[ROWS]``."""
    row = tl.arange(0, ROWS)
    length = tl.load(prefix_lens + row, mask=row < num_rows, other=0).to(tl.int64)
    low = tl.where(window > 0, tl.maximum(length - window + 1, 0), 0)
    slots = tl.maximum(length - low // block_size * block_size, 0)
    return ((slots + unit - 1) // unit).to(tl.int32)


@triton.jit
def judge(
    position, live, row, seed,
    table, num_blocks, block_size, block_generation,
    block_table, table_stride, width,
    held, held_stride, holder, HAS_HELD: tl.constexpr,
    tokens, tokens_stride, tokens_width, known_row, length_known, HAS_TOKENS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """The first fault of each slot but a broken chain, the slot, and the two values that disagree."""
    column = position // block_size
    offset = position - column * block_size
    block = tl.load(block_table + row * table_stride + column, mask=live & (column < width), other=-1).to(tl.int64)
    outside = (block < 0) | (block >= num_blocks)
    at = tl.where(outside, 0, block)
    slot = block * block_size + offset
    record = table + (at * block_size + offset) * COLUMNS
    place = tl.load(record + PLACE, mask=live, other=0)
    generation = high_half(place)
    current = tl.load(block_generation + at, mask=live, other=0).to(tl.int64)
    recorded_position = low_half(place)
    recorded_token = tl.load(record + TOKEN, mask=live, other=0)
    recorded_seed = tl.load(record + SEED, mask=live, other=0)

    # The least of the faults that apply comes last, so that it wins.
    wrong = recorded_seed != seed
    fault = tl.where(wrong, _SEED, NO_FAULT)
    expected = tl.where(wrong, seed, 0)
    found = tl.where(wrong, recorded_seed, 0)
    if HAS_TOKENS:
        known = tl.load(
            tokens + known_row * tokens_stride + position, mask=live & (position < tokens_width), other=-1
        ).to(tl.int64)
        known = tl.where(known < 0, -1, known)
        if HAS_LENGTHS:
            known = tl.where(position < length_known, known, -2)
        wrong = (recorded_token != known) & (known != -1)
        fault = tl.where(wrong, _TOKEN, fault)
        expected = tl.where(wrong, known, expected)
        found = tl.where(wrong, recorded_token, found)
    wrong = recorded_position != position
    fault = tl.where(wrong, _POSITION, fault)
    expected = tl.where(wrong, position, expected)
    found = tl.where(wrong, recorded_position, found)
    wrong = generation != current
    fault = tl.where(wrong, _UNWRITTEN, fault)
    expected = tl.where(wrong, current, expected)
    found = tl.where(wrong, generation, found)
    if HAS_HELD:
        holders = position * 0 + holder
        holds = tl.load(held + holders * held_stride + at, mask=live & (holders >= 0), other=1)
        wrong = holds == 0
        fault = tl.where(wrong, _NOT_HELD, fault)
        expected = tl.where(wrong, block, expected)
        found = tl.where(wrong, block, found)
    fault = tl.where(outside, _ADDRESS, fault)
    expected = tl.where(outside, position, expected)
    found = tl.where(outside, block, found)
    fault = tl.where((generation == UNKNOWN_GENERATION) | ~live, SILENT, fault)
    return fault, slot, record, expected, found


@kernel
def verify_reads_kernel(
    table, num_blocks, block_size, block_generation,
    owners, seeds, prefix_lens, num_rows, window,
    block_table, table_stride, width,
    held, held_stride, held_rows,
    tokens, tokens_stride, tokens_width, known_rows, lengths,
    ring, ring_count, tallies, capacity, group, step, read_tally,
    HAS_HELD: tl.constexpr, HAS_TOKENS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Check token, position, chain, holder, generation and address of every slot read.

    A persistent grid over the tiles of all rows; which tile is whose follows from a prefix sum of their lengths.
    """
    tiles = spans(prefix_lens, num_rows, window, block_size, TILE, ROWS)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        row = tl.sum((ends <= work).to(tl.int32), 0).to(tl.int64)
        tile = work - tl.sum(tl.where(tl.arange(0, ROWS) < row, tiles, 0), 0)
        length = tl.load(prefix_lens + row)
        low = tl.where(window > 0, tl.maximum(length - window + 1, 0), 0)
        position = low // block_size * block_size + tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        live = (position >= low) & (position < length)
        seed = tl.load(seeds + row)
        owner = tl.load(owners + row).to(tl.int64)
        holder = row
        if HAS_HELD:
            holder = tl.load(held_rows + row)
        known_row = row
        length_known = length
        if HAS_TOKENS:
            known_row = tl.load(known_rows + row).to(tl.int64)
            if HAS_LENGTHS:
                length_known = tl.load(lengths + row).to(tl.int64)
        fault, slot, record, expected, found = judge(
            position, live, row, seed,
            table, num_blocks, block_size, block_generation,
            block_table, table_stride, width,
            held, held_stride, holder, HAS_HELD,
            tokens, tokens_stride, tokens_width, known_row, length_known, HAS_TOKENS, HAS_LENGTHS,
        )  # fmt: skip
        before = position - 1
        follows = live & (before >= low)
        fault_before, _, record_before, _, _ = judge(
            before, follows, row, seed,
            table, num_blocks, block_size, block_generation,
            block_table, table_stride, width,
            held, held_stride, holder, HAS_HELD,
            tokens, tokens_stride, tokens_width, known_row, length_known, HAS_TOKENS, HAS_LENGTHS,
        )  # fmt: skip
        chain = tl.load(record + CHAIN, mask=live, other=0)
        after_before = tl.load(record_before + CHAIN_AFTER, mask=follows, other=0)
        wanted = tl.where(position == 0, seed, after_before)
        judged = (position == 0) | (fault_before == NO_FAULT)
        broken = (fault == NO_FAULT) & judged & (chain != wanted)
        fault = tl.where(broken, _CHAIN, fault)
        expected = tl.where(broken, wanted, expected)
        found = tl.where(broken, chain, found)
        append(ring, ring_count, tallies, capacity, fault >= 0, fault.to(tl.int64), group, step, position * 0 + owner,
               position, slot, -1, expected, found, table, num_blocks * block_size)  # fmt: skip
        tl.atomic_add(tallies + read_tally, tl.sum(live.to(tl.int64), 0))
