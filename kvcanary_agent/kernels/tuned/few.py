"""Steps of few tokens, one after the other in Python's numbers.

For a handful of slots a call into torch costs more than all the arithmetic behind it. What is found here is what the
screens for whole batches would find: everything is right, or they are to be asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary_agent.kernels.hashing import mix_of
from kvcanary_agent.kernels.plan import KnownTokens, Rows, Writes, Written

from .memory import Record, RecordMemory, Rows2D, numbers_in, rows_of, tensor_of

FEW = 64
"""Up to so many slots are looked at one by one."""
_SIGN, _MODULUS = 1 << 63, 1 << 64


class Tokens:
    """The tokens that the rows of a step are known to consist of."""

    def __init__(self, known: KnownTokens) -> None:
        self.table = rows_of(known.tokens)
        self.rows: list[int] = known.rows.tolist()
        self._known = known

    def at(self, row: int, position: int) -> int:
        """The token at a position of a row; less than 0 where unknown."""
        if position >= self.table.width:
            return -1
        token: int = self.table.numbers[self.rows[row] * self.table.stride + position]
        return token

    def octets(self, row: int, begin: int, end: int) -> bytes:
        """The memory of the tokens of a row from position ``begin`` to ``end``, as far as the table has them."""
        return self.table.octets(self.rows[row], begin, end)

    @property
    def dtype(self) -> torch.dtype:
        return self._known.tokens.dtype


class Held:
    """Which blocks the rows of a step hold, one question after the other."""

    def __init__(self, held: torch.Tensor, held_rows: Sequence[int]) -> None:
        self._table, self._held_rows = Rows2D(held), held_rows

    def is_strange(self, row: int, block: int) -> bool:
        """Whether the row is known not to hold the block."""
        holder = self._held_rows[row]
        return holder >= 0 and not self._table.numbers[holder * self._table.stride + block]


def sound_slots(
    memory: RecordMemory,
    rows: Rows,
    table: Rows2D,
    spans: Sequence[tuple[int, int, int]],
    lows: Sequence[int],
    tokens: Tokens | None,
    held: Held | None,
) -> list[int] | None:
    """The slots read, if each was written for its row, position, token and prefix, and is held; otherwise None.

    Args:
        memory: Of the group.
        rows: Who reads.
        table: Their block table.
        spans: Row, first position and end of what to look at.
        lows: The first position that each row reads: nothing is known of what stands before.
        tokens: Of the rows, if they are known.
        held: Who holds what, if that is known.
    """
    size, num_blocks, entries, stride = memory.block_size, memory.num_blocks, table.numbers, table.stride
    seeds, generations = rows.seeds.tolist(), memory.generations
    slots = []
    for row, begin, end in spans:
        seed = seeds[row]
        chain: int | None = seed if begin == 0 else None
        if begin > lows[row]:
            block = entries[row * stride + (begin - 1) // size]
            if not 0 <= block < num_blocks:
                return None
            chain = memory.chain_after(block * size + (begin - 1) % size)
        for position in range(begin, end):
            block = entries[row * stride + position // size]
            if not 0 <= block < num_blocks or (held is not None and held.is_strange(row, block)):
                return None
            slot = block * size + position % size
            at, generation, token, of_seed, before, after = memory.of(slot)[:6]
            if at != position or of_seed != seed or generation != generations[block]:
                return None
            if before != chain and chain is not None:
                return None
            if tokens is not None and token != tokens.at(row, position) >= 0:
                return None
            slots.append(slot)
            chain = after
    return slots


class FewWrites:
    """Writes that go where they should, and the records that they will leave.

    Attributes:
        slots: Where they go.
    """

    def __init__(self, memory: RecordMemory, slots: list[int], records: list[Record], written: Written):
        self._memory, self.slots, self._table, self._written = memory, slots, records, written

    def enter(self) -> Written:
        """Record them."""
        for slot, record in zip(self.slots, self._table, strict=True):
            self._memory.put(slot, record)
        return self._written


def few_writes(memory: RecordMemory, rows: Rows, writes: Writes) -> FewWrites | None:
    """The writes of a step if they are few, and all is well with them; None is no verdict."""
    count, size, num_blocks = writes.slots.shape[0], memory.block_size, memory.num_blocks
    if not 0 < count <= FEW or rows.owners.shape[0] > FEW:
        return None
    of_row, slots, positions = writes.rows.tolist(), writes.slots.tolist(), writes.positions.tolist()
    table, lengths = rows_of(rows.block_table), rows.prefix_lens.tolist()
    entries, stride, last = table.numbers, table.stride, table.width * size
    if len(set(slots)) < count or min(positions) < 0 or max(positions) >= last:
        return None
    held = None if rows.held is None else Held(rows.held, rows.held_rows.tolist())
    references, generations = numbers_in(rows.references), memory.generations
    known = None if writes.known is None else Tokens(writes.known)
    new_tokens, owners, seeds = writes.tokens.tolist(), rows.owners.tolist(), rows.seeds.tolist()
    # Position and chain at which each row goes on.
    ahead: dict[int, tuple[int, int]] = {}
    unwritten = set(slots)
    table_of_records, other_token, other_write = [], [], []
    for order, (row, slot, position, token) in enumerate(zip(of_row, slots, positions, new_tokens, strict=True)):
        block = entries[row * stride + position // size]
        if slot != block * size + position % size or not 0 <= block < num_blocks:
            return None
        if references[block] > 1 or (held is not None and held.is_strange(row, block)):
            return None
        if known is not None and token != known.at(row, position) >= 0:
            return None
        wanted, chain = ahead.get(row) or (lengths[row], seeds[row])
        if wanted and row not in ahead:
            if wanted > last:
                return None
            before = entries[row * stride + (wanted - 1) // size]
            at = before * size + (wanted - 1) % size
            # A prefix that another row computes in this very step is for the general way.
            if not 0 <= before < num_blocks or at in unwritten:
                return None
            chain = memory.chain_after(at)
        if position != wanted:
            return None
        old = memory.record(slot)
        recorded = old.step > 0
        other_token.append(recorded and old.token != token)
        other_write.append(old.step == 0 or other_token[-1] or (recorded and old.position != position))
        after = (chain + mix_of(token, position) + _SIGN) % _MODULUS - _SIGN
        ahead[row] = position + 1, after
        table_of_records.append(
            # In the order of its fields: this is the inner loop.
            Record(
                position,
                generations[block],
                token,
                seeds[row],
                chain,
                after,
                owners[row],
                rows.step,
                0,
                old.unused,
                order,
                old.claim_step,
            )
        )
    written = Written(
        step=rows.step,
        slots=writes.slots,
        owners=tensor_of([owners[row] for row in of_row], torch.int32),
        positions=writes.positions,
        other_token=tensor_of(other_token, torch.bool),
        other_write=tensor_of(other_write, torch.bool),
    )
    return FewWrites(memory, slots, table_of_records, written)
