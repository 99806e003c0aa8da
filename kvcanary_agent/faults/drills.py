"""Live drills: one fault, injected into a real engine's pool or step, so that an operator sees the alarm work.

A drill damages what the engine serves, as the real fault would: requests of that step may get wrong tokens. Each kind
waits for the first step, from the one asked for, in which it can strike.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from kvcanary_agent.canary import Canary, ForwardStep, KVLayout, Sink
from kvcanary_agent.canary.tensor_cache import TensorCaches
from kvcanary_agent.kernels.hashing import as_words
from kvcanary_agent.settings import Drill, Settings

_T = TypeVar("_T")
_Undo = Callable[[], None]

_log = logging.getLogger("kvcanary_agent")

PATIENCE = 1000
"""Steps without an occasion after which a drill says that it still waits, and for what."""

_NEEDS = {
    "content": "a step that reads a slot which an earlier one has written",
    "idle_block": "a block that is written in full and that no request of the step uses",
    "nonfinite": "a null block of floating-point numbers",
    "block_table_swap": "a request with two full blocks",
    "foreign_block": "two requests, one with a full block that is not the other's",
    "slot_mapping": "a step that writes to a slot before the pool's last",
    "lost_write": "a step that writes",
}


class _Wait:
    """A drill's wait for a step in which it can strike; a drill that never does is not to go unnoticed."""

    def __init__(self, drill: Drill) -> None:
        self.over = False
        self._drill = drill
        self._steps = 0
        self._said = False

    def in_vain(self) -> None:
        """Another step has come in which it could not strike."""
        self._steps += 1
        if self._steps == PATIENCE:
            self._say(f"in {PATIENCE} steps, and still waits; it needs {_NEEDS[self._drill.kind]}")

    def end(self) -> None:
        """The pool is gone, or the process ends."""
        if self.over:
            return
        if self._steps:
            self._say(f"in {self._steps} steps; it needs {_NEEDS[self._drill.kind]}")
        else:
            self._say(f"before the end: there was no step {self._drill.step}")

    def _say(self, how_long: str) -> None:
        if not self._said:
            self._said = True
            _log.warning("kvcanary: DRILL: %s@%d has not struck %s", self._drill.kind, self._drill.step, how_long)


class DrillingCanary(Canary):
    """A canary that, once, injects the fault it is then to report."""

    def __init__(self, layout: KVLayout, settings: Settings, sink: Sink, drill: Drill) -> None:
        super().__init__(layout, settings, sink)
        self._drill = drill
        self._random = random.Random(drill.seed)
        self._wait = _Wait(drill)
        # Runs when the canary is dropped, or at exit.
        weakref.finalize(self, self._wait.end)
        self._undo_write: _Undo | None = None

    def before_forward(self, step: ForwardStep) -> None:
        if not self._wait.over and self.step + 1 >= self._drill.step:
            # An engine's tensors may be inference tensors, which only inference mode may change.
            with torch.inference_mode():
                done = _INJECTIONS[self._drill.kind](self, step)
            if done is not None:
                self._wait.over = True
                self._sink.drill(self._drill.kind, self.step + 1, done)
            else:
                self._wait.in_vain()
        super().before_forward(step)

    def after_forward(self) -> None:
        if self._undo_write is not None:
            with torch.inference_mode():
                self._undo_write()
            self._undo_write = None
        super().after_forward()

    # Injections: each returns what it did, or None if this step has nothing that it could strike.

    def _flip_bit(self, step: ForwardStep) -> str | None:
        place = self._pick(self._slots_read(step))
        if place is None:
            return None
        group, request, slot = place
        part = self._random.choice(self.layout.groups[group].parts)
        block, offset = divmod(slot, self.layout.groups[group].block_size)
        payload = as_words(part.view)[block, offset]
        index = tuple(self._random.randrange(size) for size in payload.shape)
        bit = self._random.randrange(payload.element_size() * 8 - 1)
        payload[index] ^= 1 << bit
        return f"one bit of {part.name} in slot {slot} (block {block}), which {request} reads"

    def _zero_idle_block(self, step: ForwardStep) -> str | None:
        for index in self._shuffled(range(len(self.layout.groups))):
            group, records = self.layout.groups[index], self._records[index]
            in_use = set(step.groups[index].block_table.flatten().tolist()) | {group.null_block}
            written = records.generation.view(-1, group.block_size) == records.block_generation[:, None]
            idle = [block for block in written.all(1).nonzero().flatten().tolist() if block not in in_use]
            if not idle:
                continue
            block = self._random.choice(idle)
            part = self._random.choice(group.parts)
            as_words(part.view)[block] = 0
            return f"{part.name} of the idle block {block} zeroed"
        return None

    def _nan_in_null_block(self, step: ForwardStep) -> str | None:
        for group in self.layout.groups:
            for part in self._shuffled(group.parts):
                number_type = part.number_type or part.view.dtype
                if group.null_block is None or not number_type.is_floating_point:
                    continue
                # All bits set are a NaN in every floating-point type that a cache may hold.
                words = as_words(part.view)[group.null_block]
                words.fill_(-1 if words.dtype.is_signed else 255)
                return f"{part.name} of the null block {group.null_block} filled with NaN"
        return None

    def _swap_table_entries(self, step: ForwardStep) -> str | None:
        for index, row, columns in self._rows_read(step):
            if len(columns) < 2:
                continue
            one, two = self._random.sample(columns, 2)
            table = step.groups[index].block_table
            table[row, one], table[row, two] = table[row, two].clone(), table[row, one].clone()
            self._store_table(step, index)
            return f"entries {one} and {two} of the block table of {step.requests[row]} swapped"
        return None

    def _map_foreign_block(self, step: ForwardStep) -> str | None:
        rows = list(self._rows_read(step))
        for index, row, columns in rows:
            table = step.groups[index].block_table
            own = set(table[row].tolist())
            for other_index, other, other_columns in rows:
                foreign = [c for c in other_columns if int(table[other, c]) not in own] if other_index == index else []
                if other == row or not foreign:
                    continue
                column, source = self._random.choice(columns), self._random.choice(foreign)
                table[row, column] = table[other, source].clone()
                self._store_table(step, index)
                return (
                    f"entry {column} of the block table of {step.requests[row]} now names block "
                    f"{int(table[row, column])} of {step.requests[other]}"
                )
        return None

    def _shift_write(self, step: ForwardStep) -> str | None:
        places = [
            (index, token)
            for index, group_step in enumerate(step.groups)
            for token, slot in enumerate(group_step.write_slots.tolist())
            if 0 <= slot < self.layout.groups[index].num_slots - 1
        ]
        if not places:
            return None
        index, token = self._random.choice(places)
        slots = step.groups[index].write_slots
        slots[token] += 1
        return f"token {token} of the step is written to slot {int(slots[token])} instead of {int(slots[token]) - 1}"

    def _lose_write(self, step: ForwardStep) -> str | None:
        place = self._pick(self._slots_written(step))
        if place is None:
            return None
        group, _, slot = place
        block, offset = divmod(slot, self.layout.groups[group].block_size)
        payloads = [as_words(part.view)[block, offset] for part in self.layout.groups[group].parts]
        before = [payload.clone() for payload in payloads]

        def undo() -> None:
            for payload, old in zip(payloads, before, strict=True):
                payload.copy_(old)

        self._undo_write = undo
        return f"the write to slot {slot} (block {block}) will not land"

    @staticmethod
    def _store_table(step: ForwardStep, group: int) -> None:
        store = step.groups[group].store_table
        if store is not None:
            store()

    # What a step offers

    def _rows_read(self, step: ForwardStep) -> Iterable[tuple[int, int, list[int]]]:
        """Group, row and the table columns of the blocks that the row reads in full, in random order."""
        lengths = step.prefix_lens.tolist()
        places = [(index, row) for index in range(len(step.groups)) for row in range(len(step.requests))]
        for index, row in self._shuffled(places):
            group = self.layout.groups[index]
            low = 0 if group.window is None else max(0, lengths[row] - group.window + 1)
            columns = list(range(-(-low // group.block_size), lengths[row] // group.block_size))
            if columns:
                yield index, row, columns

    def _slots_read(self, step: ForwardStep) -> list[tuple[int, str, int]]:
        """Group, request and slot of everything that the step reads and that was written before it."""
        places = []
        for index, group_step in enumerate(step.groups):
            group, table = self.layout.groups[index], group_step.block_table.tolist()
            fresh = set(group_step.write_slots.tolist())
            for row, length in enumerate(step.prefix_lens.tolist()):
                low = 0 if group.window is None else max(0, length - group.window + 1)
                for position in range(low, length):
                    column, offset = divmod(position, group.block_size)
                    slot = table[row][column] * group.block_size + offset
                    if 0 <= slot < group.num_slots and slot not in fresh:
                        places.append((index, step.requests[row], slot))
        return places

    def _slots_written(self, step: ForwardStep) -> list[tuple[int, str, int]]:
        offsets = step.query_offsets.tolist()
        return [
            (index, step.requests[row], slot)
            for index, group_step in enumerate(step.groups)
            for row in range(len(step.requests))
            for slot in group_step.write_slots.tolist()[offsets[row] : offsets[row + 1]]
            if 0 <= slot < self.layout.groups[index].num_slots
        ]

    def _pick(self, places: list[tuple[int, str, int]]) -> tuple[int, str, int] | None:
        return self._random.choice(places) if places else None

    def _shuffled(self, things: Iterable[_T]) -> list[_T]:
        listed = list(things)
        return self._random.sample(listed, len(listed))


class DrillingTensorCaches(TensorCaches):
    """Caches without a pool, in one of which one bit flips; no other kind of drill has anything to strike there."""

    def __init__(self, pool: str, settings: Settings, sink: Sink, drill: Drill) -> None:
        super().__init__(pool, settings, sink)
        self._drill = drill
        self._random = random.Random(drill.seed)
        self._waiting = drill.kind == "content"

    def strike(self, part: str, tensor: torch.Tensor, columns: int) -> None:
        # Each part that a step reads is as likely to be struck, whatever comes first.
        if not self._waiting or self.step < self._drill.step or self._random.random() > _CHANCE_OF_PART:
            return
        self._waiting = False
        with torch.inference_mode():
            words = as_words(tensor)
            rows, heads, _, dim = words.shape
            row, column = self._random.randrange(rows), self._random.randrange(columns)
            index = (row, self._random.randrange(heads), column, self._random.randrange(dim))
            words[index] ^= 1 << self._random.randrange(words.element_size() * 8 - 1)
        self.sink.drill(self._drill.kind, self.step, f"one bit of {part} in row {row}, column {column}")


_CHANCE_OF_PART = 1 / 8

_INJECTIONS: dict[str, Callable[[DrillingCanary, ForwardStep], str | None]] = {
    "content": DrillingCanary._flip_bit,
    "idle_block": DrillingCanary._zero_idle_block,
    "nonfinite": DrillingCanary._nan_in_null_block,
    "block_table_swap": DrillingCanary._swap_table_entries,
    "foreign_block": DrillingCanary._map_foreign_block,
    "slot_mapping": DrillingCanary._shift_write,
    "lost_write": DrillingCanary._lose_write,
}
