"""Bytes: are they still, or at last, what was written?"""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.plan import Fault, Reads, Rows, Written
from kvcanary_agent.kernels.records import Records
from kvcanary_agent.kernels.ring import ViolationRing

from .fingerprint import fingerprint
from .numbers import has_nonfinite
from .reporting import append

# Bytes gathered at a time when whole blocks are fingerprinted: small enough to stay in a core's cache.
_CHUNK_BYTES = 1 << 20


def verify_content(
    records: Records,
    rows: Rows,
    reads: Reads,
    part: int,
    ring: ViolationRing,
    group: int,
    block_class: tuple[int, int] = (0, 1),
) -> tuple[int, int]:
    """Compare one part's bytes, in the sound slots that the step reads, with the fingerprints of their writes.

    Args:
        part: Index of the part in the group.
        block_class: ``(remainder, modulus)``: only blocks whose number leaves this remainder.

    Returns:
        Slots compared, and how many of them differ.
    """
    remainder, modulus = block_class
    mask = reads.sound
    if modulus > 1:
        mask = mask & (reads.blocks % modulus == remainder)[:, None]
    entries = mask.any(1).nonzero().flatten()
    if not entries.numel():
        return 0, 0
    mask = mask[entries]
    blocks = reads.blocks[entries]
    owners = rows.owners[reads.rows[entries]]
    return _compare(records, blocks, mask, part, ring, group, rows.step, owners, reads.positions[entries])


def patrol(
    records: Records, first_block: int, num_blocks: int, part: int, ring: ViolationRing, group: int, step: int
) -> tuple[int, int]:
    """Compare one part's bytes in a run of blocks, whoever may or may not read them.

    Returns:
        Slots compared, and how many of them differ.
    """
    blocks = torch.arange(first_block, first_block + num_blocks, device=records.device)
    generation = records.generation.view(-1, records.block_size)[blocks]
    mask = generation == records.block_generation[blocks][:, None]
    some = mask.any(1)
    if not bool(some.all()):
        blocks, mask = blocks[some], mask[some]
    if not blocks.numel():
        return 0, 0
    nobody = torch.zeros_like(blocks)
    return _compare(
        records, blocks, mask, part, ring, group, step, nobody, torch.full_like(mask, -1, dtype=torch.int64)
    )


def _compare(
    records: Records,
    blocks: torch.Tensor,
    mask: torch.Tensor,
    part: int,
    ring: ViolationRing,
    group: int,
    step: int,
    owners: torch.Tensor,
    positions: torch.Tensor,
    fault: Fault = Fault.CONTENT,
) -> tuple[int, int]:
    size = records.block_size
    mask = mask & (records.fingerprinted.view(-1, size)[blocks] != 0)
    checked, failed = int(mask.sum()), 0
    view = records.views[part]
    kept = records.fingerprints[part].view(-1, size)
    per_chunk = max(1, _CHUNK_BYTES // (view[0].numel() * view.element_size()))
    for start in range(0, blocks.shape[0], per_chunk):
        chunk = blocks[start : start + per_chunk]
        have = fingerprint(view.index_select(0, chunk).flatten(0, 1)).view(-1, size)
        want = kept[chunk]
        differs = (have != want) & mask[start : start + per_chunk]
        if not bool(differs.any()):
            continue
        entry, offset = differs.nonzero(as_tuple=True)
        failed += entry.shape[0]
        report_differences(
            records,
            ring,
            group,
            step,
            part,
            chunk,
            (differs, want, have),
            owners[start + entry],
            positions[start + entry, offset],
            fault,
        )
    return checked, failed


def report_differences(
    records: Records,
    ring: ViolationRing,
    group: int,
    step: int,
    part: int,
    blocks: torch.Tensor,
    differing: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    owner: torch.Tensor | int,
    position: torch.Tensor | int,
    fault: Fault = Fault.CONTENT,
) -> None:
    """Append the slots of ``[n]`` blocks whose bytes are not those that were written, or not even finite any more.

    Args:
        differing: ``[n, block_size]`` each: which slots, the fingerprints on record and those found.
        owner, position: Of each such slot, in order, or of all.
    """
    differs, kept, found = differing
    entry, offset = differs.nonzero(as_tuple=True)
    block = blocks[entry]
    bad = has_nonfinite(records.views[part][block, offset], records.number_types[part])
    broken = torch.zeros_like(entry, dtype=torch.bool) if bad is None else bad
    for kind, mask in ((fault, ~broken), (Fault.NONFINITE, broken)):
        if not bool(mask.any()):
            continue
        append(
            ring,
            records,
            fault=kind,
            group=group,
            step=step,
            owner=owner[mask] if isinstance(owner, torch.Tensor) else owner,
            position=position[mask] if isinstance(position, torch.Tensor) else position,
            slot=(block * records.block_size + offset)[mask],
            part=part,
            expected=kept[entry, offset][mask],
            found=found[entry, offset][mask],
        )


def record_content(records: Records, written: Written, ring: ViolationRing, group: int) -> dict[Fault, tuple[int, int]]:
    """Fingerprint what the forward has written, and check that it was written and is finite.

    A write is lost if the bytes are as they were before although they should differ: in one part of a layer if the
    slot held another token, in all parts if it held another token or position. (The first layer's K/V may depend on
    the token alone.)

    Returns:
        Slots checked and failed, for `Fault.LOST_WRITE` and `Fault.NONFINITE`.
    """
    slots = written.slots
    before = records.fingerprints[:, slots]
    not_finite = []
    for part in range(len(records.views)):
        bad = _fingerprint_slots(records, part, slots, check_finite=True)
        if bad is not None:
            not_finite.append((part, bad))
    records.fingerprinted[slots] = 1
    same = records.fingerprints[:, slots] == before
    unchanged = same.all(0) & written.other_write
    # A part that is all zeros, whatever the token, is a model's choice.
    telling = torch.tensor(records.carries_tokens, device=slots.device)[:, None] & (before != 0)
    lost = same & written.other_token & telling & ~unchanged
    return report_written(records, written, unchanged, lost, not_finite, ring, group)


def report_written(
    records: Records,
    written: Written,
    unchanged: torch.Tensor,
    lost: torch.Tensor,
    not_finite: list[tuple[int, torch.Tensor]],
    ring: ViolationRing,
    group: int,
) -> dict[Fault, tuple[int, int]]:
    """Append what is wrong with a step's writes.

    Args:
        unchanged: ``[writes]`` bool: lost in all parts.
        lost: ``[parts, writes]`` bool: lost in some.
        not_finite: The parts with numbers that are not finite, and which writes, ``[writes]`` bool.

    Returns:
        Slots checked and failed, for `Fault.LOST_WRITE` and `Fault.NONFINITE`.
    """
    slots = written.slots

    def report(fault: Fault, part: int, mask: torch.Tensor) -> int:
        at = mask.nonzero().flatten()
        if not at.numel():
            return 0
        append(
            ring,
            records,
            fault=fault,
            group=group,
            step=written.step,
            owner=written.owners[at],
            position=written.positions[at],
            slot=slots[at],
            part=part,
            expected=0,
            found=records.fingerprints[max(part, 0)][slots[at]],
        )
        return int(at.numel())

    failed = report(Fault.LOST_WRITE, -1, unchanged)
    failed += sum(report(Fault.LOST_WRITE, part, mask) for part, mask in enumerate(lost))
    bad = sum(report(Fault.NONFINITE, part, mask) for part, mask in not_finite)
    return {Fault.LOST_WRITE: (slots.shape[0], failed), Fault.NONFINITE: (slots.shape[0], bad)}


def remeasure(records: Records, slots: torch.Tensor) -> None:
    """Fingerprint what is in ``slots`` now, so that a write that follows can be seen to be lost."""
    for part in range(len(records.views)):
        _fingerprint_slots(records, part, slots, check_finite=False)


def _fingerprint_slots(records: Records, part: int, slots: torch.Tensor, *, check_finite: bool) -> torch.Tensor | None:
    """Set the fingerprints of one part of ``slots``; which of them hold numbers that are not finite, None if none."""
    view = records.views[part]
    block, offset = slots // records.block_size, slots % records.block_size
    per_chunk = max(1, _CHUNK_BYTES // (view[0, 0].numel() * view.element_size()))
    result = records.fingerprints[part]
    not_finite = None
    for start in range(0, slots.shape[0], per_chunk):
        chunk = slice(start, start + per_chunk)
        payload = view[block[chunk], offset[chunk]]
        result[slots[chunk]] = fingerprint(payload)
        if check_finite:
            bad = has_nonfinite(payload, records.number_types[part])
            if bad is not None:
                if not_finite is None:
                    not_finite = torch.zeros_like(slots, dtype=torch.bool)
                not_finite[chunk] = bad
    return not_finite


def check_null_block(
    records: Records, part: int, null_block: int, step: int, ring: ViolationRing, group: int
) -> tuple[int, int]:
    """Check that the null block, which padded reads touch, holds finite numbers; any finite garbage is legal.

    Returns:
        Slots checked, and how many hold NaN or infinity.
    """
    bad = has_nonfinite(records.views[part][null_block], records.number_types[part])
    if bad is None:
        return records.block_size, 0
    offsets = bad.nonzero().flatten()
    append(
        ring,
        records,
        fault=Fault.NONFINITE,
        group=group,
        step=step,
        owner=0,
        position=-1,
        slot=null_block * records.block_size + offsets,
        part=part,
        expected=0,
        found=0,
    )
    return records.block_size, int(offsets.numel())


def verify_transfer(
    records: Records, blocks: torch.Tensor, owner: int, step: int, ring: ViolationRing, group: int
) -> tuple[int, int]:
    """Compare what came back into ``blocks``, ``[n]`` int64, with the records that came along.

    Returns:
        Payloads compared, and how many of them differ.
    """
    mask = records.generation.view(-1, records.block_size)[blocks] == records.block_generation[blocks][:, None]
    positions = records.position.view(-1, records.block_size)[blocks].to(torch.int64)
    owners = torch.full_like(blocks, owner)
    checked = failed = 0
    for part in range(len(records.views)):
        counts = _compare(records, blocks, mask, part, ring, group, step, owners, positions, fault=Fault.TRANSFER)
        checked, failed = checked + counts[0], failed + counts[1]
    return checked, failed
