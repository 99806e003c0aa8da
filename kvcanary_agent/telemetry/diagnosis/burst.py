"""What was found together, and what it comes to: how many slots, parts and blocks, and who had them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvcanary_agent.canary.violation import Kind, Violation


class Burst:
    """Violations of one pool that were found together.

    Args:
        violations: In the order in which they were found.
        parts: For each group of layers how many parts (K, V, scales of each layer) a slot of it has; may be empty.
    """

    def __init__(self, violations: Iterable[Violation], parts: Mapping[str, int] | None = None) -> None:
        self._parts = parts or {}
        self._parts_of_slot: defaultdict[tuple[Kind, str, int], set[tuple[str | None, str | None]]] = defaultdict(set)
        self._slots: defaultdict[tuple[Kind, str], set[int]] = defaultdict(set)
        self._blocks: defaultdict[tuple[Kind, str], set[int]] = defaultdict(set)
        self._first_offset: dict[tuple[Kind, str, int], int] = {}
        self._slots_of_value: defaultdict[tuple[Kind, str, str | None, str | None, str | None], set[int]]
        self._slots_of_value = defaultdict(set)
        self._positions: defaultdict[tuple[str | None, int], list[tuple[int | None, int | None]]] = defaultdict(list)
        self._rank_steps: set[int] = set()
        self._own_positions: set[tuple[str, int, str | None, int | None, int | None]] = set()
        for violation in violations:
            self._add(violation)

    def _add(self, violation: Violation) -> None:
        kind, group, slot = violation.kind, violation.group, violation.slot
        self._slots[kind, group].add(slot)
        self._blocks[kind, group].add(violation.block)
        place = (kind, group, violation.block)
        self._first_offset[place] = min(violation.offset, self._first_offset.get(place, violation.offset))
        self._slots_of_value[kind, group, violation.layer, violation.part, violation.found].add(slot)
        self._parts_of_slot[kind, group, slot].add((violation.layer, violation.part))
        if kind is Kind.RANK:
            self._rank_steps.add(violation.step)
        if kind is Kind.POSITION:
            self._positions[violation.request, violation.step].append((violation.position, violation.recorded_position))
            # What another request finds there says that the slot was wrong, not the position.
            if violation.request == violation.writer:
                self._own_positions.add(
                    (group, slot, violation.writer, violation.written_step, violation.recorded_position)
                )

    def slots(self, violation: Violation) -> int:
        """How many slots of the group suffer from the same kind of violation, this one included."""
        return len(self._slots[violation.kind, violation.group] | {violation.slot})

    def blocks(self, violation: Violation) -> int:
        """The same for blocks."""
        return len(self._blocks[violation.kind, violation.group] | {violation.block})

    def parts(self, violation: Violation) -> int:
        """How many parts of this slot suffer from the same kind of violation, this one included."""
        known = self._parts_of_slot[violation.kind, violation.group, violation.slot]
        return len(known | {(violation.layer, violation.part)})

    def whole_token(self, violation: Violation) -> bool:
        """Whether every part of the slot is hit, which takes a write of all layers; False if that is not known."""
        total = self._parts.get(violation.group, 0)
        return total > 1 and self.parts(violation) >= total

    def single(self, violation: Violation) -> bool:
        """Whether this is all that the kind has hit in the group: one part of one slot."""
        return self.slots(violation) == 1 and self.parts(violation) == 1

    def from_the_first_slot(self, violation: Violation) -> bool:
        """Whether the block is hit from its first slot on, as by a copy of the block, which goes layer by layer."""
        return min(violation.offset, self._first_offset.get((violation.kind, violation.group, violation.block), 0)) == 0

    def uniform(self, violation: Violation) -> bool:
        """Whether several slots hold the same bytes in this part, as memory does that nothing has arrived in."""
        found = violation.found
        alike = self._slots_of_value[violation.kind, violation.group, violation.layer, violation.part, found]
        return found is not None and len(alike) > 1

    def entries_exchanged(self, violation: Violation) -> bool:
        """Whether the reader finds what belongs at another position, at which it finds something wrong as well."""
        pairs = self._positions[violation.request, violation.step]
        wanted = {position for position, _ in pairs}
        return any(recorded in wanted and recorded != position for position, recorded in pairs)

    def position_was_wrong(self, violation: Violation) -> bool:
        """Whether a write that went to an unexpected slot turned out to be at the right slot under a wrong position."""
        written = (violation.group, violation.slot, violation.request, violation.step, violation.position)
        return written in self._own_positions

    def ranks_disagree(self, violation: Violation) -> bool:
        """Whether the ranks disagreed in the step of the violation."""
        return violation.step in self._rank_steps
