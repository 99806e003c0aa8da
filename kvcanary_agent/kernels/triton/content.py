"""Bytes: fingerprints of written slots, and of those that a step reads.

A fingerprint is two sums of bytes, each times a key of its place (see `kernels/fingerprints.py`: the product
of the byte's and the segment's key), so a program may walk a payload in any order. Payloads are found through a table
of addresses: the parts of a pool are many tensors of many layouts.
"""

# Triton's language has types of its own, which annotations cannot say.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl

from kvcanary_agent.kernels.plan import Fault

from .common import CLAIM, COLUMNS, PLACE, STATE, append, kernel, low_half
from .reads import NO_FAULT, judge, spans
from .writes import OTHER_TOKEN, OTHER_WRITE

_CONTENT = tl.constexpr(int(Fault.CONTENT))
_TRANSFER = tl.constexpr(int(Fault.TRANSFER))
_LOST_WRITE = tl.constexpr(int(Fault.LOST_WRITE))
_NONFINITE = tl.constexpr(int(Fault.NONFINITE))


class PartColumn(IntEnum):
    """Columns of the table of parts, all int64; distances in bytes."""

    ADDRESS = 0
    BLOCK_STRIDE = 1
    TOKEN_STRIDE = 2
    SIZE_1 = 3
    """Sizes of the payload's last two dimensions, in words, and the distances of its last three."""
    SIZE_2 = 4
    STRIDE_0 = 5
    STRIDE_1 = 6
    STRIDE_2 = 7
    WORDS = 8
    """Words per payload."""
    KEYS = 9
    """Where the part's keys begin in the table of keys."""
    NUMBER_MASK = 10
    """Bits of a number, and what they are if it is not finite."""
    NUMBER_PATTERN = 11
    NUMBERS_PER_WORD = 12
    """0: not checked. -2: a number is two words, the second of which tells."""
    CARRIES_TOKENS = 13


PART_COLUMNS = tl.constexpr(len(PartColumn))


@triton.jit
def _words(part, block, offset, word, mask, WORD: tl.constexpr):
    """Words of payloads, sign-extended to int32; ``part`` points at the part's row of the table."""
    size_1 = tl.load(part + 3)
    size_2 = tl.load(part + 4)
    index = word // size_2
    place = word % size_2 * tl.load(part + 7) + index % size_1 * tl.load(part + 6) + index // size_1 * tl.load(part + 5)
    address = tl.load(part) + block * tl.load(part + 1) + offset * tl.load(part + 2) + place
    if WORD == 4:
        return tl.load(address.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    if WORD == 2:
        return tl.load(address.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32)
    return tl.load(address.to(tl.pointer_type(tl.int8)), mask=mask, other=0).to(tl.int32)


@triton.jit
def _halves(words, keys, word, mask, num_words, WORD: tl.constexpr):
    """What each word adds to both halves of the fingerprint, modulo 2^32; keys are ``[2, WORD, num_words]``."""
    low = words * 0
    high = words * 0
    for byte in tl.static_range(WORD):
        value = (words << (24 - 8 * byte)) >> 24
        low += value * tl.load(keys + byte * num_words + word, mask=mask, other=0)
        high += value * tl.load(keys + (WORD + byte) * num_words + word, mask=mask, other=0)
    return low, high


@triton.jit
def _join(low, high):
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _not_finite(words, word, mask, number_mask, pattern, per_word, WORD: tl.constexpr):
    """How many numbers of each word are not finite."""
    bad = words * 0
    for number in tl.static_range(WORD):
        # The number's bits at the bottom of the word; what is above them is masked away.
        shift = tl.where(number < per_word, number * (8 * WORD // tl.maximum(per_word, 1)), 0).to(tl.int32)
        value = (words >> shift).to(tl.int64)
        bad += ((number < per_word) & ((value & number_mask) == pattern)).to(tl.int32)
    upper = (per_word == -2) & (word % 2 == 1) & ((words.to(tl.int64) & number_mask) == pattern)
    return tl.where(mask, bad + upper.to(tl.int32), 0)


@kernel
def record_content_kernel(
    table, num_blocks, block_size, fingerprints, num_parts, parts, all_keys,
    slots, positions, write_rows, owners, flags,
    ring, ring_count, tallies, capacity, group, step, record_tally,
    MEASURE_ONLY: tl.constexpr, WORD: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fingerprint one written slot in all parts; see that it was written at all, and is finite.

    With ``MEASURE_ONLY`` the fingerprints are of what the slot holds before it is written, and nothing is judged.
    """
    at = tl.program_id(0).to(tl.int64)
    num_slots = num_blocks * block_size
    slot = tl.load(slots + at)
    inside = (slot >= 0) & (slot < num_slots)
    # Of several writes to one slot, the last one's program takes care of it.
    claim = tl.load(table + tl.where(inside, slot, 0) * COLUMNS + CLAIM)
    if inside & (low_half(claim) == at):
        block = slot // block_size
        offset = slot - block * block_size
        lane = tl.arange(0, TILE)
        part_lane = tl.arange(0, PARTS)
        # For each part: 1 if its bytes are as they were, 2 if in addition that tells of a lost write, 4 if not finite.
        verdicts = tl.zeros([PARTS], tl.int32)
        prints = tl.zeros([PARTS], tl.int64)
        for number in range(num_parts):
            part = parts + number * PART_COLUMNS
            num_words = tl.load(part + 8)
            keys = all_keys + tl.load(part + 9)
            number_mask = tl.load(part + 10)
            pattern = tl.load(part + 11)
            per_word = tl.load(part + 12)
            low = tl.zeros([TILE], tl.int32)
            high = tl.zeros([TILE], tl.int32)
            bad = tl.zeros([TILE], tl.int32)
            for start in range(0, num_words, TILE):
                word = start + lane.to(tl.int64)
                mask = word < num_words
                words = _words(part, block, offset, word, mask, WORD)
                more_low, more_high = _halves(words, keys, word, mask, num_words, WORD)
                low += more_low
                high += more_high
                bad += _not_finite(words, word, mask, number_mask, pattern, per_word, WORD)
            found = _join(tl.sum(low, 0), tl.sum(high, 0))
            kept = fingerprints + number * num_slots + slot
            before = tl.load(kept)
            tl.store(kept, found)
            same = (found == before).to(tl.int32)
            telling = ((before != 0) & (tl.load(part + 13) != 0)).to(tl.int32)
            verdict = same + 2 * same * telling + 4 * (tl.sum(bad, 0) > 0).to(tl.int32)
            verdicts = tl.where(part_lane == number, verdict, verdicts)
            prints = tl.where(part_lane == number, found, prints)
        if not MEASURE_ONLY:
            tl.store(table + slot * COLUMNS + STATE, 1)
            flag = part_lane * 0 + tl.load(flags + at).to(tl.int32)
            num_same = part_lane * 0 + tl.sum(verdicts & 1, 0)
            unchanged = (num_same == num_parts) & ((flag & OTHER_WRITE) != 0)
            lost = ((verdicts & 2) != 0) & ((flag & OTHER_TOKEN) != 0) & ~unchanged
            # Lost in all parts is one violation, of no part, with the first part's fingerprint.
            whole = (part_lane == 0) & unchanged
            owner = tl.load(owners + tl.load(write_rows + at)).to(tl.int64)
            position = part_lane.to(tl.int64) * 0 + tl.load(positions + at)
            append(ring, ring_count, tallies, capacity, lost | whole, position * 0 + _LOST_WRITE, group, step, owner,
                   position, position * 0 + slot, tl.where(whole, -1, part_lane), position * 0, prints, table,
                   num_slots)  # fmt: skip
            append(ring, ring_count, tallies, capacity, verdicts >= 4, position * 0 + _NONFINITE, group, step, owner,
                   position, position * 0 + slot, part_lane, position * 0, prints, table, num_slots)  # fmt: skip
            tl.atomic_add(tallies + record_tally, 1)


@triton.jit
def _fingerprints_of_block(part, all_keys, block, offsets, live, WORD: tl.constexpr, TILE: tl.constexpr):
    """The fingerprint of each live slot of a block."""
    num_words = tl.load(part + 8)
    keys = all_keys + tl.load(part + 9)
    low = offsets.to(tl.int32) * 0
    high = low
    for start in range(0, num_words, TILE):
        word = start + tl.arange(0, TILE).to(tl.int64)
        mask = word < num_words
        both = live[:, None] & mask[None, :]
        words = _words(part, block, offsets[:, None], word[None, :], both, WORD)
        more_low, more_high = _halves(words, keys, word[None, :], mask[None, :], num_words, WORD)
        low += tl.sum(more_low, 1)
        high += tl.sum(more_high, 1)
    return _join(low, high)


@kernel
def verify_content_kernel(
    table, num_blocks, block_size, block_generation, fingerprints, parts, all_keys,
    owners, seeds, prefix_lens, num_rows, window,
    block_table, table_stride, width,
    held, held_stride, held_rows,
    tokens, tokens_stride, tokens_width, known_rows, lengths,
    first_part, part_step, num_due, remainder, modulus,
    ring, ring_count, tallies, capacity, group, step, content_tally,
    HAS_HELD: tl.constexpr, HAS_TOKENS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compare the due parts of the due blocks that a step reads with their fingerprints.

    A persistent grid over (block that a row reads, due part). Only slots whose metadata are sound are compared.
    """
    counts = spans(prefix_lens, num_rows, window, block_size, block_size, ROWS)
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0) * num_due
    lane = tl.arange(0, BLOCK).to(tl.int64)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = work // num_due
        number = first_part + (work - entry * num_due) * part_step
        row = tl.sum((ends <= entry).to(tl.int32), 0).to(tl.int64)
        length = tl.load(prefix_lens + row)
        low = tl.where(window > 0, tl.maximum(length - window + 1, 0), 0)
        column = low // block_size + entry - tl.sum(tl.where(tl.arange(0, ROWS) < row, counts, 0), 0)
        block = tl.load(block_table + row * table_stride + column, mask=column < width, other=-1).to(tl.int64)
        if (block >= 0) & (block < num_blocks) & (block % modulus == remainder):
            position = column * block_size + lane
            live = (lane < block_size) & (position >= low) & (position < length)
            holder = row
            if HAS_HELD:
                holder = tl.load(held_rows + row)
            known_row = row
            length_known = length
            if HAS_TOKENS:
                known_row = tl.load(known_rows + row).to(tl.int64)
                if HAS_LENGTHS:
                    length_known = tl.load(lengths + row).to(tl.int64)
            fault, slot, record, _, _ = judge(
                position, live, row, tl.load(seeds + row),
                table, num_blocks, block_size, block_generation,
                block_table, table_stride, width,
                held, held_stride, holder, HAS_HELD,
                tokens, tokens_stride, tokens_width, known_row, length_known, HAS_TOKENS, HAS_LENGTHS,
            )  # fmt: skip
            live = live & (fault == NO_FAULT)
            live = live & (tl.load(record + STATE, mask=live, other=0) != 0)
            have = _fingerprints_of_block(parts + number * PART_COLUMNS, all_keys, block, lane, live, WORD, TILE)
            want = tl.load(fingerprints + number * (num_blocks * block_size) + slot, mask=live, other=0)
            append(ring, ring_count, tallies, capacity, live & (have != want), slot * 0 + _CONTENT, group, step,
                   tl.load(owners + row).to(tl.int64), position, slot, number, want, have, table,
                   num_blocks * block_size)  # fmt: skip
            tl.atomic_add(tallies + content_tally, tl.sum(live.to(tl.int64), 0))


@kernel
def verify_blocks_kernel(
    table, num_blocks, block_size, block_generation, fingerprints, parts, all_keys,
    blocks, first_block, first_part, owner,
    ring, ring_count, tallies, capacity, group, step, tally,
    TRANSFER: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compare whole blocks with their fingerprints, whoever may read them; a grid over blocks and parts.

    The blocks are a run from ``first_block`` on (a patrol) or, with ``TRANSFER``, those of a list that came back from
    another tier.
    """
    lane = tl.arange(0, BLOCK).to(tl.int64)
    num_slots = num_blocks * block_size
    number = first_part + tl.program_id(1)
    block = first_block + tl.program_id(0).to(tl.int64)
    if TRANSFER:
        block = tl.load(blocks + tl.program_id(0))
    live = lane < block_size
    slot = block * block_size + lane
    record = table + slot * COLUMNS
    place = tl.load(record + PLACE, mask=live, other=0)
    live = live & (place >> 32 == tl.load(block_generation + block).to(tl.int64))
    live = live & (tl.load(record + STATE, mask=live, other=0) != 0)
    have = _fingerprints_of_block(parts + number * PART_COLUMNS, all_keys, block, lane, live, WORD, TILE)
    want = tl.load(fingerprints + number * num_slots + slot, mask=live, other=0)
    fault = lane * 0 + _CONTENT
    position = lane * 0 - 1
    if TRANSFER:
        fault = lane * 0 + _TRANSFER
        position = low_half(place)
    append(ring, ring_count, tallies, capacity, live & (have != want), fault, group, step, owner, position, slot,
           number, want, have, table, num_slots)  # fmt: skip
    tl.atomic_add(tallies + tally, tl.sum(live.to(tl.int64), 0))


@kernel
def check_null_block_kernel(
    table, num_blocks, block_size, parts, first_part, null_block,
    ring, ring_count, tallies, capacity, group, step,
    BLOCK: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Look for numbers that are not finite in the null block, one program for each part."""
    number = first_part + tl.program_id(0)
    part = parts + number * PART_COLUMNS
    lane = tl.arange(0, BLOCK).to(tl.int64)
    live = lane < block_size
    num_words = tl.load(part + 8)
    number_mask = tl.load(part + 10)
    pattern = tl.load(part + 11)
    per_word = tl.load(part + 12)
    bad = lane.to(tl.int32) * 0
    for start in range(0, num_words, TILE):
        word = start + tl.arange(0, TILE).to(tl.int64)
        both = live[:, None] & (word < num_words)[None, :]
        words = _words(part, null_block, lane[:, None], word[None, :], both, WORD)
        bad += tl.sum(_not_finite(words, word[None, :], both, number_mask, pattern, per_word, WORD), 1)
    append(ring, ring_count, tallies, capacity, live & (bad > 0), lane * 0 + _NONFINITE, group, step, 0, lane * 0 - 1,
           null_block * block_size + lane, number, lane * 0, lane * 0, table, num_blocks * block_size)  # fmt: skip
