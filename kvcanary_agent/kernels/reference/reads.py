"""Before a forward: is every slot that a request reads the one that was written for it?"""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.hashing import mix
from kvcanary_agent.kernels.plan import Fault, Reads, Rows
from kvcanary_agent.kernels.records import UNKNOWN, Records
from kvcanary_agent.kernels.ring import ViolationRing

from .reporting import append


def plan_reads(records: Records, rows: Rows, window: int | None) -> Reads:
    """The blocks that each row's queries read: those from its window (or position 0) up to its prefix length."""
    size = records.block_size
    lengths = rows.prefix_lens
    low = torch.zeros_like(lengths) if window is None else (lengths - window + 1).clamp(min=0)
    first = low // size
    counts = ((lengths + size - 1) // size - first).clamp(min=0)
    row = torch.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    column = torch.arange(row.shape[0], device=row.device) - starts[row] + first[row]
    width = rows.block_table.shape[1]
    table_blocks = torch.where(column < width, rows.block_table[row, column.clamp(max=width - 1)], -1)
    outside = (table_blocks < 0) | (table_blocks >= records.num_blocks)
    positions = column[:, None] * size + torch.arange(size, device=row.device)
    live = (positions >= low[row][:, None]) & (positions < lengths[row][:, None])
    return Reads(
        rows=row,
        blocks=torch.where(outside, 0, table_blocks),
        positions=positions,
        live=live,
        low=low,
        outside=outside,
        table_blocks=table_blocks,
        sound=live.clone(),
    )


def verify_metadata(
    records: Records, rows: Rows, reads: Reads, expected: torch.Tensor | None, ring: ViolationRing, group: int
) -> dict[Fault, int]:
    """Check that every slot read is held by the request and was written for its position, token and prefix.

    Clears ``reads.sound`` where a slot fails and appends one violation for it.

    Args:
        expected: ``[entries, block_size]`` as from :func:`known_at`; None if the engine knows no tokens.

    Returns:
        How many slots failed, by fault.
    """
    size, blocks = records.block_size, reads.blocks

    def of_slot(values: torch.Tensor) -> torch.Tensor:
        return values.view(-1, size)[blocks]

    outside = reads.outside[:, None].expand_as(reads.live)
    not_held = rows.not_held(reads.rows, blocks)
    stranger = torch.zeros_like(outside) if not_held is None else not_held[:, None].expand_as(reads.live)
    generation = of_slot(records.generation)
    reads.sound.logical_and_(generation != UNKNOWN)
    unwritten = generation != records.block_generation[blocks][:, None]
    position = of_slot(records.position) != reads.positions
    seeds = rows.seeds[reads.rows][:, None]
    seed = of_slot(records.seed) != seeds
    token = torch.zeros_like(reads.live)
    if expected is not None:
        token = (of_slot(records.token) != expected) & (expected != -1)

    chain = of_slot(records.chain)
    previous = of_slot(records.chain_after).flatten().roll(1).view_as(chain)
    at_start = reads.positions == 0
    wanted = torch.where(at_start, seeds, previous)
    follows = at_start | (reads.positions > reads.low[reads.rows][:, None])
    broken = (chain != wanted) & follows

    failed = reads.sound & (outside | stranger | unwritten | position | token | seed | broken)
    if not bool(failed.any()):
        return {}

    counts: dict[Fault, int] = {}
    slots = blocks[:, None] * size + torch.arange(size, device=blocks.device)
    slots = torch.where(outside, reads.table_blocks[:, None] * size + reads.positions % size, slots)

    def report(fault: Fault, mask: torch.Tensor, want: torch.Tensor, have: torch.Tensor) -> None:
        mask = mask & reads.sound
        count = int(mask.sum())
        if not count:
            return
        counts[fault] = count
        reads.sound.logical_and_(~mask)
        entry, offset = mask.nonzero(as_tuple=True)
        append(
            ring,
            records,
            fault=fault,
            group=group,
            step=rows.step,
            owner=rows.owners[reads.rows[entry]],
            position=reads.positions[entry, offset],
            slot=slots[entry, offset],
            part=-1,
            expected=want.expand_as(mask)[entry, offset].to(torch.int64),
            found=have.expand_as(mask)[entry, offset].to(torch.int64),
        )

    report(Fault.READ_ADDRESS, outside, reads.positions, reads.table_blocks[:, None])
    report(Fault.READ_NOT_HELD, stranger, reads.table_blocks[:, None], reads.table_blocks[:, None])
    report(Fault.UNWRITTEN, unwritten, records.block_generation[blocks][:, None], generation)
    report(Fault.POSITION, position, reads.positions, of_slot(records.position))
    if expected is not None:
        report(Fault.TOKEN, token, expected, of_slot(records.token))
    report(Fault.SEED, seed, seeds, of_slot(records.seed))

    # A chain is judged only against a predecessor that is sound itself.
    sound_before = reads.sound.flatten().roll(1).view_as(chain) | at_start
    breaks = broken & reads.sound & sound_before
    if bool(breaks.any()):
        report(Fault.CHAIN, _foreign_runs(records, rows, reads, breaks), wanted, chain)
    return counts


def _foreign_runs(records: Records, rows: Rows, reads: Reads, breaks: torch.Tensor) -> torch.Tensor:
    """The slots that do not continue their row's prefix, ``[entries, block_size]`` bool.

    A row falls into runs at its breaks. The run at a break is foreign up to the next break whose slot was written by
    the row's own request, or by one that wrote a part of the prefix before: there the row is itself again. What the
    request itself has written on top of a foreign run continues it, and is not reported; a break inside the request's
    own writes is reported for its first slot alone.
    """
    size = records.block_size
    owner = records.owner.view(-1, size)[reads.blocks].flatten()
    row_of = reads.rows.repeat_interleave(size)
    foreign = torch.zeros(owner.shape[0], dtype=torch.bool, device=owner.device)
    at = breaks.flatten().nonzero().flatten().tolist()
    for row in sorted({int(row_of[place]) for place in at}):
        slots = ((row_of == row) & reads.live.flatten()).nonzero().flatten()
        first, end = int(slots[0]), int(slots[-1]) + 1
        starts = [place for place in at if first <= place < end]
        reader = int(rows.owners[row])
        trusted = {reader} | set(owner[first : starts[0]].tolist())
        in_foreign = False
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            back = int(owner[start]) in trusted
            if not back:
                foreign[start:stop] = owner[start:stop] != reader
            elif not in_foreign:
                foreign[start] = True
            in_foreign = not back
    return foreign.view_as(breaks)


def digest(records: Records, rows: Rows, reads: Reads) -> torch.Tensor:
    """What each row reads, in one number per row: ``[rows]`` int64, equal on ranks that agree.

    It covers blocks, positions, chains and whether the slots are written, not their contents, which differ.
    """
    blocks = reads.blocks
    chain = records.chain_after.view(-1, records.block_size)[blocks]
    written = records.generation.view(-1, records.block_size)[blocks] == records.block_generation[blocks][:, None]
    slot = mix(torch.where(written, chain, 0) + reads.table_blocks[:, None], reads.positions)
    of_entry = torch.where(reads.live, slot, 0).sum(1)
    return torch.zeros_like(rows.prefix_lens).index_add_(0, reads.rows, of_entry) + mix(rows.seeds, rows.prefix_lens)
