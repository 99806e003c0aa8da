"""Before a forward: is every slot that a request reads the one that was written for it?"""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.hashing import mix
from kvcanary_agent.kernels.plan import Fault, Reads, Rows
from kvcanary_agent.kernels.records import Records
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
    unwritten = of_slot(records.generation) != records.block_generation[blocks][:, None]
    position = of_slot(records.position) != reads.positions
    anchor = of_slot(records.anchor) != rows.anchors[reads.rows][:, None]
    token = torch.zeros_like(reads.live)
    if expected is not None:
        token = (of_slot(records.token) != expected) & (expected != -1)

    chain = of_slot(records.chain)
    previous = of_slot(records.chain_after).flatten().roll(1).view_as(chain)
    at_start = reads.positions == 0
    wanted = torch.where(at_start, rows.seeds[reads.rows][:, None], previous)
    follows = at_start | (reads.positions > reads.low[reads.rows][:, None])
    broken = (chain != wanted) & follows

    failed = reads.live & (outside | stranger | unwritten | position | token | anchor | broken)
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
    report(Fault.UNWRITTEN, unwritten, records.block_generation[blocks][:, None], of_slot(records.generation))
    report(Fault.POSITION, position, reads.positions, of_slot(records.position))
    if expected is not None:
        report(Fault.TOKEN, token, expected, of_slot(records.token))
    report(Fault.ANCHOR, anchor, rows.anchors[reads.rows][:, None], of_slot(records.anchor))

    # A chain is judged only against a predecessor that is sound itself. The break shows at the first foreign slot;
    # the sum of the breaks up to a slot says by how much its chain differs from the request's own, so that the whole
    # foreign run is reported, and the request's own slots behind it are not.
    sound_before = reads.sound.flatten().roll(1).view_as(chain) | at_start
    step_of_chain = torch.where(broken & reads.live & sound_before, chain - wanted, 0)
    drift = step_of_chain.flatten().cumsum(0).view_as(chain)
    row_start = torch.ones_like(reads.rows, dtype=torch.bool)
    row_start[1:] = reads.rows[1:] != reads.rows[:-1]
    first_entry = torch.where(row_start, torch.arange(row_start.shape[0], device=row_start.device), 0).cummax(0).values
    drift = drift - (drift[:, 0] - step_of_chain[:, 0])[first_entry][:, None]
    foreign = of_slot(records.owner) != rows.owners[reads.rows][:, None]
    report(Fault.CHAIN, (drift != 0) & (foreign | (step_of_chain != 0)), chain - drift, chain)
    return counts


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
