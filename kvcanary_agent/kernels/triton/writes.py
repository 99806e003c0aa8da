"""Before a forward: every write is checked and entered, the chains of all new tokens in parallel."""

# Triton's language has types of its own, which annotations cannot say.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary_agent.kernels.plan import Fault

from .common import (
    CHAIN,
    CHAIN_AFTER,
    CLAIM,
    COLUMNS,
    PLACE,
    SEED,
    STATE,
    TOKEN,
    WRITE,
    append,
    append_with,
    halves,
    high_half,
    kernel,
    low_half,
    mix,
)

_ADDRESS = tl.constexpr(int(Fault.WRITE_ADDRESS))
_NOT_HELD = tl.constexpr(int(Fault.WRITE_NOT_HELD))
_TWICE = tl.constexpr(int(Fault.WRITE_TWICE))
_SHARED = tl.constexpr(int(Fault.WRITE_SHARED))
_POSITION = tl.constexpr(int(Fault.WRITE_POSITION))
_TOKEN = tl.constexpr(int(Fault.WRITE_TOKEN))
_PAD_OUTSIDE = tl.constexpr(int(Fault.PAD_OUTSIDE))
_PAD_LIVE = tl.constexpr(int(Fault.PAD_LIVE))
OTHER_TOKEN = tl.constexpr(1)
OTHER_WRITE = tl.constexpr(2)


@triton.jit
def _check_padding(
    at, table, num_blocks, block_size, block_generation, pad_slots, num_pads, null_block,
    ring, ring_count, tallies, capacity, group, step,
):  # fmt: skip
    """Padding may write nowhere (-1) or to the null block."""
    num_slots = num_blocks * block_size
    mask = at < num_pads
    slot = tl.load(pad_slots + at, mask=mask, other=-1).to(tl.int64)
    inside = (slot >= 0) & (slot < num_slots)
    known = tl.where(inside, slot, 0)
    block = known // block_size
    wrong = mask & (slot != -1) & ~(inside & (block == null_block))
    generation = high_half(tl.load(table + known * COLUMNS + PLACE, mask=mask, other=0))
    current = tl.load(block_generation + block, mask=mask, other=0).to(tl.int64)
    fault = tl.where(inside & (generation == current), _PAD_LIVE, _PAD_OUTSIDE).to(tl.int64)
    append(ring, ring_count, tallies, capacity, wrong, fault, group, step, 0, slot * 0 - 1, slot, -1, slot * 0 - 1,
           slot, table, num_slots)  # fmt: skip


@triton.jit
def _row_of(at, mask, offsets, num_rows):
    """The row whose new tokens those at ``at`` are: the first one that ends behind them."""
    low = at * 0
    high = low + num_rows - 1
    while tl.max(tl.where(mask, high - low, 0), 0) > 0:
        middle = (low + high) // 2
        before = tl.load(offsets + middle + 1, mask=mask & (low < high), other=0).to(tl.int64) <= at
        high = tl.where((low < high) & ~before, middle, high)
        low = tl.where((low < high) & before, middle + 1, low)
    return low


@kernel
def check_writes_kernel(
    table, num_blocks, block_size, block_generation,
    owners, prefix_lens, num_rows, block_table, table_stride, width,
    held, held_stride, held_rows, references, first_holders,
    offsets, step_tokens, step_positions, step_slots, num_tokens,
    tokens, tokens_stride, tokens_width, known_rows, lengths,
    pad_slots, num_pads, null_block,
    kept_rows, kept_tokens, kept_positions, kept_slots, sums, totals, flags,
    ring, ring_count, tallies, capacity, group, step,
    HAS_HELD: tl.constexpr, HAS_TOKENS: tl.constexpr, HAS_LENGTHS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Check each write, note which is the last one to each slot, and sum up the chains of each tile of tokens.

    A grid of tiles of tokens, then of tiles of padding. The engine's integers may be of four bytes or of eight, and are
    its own again when this kernel is done: ``kept_rows``, ``kept_tokens``, ``kept_positions`` and ``kept_slots`` take
    what others need of them. ``sums`` takes each token's inclusive sum within its tile, ``totals`` each tile's;
    ``flags`` what the slot's record says about the write.
    """
    num_slots = num_blocks * block_size
    tile = tl.program_id(0)
    num_tiles = (num_tokens + TILE - 1) // TILE
    lane = tl.arange(0, TILE)
    if tile >= num_tiles:
        _check_padding(
            (tile - num_tiles) * TILE + lane, table, num_blocks, block_size, block_generation, pad_slots, num_pads,
            null_block, ring, ring_count, tallies, capacity, group, step,
        )  # fmt: skip
    else:
        at = tile.to(tl.int64) * TILE + lane
        mask = at < num_tokens
        row = _row_of(at, mask, offsets, num_rows)
        token = tl.load(step_tokens + at, mask=mask, other=0).to(tl.int64)
        position = tl.load(step_positions + at, mask=mask, other=0).to(tl.int64)
        slot = tl.load(step_slots + at, mask=mask, other=-1).to(tl.int64)
        tl.store(kept_rows + at, row, mask=mask)
        tl.store(kept_tokens + at, token, mask=mask)
        tl.store(kept_positions + at, position, mask=mask)
        tl.store(kept_slots + at, slot, mask=mask)
        inside = mask & (slot >= 0) & (slot < num_slots)
        block = tl.where(inside, slot, 0) // block_size

        added = tl.where(mask, mix(token, position), 0)
        tl.store(sums + at, tl.cumsum(added, 0), mask=mask)
        tl.store(totals + tile, tl.sum(added, 0))

        record = table + tl.where(inside, slot, 0) * COLUMNS
        place = tl.load(record + PLACE, mask=mask, other=0)
        recorded_token = tl.load(record + TOKEN, mask=mask, other=0)
        current = tl.load(block_generation + block, mask=mask, other=0).to(tl.int64)
        other = (recorded_token != token) | (low_half(place) != position)

        first = tl.load(offsets + row, mask=mask, other=0).to(tl.int64)
        wanted = tl.load(prefix_lens + row, mask=mask, other=0).to(tl.int64) + at - first
        wrong = mask & (position != wanted)
        fault = tl.where(wrong, _POSITION, -1)
        expected = tl.where(wrong, wanted, 0)
        found = tl.where(wrong, position, 0)
        if HAS_TOKENS:
            known_row = tl.load(known_rows + row, mask=mask, other=0).to(tl.int64)
            known = tl.load(
                tokens + known_row * tokens_stride + position,
                mask=mask & (position >= 0) & (position < tokens_width),
                other=-1,
            ).to(tl.int64)
            if HAS_LENGTHS:
                known = tl.where(position < tl.load(lengths + row, mask=mask, other=0).to(tl.int64), known, -1)
            only = mask & (known >= 0) & (known != token) & ~wrong
            fault = tl.where(only, _TOKEN, fault)
            expected = tl.where(only, known, expected)
            found = tl.where(only, token, found)
        holder = tl.load(held_rows + row, mask=mask, other=-1)
        shared = inside & other & (high_half(place) == current)
        shared = shared & (tl.load(references + block, mask=mask, other=0) > 1)
        shared = shared & (tl.load(first_holders + block, mask=mask, other=-1).to(tl.int64) != holder)
        fault = tl.where(shared, _SHARED, fault)
        expected = tl.where(shared, recorded_token, expected)
        found = tl.where(shared, token, found)
        if HAS_HELD:
            holds = tl.load(held + holder * held_stride + block, mask=inside & (holder >= 0), other=1)
            stranger = inside & (holds == 0)
            fault = tl.where(stranger, _NOT_HELD, fault)
            expected = tl.where(stranger, block, expected)
            found = tl.where(stranger, block, found)
        # Division rounds towards zero here, but a negative position is in no table anyway.
        column = position // block_size
        in_table = mask & (position >= 0) & (column < width)
        table_block = tl.load(block_table + row * table_stride + column, mask=in_table, other=-1).to(tl.int64)
        right = tl.where(in_table, table_block * block_size + position % block_size, -1)
        misplaced = mask & (((slot != right) & (slot != -1)) | (slot >= num_slots))
        fault = tl.where(misplaced, _ADDRESS, fault)
        expected = tl.where(misplaced, right, expected)
        found = tl.where(misplaced, slot, found)
        owner = tl.load(owners + row, mask=mask, other=0).to(tl.int64)
        append(ring, ring_count, tallies, capacity, fault >= 0, fault.to(tl.int64), group, step, owner, position, slot,
               -1, expected, found, table, num_slots)  # fmt: skip

        # Of several writes to one slot, that of the last token counts, as if they came one after another.
        tl.atomic_max(record + CLAIM, halves(at, slot * 0 + step), mask=inside)
        written_step = high_half(tl.load(record + WRITE, mask=inside, other=0))
        recorded = written_step > 0
        other_token = recorded & (recorded_token != token)
        other_write = (written_step == 0) | (recorded & other)
        flag = tl.where(other_token, OTHER_TOKEN, 0) | tl.where(other_write, OTHER_WRITE, 0)
        tl.store(flags + at, tl.where(inside, flag, 0).to(tl.int8), mask=mask)


@triton.jit
def _sum_in_row(at, mask, first, new_tokens, positions, sums, totals, TILE: tl.constexpr):
    """The sum over a row's new tokens up to and including each; ``first`` is where its row begins."""
    token = tl.load(new_tokens + first, mask=mask, other=0)
    position = tl.load(positions + first, mask=mask, other=0)
    result = tl.load(sums + at, mask=mask, other=0) - tl.load(sums + first, mask=mask, other=0) + mix(token, position)
    from_tile = tl.where(mask, first // TILE, 0)
    to_tile = tl.where(mask, at // TILE, 0)
    for tile in range(tl.min(from_tile, 0), tl.max(to_tile, 0)):
        result += tl.where((from_tile <= tile) & (tile < to_tile), tl.load(totals + tile), 0)
    return result


@triton.jit
def _chain_after(
    at, mask, row, table, num_blocks, block_size, seeds, prefix_lens, block_table, table_stride, width,
    write_rows, offsets, new_tokens, positions, sums, totals, step, num_rows, TILE: tl.constexpr,
):  # fmt: skip
    """The chain after each token: what its row has summed up, on top of the chain before its first new token.

    That is the chain after the row's last prefix token. If another row writes that in this very step, what that row has
    summed up to there is added, and so on, until a row is reached whose prefix was complete before.
    """
    first = tl.load(offsets + row, mask=mask, other=0).to(tl.int64)
    result = _sum_in_row(at, mask, first, new_tokens, positions, sums, totals, TILE)
    pending = mask
    rounds = num_rows
    while (tl.max(pending.to(tl.int32), 0) > 0) & (rounds > 0):
        last = tl.load(prefix_lens + row, mask=pending, other=0).to(tl.int64) - 1
        from_seed = pending & (last < 0)
        result += tl.load(seeds + row, mask=from_seed, other=0)
        pending = pending & (last >= 0)
        column = tl.minimum(last // block_size, width - 1)
        block = tl.load(block_table + row * table_stride + column, mask=pending, other=0).to(tl.int64)
        block = tl.minimum(tl.maximum(block, 0), num_blocks - 1)
        record = table + (block * block_size + last % block_size) * COLUMNS
        claim = tl.load(record + CLAIM, mask=pending, other=0)
        complete = pending & (high_half(claim) != step)
        result += tl.load(record + CHAIN_AFTER, mask=complete, other=0)
        pending = pending & ~complete
        writer = tl.where(pending, low_half(claim), 0)
        writer_row = tl.load(write_rows + writer, mask=pending, other=0)
        # Only a misdirected write puts a row's own new token into its prefix; such a row starts from nothing.
        pending = pending & (writer_row != row)
        row = tl.where(pending, writer_row, row)
        first = tl.load(offsets + row, mask=pending, other=0).to(tl.int64)
        result += tl.where(pending, _sum_in_row(writer, pending, first, new_tokens, positions, sums, totals, TILE), 0)
        rounds -= 1
    return result


@triton.jit
def enter_tile(
    table, num_blocks, block_size, block_generation,
    owners, seeds, prefix_lens, num_rows, block_table, table_stride, width,
    write_rows, offsets, new_tokens, positions, slots, num_tokens,
    sums, totals,
    ring, ring_count, tallies, capacity, group, step,
    TILE: tl.constexpr,
):  # fmt: skip
    """Enter the tile of tokens that has the program's number; see `enter_writes_kernel`."""
    num_slots = num_blocks * block_size
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + at, mask=at < num_tokens, other=-1)
    mask = (slot >= 0) & (slot < num_slots)
    row = tl.load(write_rows + at, mask=mask, other=0)
    token = tl.load(new_tokens + at, mask=mask, other=0)
    position = tl.load(positions + at, mask=mask, other=0)
    after = _chain_after(
        at, mask, row, table, num_blocks, block_size, seeds, prefix_lens, block_table, table_stride, width,
        write_rows, offsets, new_tokens, positions, sums, totals, step, num_rows, TILE,
    )  # fmt: skip
    chain = after - mix(token, position)
    record = table + tl.where(mask, slot, 0) * COLUMNS
    winner = low_half(tl.load(record + CLAIM, mask=mask, other=0))
    owner = tl.load(owners + row, mask=mask, other=0).to(tl.int64)

    beaten = mask & (winner != at)
    if tl.max(beaten.to(tl.int32), 0) > 0:
        other = tl.where(beaten, winner, 0)
        other_row = tl.load(write_rows + other, mask=beaten, other=0)
        other_token = tl.load(new_tokens + other, mask=beaten, other=0)
        other_position = tl.load(positions + other, mask=beaten, other=0)
        other_after = _chain_after(
            other, beaten, other_row, table, num_blocks, block_size, seeds, prefix_lens, block_table, table_stride,
            width, write_rows, offsets, new_tokens, positions, sums, totals, step, num_rows, TILE,
        )  # fmt: skip
        wrong = beaten & ((after != other_after) | (position != other_position))
        other_owner = tl.load(owners + other_row, mask=beaten, other=0).to(tl.int64)
        append_with(ring, ring_count, tallies, capacity, wrong, slot * 0 + _TWICE, group, step, owner, position, slot,
                    -1, token, other_token, other_owner, slot * 0 + step, other_position)  # fmt: skip

    wins = mask & (winner == at)
    generation = tl.load(block_generation + tl.where(mask, slot, 0) // block_size, mask=wins, other=0).to(tl.int64)
    tl.store(record + PLACE, halves(position, generation), mask=wins)
    tl.store(record + TOKEN, token, mask=wins)
    tl.store(record + SEED, tl.load(seeds + row, mask=wins, other=0), mask=wins)
    tl.store(record + CHAIN, chain, mask=wins)
    tl.store(record + CHAIN_AFTER, after, mask=wins)
    tl.store(record + WRITE, halves(owner, slot * 0 + step), mask=wins)
    tl.store(record + STATE, slot * 0, mask=wins)


@kernel
def enter_writes_kernel(
    table, num_blocks, block_size, block_generation,
    owners, seeds, prefix_lens, num_rows, block_table, table_stride, width,
    write_rows, offsets, new_tokens, positions, slots, num_tokens,
    sums, totals,
    ring, ring_count, tallies, capacity, group, step,
    TILE: tl.constexpr,
):  # fmt: skip
    """Record who writes what where, for the last write to each slot; one that it overwrites must be the same."""
    enter_tile(
        table, num_blocks, block_size, block_generation, owners, seeds, prefix_lens, num_rows, block_table,
        table_stride, width, write_rows, offsets, new_tokens, positions, slots, num_tokens, sums, totals, ring,
        ring_count, tallies, capacity, group, step, TILE,
    )  # fmt: skip
