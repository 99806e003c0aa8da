"""What the records say about the slots around a place, for a report."""

from __future__ import annotations

from kvcanary_agent.kernels.records import UNKNOWN, Records

from .reporting import Reporter
from .violation import Neighbourhood, SlotState

_MAX_SLOTS = 160


def slots_around(records: Records, reporter: Reporter, group: str, block: int) -> Neighbourhood:
    """The state of every slot of a block and of its neighbours, as many as are shown; waits for the device."""
    size = records.block_size
    beside = max(0, min(3, (_MAX_SLOTS // size - 1) // 2))
    first = max(0, block - beside)
    slots = slice(first * size, min(records.num_blocks, block + beside + 1) * size)
    if slots.stop - slots.start > 4 * _MAX_SLOTS:
        slots = slice(block * size, block * size + 4 * _MAX_SLOTS)
    generation = records.generation[slots].tolist()
    columns = [column[slots].tolist() for column in (records.token, records.position, records.owner, records.step)]
    current = records.block_generation.repeat_interleave(size)[slots].tolist()
    states = []
    for index, (written, now) in enumerate(zip(generation, current, strict=True)):
        token, position, owner, step = (column[index] for column in columns)
        slot = slots.start + index
        if written == UNKNOWN:
            states.append(SlotState(slot=slot, state="unknown"))
        elif not step:
            states.append(SlotState(slot=slot, state="unwritten"))
        else:
            states.append(
                SlotState(
                    slot=slot,
                    state="written" if written == now else "void",
                    token=reporter.show_token(token),
                    position=position,
                    writer=reporter.name_of(owner),
                    written_step=step,
                )
            )
    return Neighbourhood(group=group, block=block, slots=tuple(states))
