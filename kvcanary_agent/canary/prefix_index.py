"""What a prefix index holds, against the records of the slots that it names."""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.records import UNKNOWN, Records


def broken_entries(records: Records, slots: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor) -> list[int]:
    """Which entries of an index are not written, hold another position, or do not follow their predecessor.

    Args:
        records: Of the group.
        slots: ``[n]`` int64.
        positions: ``[n]`` int64: the position that the index has each slot for.
        previous: ``[n]`` int64: the slot of the position before; -1 at the start of a prompt.
    """
    generation = records.generation[slots]
    wrong = generation != records.block_generation[slots // records.block_size]
    wrong |= records.position[slots] != positions
    before = torch.where(previous < 0, records.seed[slots], records.chain_after[previous.clamp(min=0)])
    wrong |= records.chain[slots] != before
    return list((wrong & (generation != UNKNOWN)).nonzero().flatten().tolist())
