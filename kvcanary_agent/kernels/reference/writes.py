"""Before a forward: will every token be written where it belongs, and who writes what?"""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.hashing import mix
from kvcanary_agent.kernels.plan import Fault, Rows, Writes, Written
from kvcanary_agent.kernels.records import Records
from kvcanary_agent.kernels.ring import ViolationRing

from .reporting import append
from .tokens import known_at


def check_writes(records: Records, rows: Rows, writes: Writes, ring: ViolationRing, group: int) -> dict[Fault, int]:
    """Check every write against block table, holder, position and known token, before it happens.

    Returns:
        How many writes failed, by fault.
    """
    size = records.block_size
    width = rows.block_table.shape[1]
    column = writes.positions // size
    in_table = (column >= 0) & (column < width)
    table_block = rows.block_table[writes.rows, column.clamp(0, width - 1)]
    expected = torch.where(in_table, table_block * size + writes.positions % size, -1)
    written = (writes.slots >= 0) & (writes.slots < records.num_slots)
    slots = torch.where(written, writes.slots, 0)
    blocks = slots // size

    address = ((writes.slots != expected) & (writes.slots != -1)) | (writes.slots >= records.num_slots)
    not_held = rows.not_held(writes.rows, blocks)
    stranger = torch.zeros_like(address) if not_held is None else not_held & written
    shared = (
        (rows.references[blocks] > 1)
        & (rows.first_holders[blocks] != rows.held_rows[writes.rows])
        & written
        & (records.generation[slots] == records.block_generation[blocks])
        & ((records.token[slots] != writes.tokens) | (records.position[slots] != writes.positions))
    )
    in_row = torch.arange(writes.rows.shape[0], device=slots.device) - writes.offsets[writes.rows]
    wanted = rows.prefix_lens[writes.rows] + in_row
    position = writes.positions != wanted
    token = torch.zeros_like(address)
    known_tokens = torch.full_like(writes.tokens, -1)
    if writes.known is not None:
        known_tokens = known_at(writes.known, writes.rows, writes.positions.clamp(min=0))
        token = (known_tokens >= 0) & (known_tokens != writes.tokens)

    if not bool((address | stranger | shared | position | token).any()):
        return {}
    counts: dict[Fault, int] = {}
    sound = torch.ones_like(address)

    def report(fault: Fault, mask: torch.Tensor, want: torch.Tensor, have: torch.Tensor) -> None:
        mask = mask & sound
        count = int(mask.sum())
        if not count:
            return
        counts[fault] = count
        sound.logical_and_(~mask)
        append(
            ring,
            records,
            fault=fault,
            group=group,
            step=rows.step,
            owner=rows.owners[writes.rows[mask]],
            position=writes.positions[mask],
            slot=writes.slots[mask],
            part=-1,
            expected=want[mask],
            found=have[mask],
        )

    report(Fault.WRITE_ADDRESS, address, expected, writes.slots)
    report(Fault.WRITE_NOT_HELD, stranger, blocks, blocks)
    report(Fault.WRITE_SHARED, shared, records.token[slots].to(torch.int64), writes.tokens)
    report(Fault.WRITE_POSITION, position, wanted, writes.positions)
    report(Fault.WRITE_TOKEN, token, known_tokens, writes.tokens)
    return counts


def check_padding(
    records: Records, slots: torch.Tensor, null_block: int | None, step: int, ring: ViolationRing, group: int
) -> dict[Fault, int]:
    """Check where rows beyond the batch write: nowhere (-1) or to the null block.

    Args:
        slots: ``[any]`` int64.

    Returns:
        How many slots failed, by fault.
    """
    blocks = torch.div(slots, records.block_size, rounding_mode="floor")
    wrong = slots != -1
    if null_block is not None:
        wrong &= blocks != null_block
    inside = (slots >= 0) & (slots < records.num_slots)
    at, of_block = torch.where(inside, slots, 0), torch.where(inside, blocks, 0)
    live = wrong & inside & (records.generation[at] == records.block_generation[of_block])
    counts = {}
    for fault, mask in ((Fault.PAD_LIVE, live), (Fault.PAD_OUTSIDE, wrong & ~live)):
        count = int(mask.sum())
        if not count:
            continue
        counts[fault] = count
        append(
            ring,
            records,
            fault=fault,
            group=group,
            step=step,
            owner=0,
            position=-1,
            slot=slots[mask],
            part=-1,
            expected=-1,
            found=slots[mask],
        )
    return counts


def enter_writes(records: Records, rows: Rows, writes: Writes, ring: ViolationRing, group: int) -> tuple[Written, int]:
    """Record who writes what where in this step, before the forward: every field but the fingerprints.

    Entered before reads are verified, because a row may read what another row writes in the same step: every layer
    writes before it reads. Two rows that write different tokens or chains to one slot are a violation; the same ones
    are legal (a fully cached prompt recomputes its last token into a shared block).

    Returns:
        What was written, and how many writes were overwritten by another row's.
    """
    added = mix(writes.tokens, writes.positions)
    before = added.cumsum(0) - added
    in_row = before - before[writes.offsets[writes.rows]]

    # A skipped write is part of its row's chain, but of no record.
    at = ((writes.slots >= 0) & (writes.slots < records.num_slots)).nonzero().flatten()
    slots, row = writes.slots[at], writes.rows[at]
    tokens, positions = writes.tokens[at], writes.positions[at].to(torch.int32)
    owners = rows.owners[row]
    recorded = records.step[slots] > 0
    other_token = recorded & (records.token[slots] != tokens)
    written = Written(
        step=rows.step,
        slots=slots,
        owners=owners,
        positions=writes.positions[at],
        other_token=other_token,
        other_write=(records.step[slots] == 0) | other_token | recorded & (records.position[slots] != positions),
    )
    records.token[slots] = tokens
    records.position[slots] = positions
    records.owner[slots] = owners
    records.seed[slots] = rows.seeds[row]
    records.step[slots] = rows.step
    records.generation[slots] = records.block_generation[slots // records.block_size]
    records.fingerprinted[slots] = 0
    order = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
    records.order[slots] = order
    after = chain_bases(records, rows, row, (in_row + added)[at])[row] + (in_row + added)[at]
    records.chain[slots] = after - added[at]
    records.chain_after[slots] = after

    return written, report_overwritten(records, written, tokens, after, records.order[slots], ring, group)


def report_overwritten(
    records: Records,
    written: Written,
    tokens: torch.Tensor,
    after: torch.Tensor,
    winner: torch.Tensor,
    ring: ViolationRing,
    group: int,
) -> int:
    """Append each write that another of the step overwrites with something else; how many those are.

    Args:
        tokens, after: ``[writes]`` int64: the new token and the chain after it.
        winner: ``[writes]`` int32: which write of the step its slot holds in the end.
    """
    order = torch.arange(winner.shape[0], dtype=winner.dtype, device=winner.device)
    positions = written.positions
    overwritten = (winner != order) & ((after != after[winner]) | (positions != positions[winner]))
    count = int(overwritten.sum())
    if count:
        append(
            ring,
            records,
            fault=Fault.WRITE_TWICE,
            group=group,
            step=written.step,
            owner=written.owners[overwritten],
            position=positions[overwritten],
            slot=written.slots[overwritten],
            part=-1,
            expected=tokens[overwritten],
            found=tokens[winner[overwritten]],
        )
    return count


def chain_bases(records: Records, rows: Rows, write_rows: torch.Tensor, after_in_row: torch.Tensor) -> torch.Tensor:
    """The chain before each row's first new token, ``[rows]`` int64.

    It is the chain after the row's last prefix token. If that token is written in this very step by another row (a
    prefix hit on blocks still being computed), that row's base is added to what the row has summed up to there; such
    rows form a forest, whose paths are halved until every row hangs from a resolved one.

    Args:
        write_rows: ``[writes]`` int64: the row of each recorded write of this step.
        after_in_row: ``[writes]`` int64: the sum over the row's new tokens up to and including each.
    """
    size = records.block_size
    last = rows.prefix_lens - 1
    column = (last // size).clamp(0, rows.block_table.shape[1] - 1)
    block = rows.block_table.gather(1, column[:, None]).flatten().clamp(0, records.num_blocks - 1)
    slot = block * size + last.clamp(min=0) % size
    base = torch.where(last < 0, rows.seeds, records.chain_after[slot])

    pending = (last >= 0) & (records.step[slot] == rows.step)
    if not bool(pending.any()):
        return base
    writer = torch.where(pending, records.order[slot], 0).to(torch.int64)
    # Only a misdirected write puts a row's own new token into its prefix; such a row starts from nothing.
    own = pending & (write_rows[writer] == torch.arange(pending.shape[0], device=pending.device))
    parent = torch.where(pending & ~own, write_rows[writer], -1)
    base = torch.where(pending, after_in_row[writer], base).masked_fill_(own, 0)
    for _ in range(rows.owners.shape[0].bit_length()):
        ancestor = parent.clamp(min=0)
        base = torch.where(parent >= 0, base + base[ancestor], base)
        parent = torch.where(parent >= 0, parent[ancestor], -1)
    return base
