"""Appending faults to the ring, with the evidence that the records hold at that moment."""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.plan import Fault
from kvcanary_agent.kernels.records import Records
from kvcanary_agent.kernels.ring import Field, ViolationRing


def append(
    ring: ViolationRing,
    records: Records,
    *,
    fault: Fault,
    group: int,
    step: int,
    owner: torch.Tensor | int,
    position: torch.Tensor | int,
    slot: torch.Tensor,
    part: torch.Tensor | int,
    expected: torch.Tensor | int,
    found: torch.Tensor | int,
) -> None:
    rows = torch.zeros((slot.shape[0], len(Field)), dtype=torch.int64, device=slot.device)
    inside = (slot >= 0) & (slot < records.num_slots)
    at = torch.where(inside, slot, 0)
    rows[:, Field.KIND] = int(fault)
    rows[:, Field.GROUP] = group
    rows[:, Field.STEP] = step
    rows[:, Field.OWNER] = owner
    rows[:, Field.POSITION] = position
    rows[:, Field.SLOT] = torch.where(inside, slot, -1)
    rows[:, Field.PART] = part
    rows[:, Field.EXPECTED] = expected
    rows[:, Field.FOUND] = found
    rows[:, Field.WRITER] = torch.where(inside, records.owner[at], 0)
    rows[:, Field.WRITTEN_STEP] = torch.where(inside, records.step[at], 0)
    rows[:, Field.RECORDED_POSITION] = torch.where(inside, records.position[at], -1)
    ring.append(rows)
