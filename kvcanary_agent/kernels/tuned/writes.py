"""Before a forward: one answer for all writes, and records written a row at a time."""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.hashing import mix
from kvcanary_agent.kernels.plan import Rows, Writes, Written
from kvcanary_agent.kernels.records import Column, Records
from kvcanary_agent.kernels.reference.tokens import known_at
from kvcanary_agent.kernels.reference.writes import chain_bases, report_overwritten
from kvcanary_agent.kernels.ring import ViolationRing


def writes_are_clean(records: Records, rows: Rows, writes: Writes) -> bool:
    """Whether every write goes where block table, holder, position and known token say.

    False is no verdict: it may be that nothing is wrong after all.
    """
    size, positions, slots = records.block_size, writes.positions, writes.slots
    if not slots.numel():
        return True
    wanted = (rows.prefix_lens - writes.offsets[:-1]).index_select(0, writes.rows)
    wanted += torch.arange(slots.shape[0])
    column = positions // size
    last = rows.block_table.shape[1] - 1
    expected = rows.block_table[writes.rows, column.clamp(0, last)] * size + (positions - column * size)
    bad = (positions != wanted).logical_or_(slots != expected).logical_or_(column > last)
    bad.logical_or_(slots >= records.num_slots).logical_or_(slots < 0)
    if writes.known is not None:
        known = known_at(writes.known, writes.rows, positions.clamp(min=0))
        bad.logical_or_((known >= 0) & (known != writes.tokens))
    if bool(bad.any()):
        return False
    blocks = slots // size
    if bool((rows.references.index_select(0, blocks) > 1).any()):
        return False
    not_held = rows.not_held(writes.rows, blocks)
    return not_held is None or not bool(not_held.any())


def enter_writes(records: Records, rows: Rows, writes: Writes, ring: ViolationRing, group: int) -> tuple[Written, int]:
    """As the reference's function of that name, with whole records read and written at once."""
    slots, row, tokens, positions = writes.slots, writes.rows, writes.tokens, writes.positions
    added = mix(tokens, positions)
    if slots.shape[0] == rows.owners.shape[0] and torch.equal(row, torch.arange(row.shape[0])):
        after = added.clone()
    else:
        after = added.cumsum(0)
        starts = writes.offsets[:-1].clamp(max=max(0, added.shape[0] - 1))
        before = (after - added).index_select(0, starts) if added.shape[0] else rows.seeds
        after -= before.index_select(0, row)
    inside = (slots >= 0).logical_and_(slots < records.num_slots)
    if not bool(inside.all()):
        # A skipped write is part of its row's chain, but of no record.
        at = inside.nonzero().view(-1)
        slots, row, tokens, positions = slots[at], row[at], tokens[at], positions[at]
        added, after = added[at], after[at]

    old = records.table.index_select(0, slots)
    old_halves = old.view(torch.int32)
    old_step = old_halves[:, 2 * Column.WRITE + 1]
    recorded, never = old_step > 0, old_step == 0
    other_token = (old[:, Column.TOKEN] != tokens).logical_and_(recorded)
    other_write = (old_halves[:, 2 * Column.PLACE] != positions).logical_and_(recorded)
    other_write.logical_or_(other_token).logical_or_(never)
    owners = rows.owners.index_select(0, row)
    written = Written(
        step=rows.step,
        slots=slots,
        owners=owners,
        positions=positions,
        other_token=other_token,
        other_write=other_write,
    )

    # `old` is not needed any more: the new records take its place.
    new, halves = old, old_halves
    order = torch.arange(slots.shape[0], dtype=torch.int32)
    halves[:, 2 * Column.PLACE] = positions
    halves[:, 2 * Column.PLACE + 1] = records.block_generation.index_select(0, slots // records.block_size)
    new[:, Column.TOKEN] = tokens
    new[:, Column.SEED] = rows.seeds.index_select(0, row)
    halves[:, 2 * Column.WRITE] = owners
    halves[:, 2 * Column.WRITE + 1] = rows.step
    halves[:, 2 * Column.STATE] = 0
    halves[:, 2 * Column.CLAIM] = order
    # Step and order first: the bases of the chains are found by what this step writes.
    records.step.index_fill_(0, slots, rows.step)
    records.order.scatter_(0, slots, order)
    after = after + chain_bases(records, rows, row, after).index_select(0, row)
    new[:, Column.CHAIN_AFTER] = after
    torch.sub(after, added, out=new[:, Column.CHAIN])
    records.table.index_copy_(0, slots, new)

    winner = records.order.index_select(0, slots)
    if torch.equal(winner, order):
        return written, 0
    return written, report_overwritten(records, written, tokens, after, winner, ring, group)
