"""Steps of few tokens, one after the other in Python's numbers.

For a handful of slots a call into torch costs more than all the arithmetic behind it. What is found here is what the
screens for whole batches would find: everything is right, or they are to be asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcanary_agent.kernels.hashing import mix_of
from kvcanary_agent.kernels.plan import KnownTokens, Rows, Writes, Written
from kvcanary_agent.kernels.records import Column, Records

FEW = 64
"""Up to so many slots are looked at one by one."""
_SIGN, _MODULUS = 1 << 63, 1 << 64
_LOW_HALF = (1 << 32) - 1


def _wrap(number: int) -> int:
    """As a signed 64-bit number."""
    return (number + _SIGN) % _MODULUS - _SIGN


def _blocks_at(rows: Rows, places: list[tuple[int, int]], size: int) -> list[int]:
    """The block of each pair of row and position, by the block table."""
    width = rows.block_table.shape[1]
    at = torch.tensor([row * width + position // size for row, position in places])
    blocks: list[int] = torch.take(rows.block_table, at).tolist()
    return blocks


def _known_at(known: KnownTokens | None, places: list[tuple[int, int]]) -> list[int]:
    """The token at each pair of row and position; -1 where unknown."""
    width = known.tokens.shape[1] if known is not None else 0
    if known is None or not width:
        return [-1] * len(places)
    of_row = known.rows.tolist()
    at = torch.tensor([of_row[row] * width + min(position, width - 1) for row, position in places])
    tokens = torch.take(known.tokens, at).tolist()
    return [token if position < width else -1 for token, (_, position) in zip(tokens, places, strict=True)]


# Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class FewReads:
    """Slots that a step reads.

    Attributes:
        places: Row and position of each, row by row, positions ascending.
        low: The first position that each row reads.
        end: The longest row's length.
    """

    places: list[tuple[int, int]]
    low: list[int]
    end: int


def few_reads(rows: Rows, start: torch.Tensor, low: torch.Tensor | None) -> FewReads | None:
    """What each row reads from position ``start``, ``[rows]`` int64, on; None if that is more than a few slots."""
    lengths = rows.prefix_lens.tolist()
    if len(lengths) > FEW:
        return None
    lows = [0] * len(lengths) if low is None else low.tolist()
    starts = start.tolist()
    if sum(length - first for first, length in zip(starts, lengths, strict=True) if length > first) > FEW:
        return None
    places = [
        (row, position)
        for row, (first, length) in enumerate(zip(starts, lengths, strict=True))
        for position in range(first, length)
    ]
    return FewReads(places=places, low=lows, end=max(lengths))


def slots_of_sound_reads(records: Records, rows: Rows, reads: FewReads, known: KnownTokens | None) -> list[int] | None:
    """The slots read, if each was written for its row, position, token and prefix; otherwise None."""
    if not reads.places:
        return []
    size = records.block_size
    places: list[tuple[int, int]] = []
    # The slot before each row's first one is there for its chain alone.
    before: set[int] = set()
    last = -1
    for row, position in reads.places:
        if row != last and position > reads.low[row]:
            before.add(len(places))
            places.append((row, position - 1))
        places.append((row, position))
        last = row
    blocks = _blocks_at(rows, places, size)
    if min(blocks) < 0 or max(blocks) >= records.num_blocks:
        return None
    slots = [block * size + position % size for block, (_, position) in zip(blocks, places, strict=True)]
    record = records.table.index_select(0, torch.tensor(slots)).tolist()
    generations = records.block_generation.index_select(0, torch.tensor(blocks)).tolist()
    tokens, seeds = _known_at(known, places), rows.seeds.tolist()
    last, chain = -1, 0
    for at, (row, position) in enumerate(places):
        place, token, seed, chain_before, chain_after = record[at][: Column.CHAIN_AFTER + 1]
        if at not in before:
            if place != position + (generations[at] << 32) or seed != seeds[row]:
                return None
            if token != tokens[at] and tokens[at] >= 0:
                return None
            if row != last:
                chain = seeds[row] if position == 0 else chain_before
            if chain_before != chain:
                return None
        last, chain = row, chain_after
    return [slot for at, slot in enumerate(slots) if at not in before]


# Writes


@dataclass(frozen=True, slots=True, kw_only=True)
class FewWrites:
    """Writes that go where they should, and the records that they will leave."""

    records: Records
    slots: torch.Tensor
    table: list[list[int]]
    written: Written

    def enter(self) -> Written:
        """Record them."""
        self.records.table.index_copy_(0, self.slots, torch.tensor(self.table))
        return self.written


def few_writes(records: Records, rows: Rows, writes: Writes) -> FewWrites | None:
    """The writes of a step if they are few, and all is well with them; None is no verdict."""
    count, size = writes.slots.shape[0], records.block_size
    if not 0 < count <= FEW or rows.held is not None or rows.owners.shape[0] > FEW:
        return None
    of_row, slots, positions = writes.rows.tolist(), writes.slots.tolist(), writes.positions.tolist()
    lengths, width = rows.prefix_lens.tolist(), rows.block_table.shape[1]
    if len(set(slots)) < count or min(positions) < 0 or max(positions) >= width * size:
        return None
    writing = sorted({row for row in of_row if lengths[row]})
    if any(not 0 < lengths[row] <= width * size for row in writing):
        return None
    places = list(zip(of_row, positions, strict=True)) + [(row, lengths[row] - 1) for row in writing]
    blocks = _blocks_at(rows, places, size)
    if min(blocks) < 0 or max(blocks) >= records.num_blocks:
        return None
    wanted = [block * size + position % size for block, (_, position) in zip(blocks, places, strict=True)]
    prefixes = wanted[count:]
    # A prefix that another row computes in this very step is for the general way.
    if wanted[:count] != slots or not set(prefixes).isdisjoint(slots):
        return None
    tokens = writes.tokens.tolist()
    known = _known_at(writes.known, places[:count])
    if any(wanted >= 0 and wanted != token for wanted, token in zip(known, tokens, strict=True)):
        return None

    record = records.table.index_select(0, torch.tensor(wanted)).tolist()
    generations = records.block_generation.index_select(0, torch.tensor(blocks[:count])).tolist()
    owners, seeds = rows.owners.tolist(), rows.seeds.tolist()
    chains = dict(zip(writing, (old[Column.CHAIN_AFTER] for old in record[count:]), strict=True))
    next_position = list(lengths)
    step = rows.step << 32
    table, other_token, other_write = [], [], []
    for order, (row, position) in enumerate(places[:count]):
        if position != next_position[row]:
            return None
        next_position[row] = position + 1
        old, token = record[order], tokens[order]
        old_step = old[Column.WRITE] >> 32
        other_token.append(old_step > 0 and old[Column.TOKEN] != token)
        moved = old_step > 0 and old[Column.PLACE] & _LOW_HALF != position
        other_write.append(old_step == 0 or moved or other_token[order])
        chain = chains.get(row, seeds[row])
        chains[row] = after = _wrap(chain + mix_of(token, position))
        place = position + (generations[order] << 32)
        table.append([place, token, seeds[row], chain, after, owners[row] + step, old[Column.STATE] >> 32 << 32, order])
    written = Written(
        step=rows.step,
        slots=writes.slots,
        owners=rows.owners.index_select(0, writes.rows),
        positions=writes.positions,
        other_token=torch.tensor(other_token),
        other_write=torch.tensor(other_write),
    )
    return FewWrites(records=records, slots=writes.slots, table=table, written=written)
