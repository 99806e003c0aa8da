"""Faults for healthy histories: each puts one into the operations, at a random place."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.faults.oracle import Oracle

Json = dict[str, Any]


@dataclass
class Fault:
    """A history with a fault in it.

    Attributes:
        pool, operations: The history.
        index: The operation that is the fault.
        kinds: What the canary may call it, at once or later.
        at_once: Whether it must be reported during the fault itself.
    """

    pool: Json
    operations: list[Json]
    index: int
    kinds: str
    at_once: bool = False


def _is_write_of(content: Any, token: int, position: int) -> bool:
    """Whether a slot's content, as the oracle represents it, was made from this token at this position."""
    return bool(content) and content[0] == "kv" and (content[3][-1], content[4]) == (token, position)


class Saboteur:
    """Makes faults for one history; each method makes one, or None where the place that it picks offers none."""

    def __init__(self, random: Random, pool: Json, operations: list[Json]) -> None:
        self.random = random
        self.pool = dict(pool)
        self.operations = deepcopy(operations)

    def flipped_bits(self) -> Fault | None:
        return self._poke({"xor": self._some_bits()}, "content transfer")

    def nan(self) -> Fault | None:
        if self.pool["dtype"] == "int8":
            return None
        return self._poke({"value": "nan"}, "nonfinite content transfer")

    def zeros(self) -> Fault | None:
        return self._poke({"value": "zero"}, "content transfer")

    def padding_on_a_live_slot(self) -> Fault | None:
        index = self._pick("forward")
        slot = self._live_slot(self._before(index)) if index is not None else None
        if index is None or slot is None:
            return None
        self.operations[index].setdefault("pad", []).append(slot)
        return Fault(self.pool, self.operations, index, "wild_write address content transfer")

    def lost_write(self) -> Fault | None:
        picked = self._pick_row()
        if picked is None:
            return None
        index, row, start = picked
        oracle = self._before(index)
        before = [oracle.contents[0].get(oracle.slot(row["req"], start + n)) for n in range(len(row["tokens"]))]
        # A write that leaves the same token at the same position, for another prefix, is beyond what can be told.
        row["drop"] = [
            start + number
            for number, (token, content) in enumerate(zip(row["tokens"], before, strict=True))
            if self.random.random() < 0.5 and not _is_write_of(content, token, start + number)
        ]
        return Fault(self.pool, self.operations, index, "lost_write unwritten content transfer")

    def stale_row(self) -> Fault | None:
        return self._map(self.random.randrange(self.pool["blocks"]))

    def row_outside_the_pool(self) -> Fault | None:
        # Written to through such a row, a negative slot wraps around.
        return self._map(self.random.choice((-7, self.pool["blocks"], 10**6)), " content")

    def freed_while_in_use(self) -> Fault | None:
        index = self._place()
        slot = self._live_slot(self._before(index))
        if slot is None:
            return None
        block = slot // self.pool["block_size"]
        return self._insert(index, {"op": "free", "blocks": [block]}, "ownership unwritten")

    def handed_out_while_held(self) -> Fault | None:
        index = self._place()
        slot = self._live_slot(self._before(index))
        if slot is None:
            return None
        self._insert(index, {"op": "request", "req": "Z", "prompt": [1]}, "")
        alloc = {"op": "alloc", "req": "Z", "blocks": [slot // self.pool["block_size"]]}
        fault = self._insert(index + 1, alloc, "ownership unwritten index")
        fault.at_once = True
        return fault

    def late_write(self) -> Fault | None:
        index = self._place()
        oracle = self._before(index)
        live = set(self._live_slots(oracle))
        # Rows that wrote what is no longer there, to slots that somebody is going to read.
        rows = [
            row
            for row, written in oracle.written.items()
            if any(slot in live and oracle.contents[0].get(slot) != content for slot, content in written)
        ]
        if not rows:
            return None
        of, req = self.random.choice(rows)
        operation = {"op": "replay_write", "of": of, "req": req}
        return self._insert(index, operation, "content ownership wild_write transfer lost_write")

    def half_a_copy(self) -> Fault | None:
        index = self._pick("copy_block")
        if index is None:
            return None
        self.operations[index]["fraction"] = self.random.choice((0, 0.3, 0.5))
        return Fault(self.pool, self.operations, index, "content transfer")

    def half_a_load(self) -> Fault | None:
        index = self._pick("load")
        if index is None:
            return None
        self.operations[index]["layers"] = list(range(self.pool["layers"] - 1))
        return Fault(self.pool, self.operations, index, "transfer content unwritten lost_write")

    def load_on_one_rank(self) -> Fault | None:
        index = self._pick("load")
        if index is None:
            return None
        self.pool["ranks"] = 2
        self.operations[index]["rank"] = self.random.randrange(2)
        return Fault(self.pool, self.operations, index, "transfer content unwritten rank index chain lost_write")

    def other_token(self) -> Fault | None:
        picked = self._pick_row()
        if picked is None:
            return None
        index, row, start = picked
        prompt = next(
            op["prompt"] for op in self.operations[:index] if op["op"] == "request" and op["req"] == row["req"]
        )
        of_prompt = range(min(len(row["tokens"]), len(prompt) - start))
        if not of_prompt:
            return None
        row["tokens"][self.random.choice(of_prompt)] += 5
        return Fault(self.pool, self.operations, index, "token chain index ownership")

    def other_namespace(self) -> Fault | None:
        index = self._pick("request")
        assert index is not None, "every history has a request"
        self.operations[index]["namespace"] = {"lora": "z"}
        return Fault(self.pool, self.operations, index, "namespace ownership index")

    def forgotten_epoch(self) -> Fault | None:
        return self._insert(self._place(), {"op": "epoch"}, "epoch index chain")

    def other_slot(self) -> Fault | None:
        picked = self._pick_row()
        if picked is None:
            return None
        index, row, start = picked
        oracle = self._before(index)
        slots = [oracle.slot(row["req"], start + number) for number in range(len(row["tokens"]))]
        number = self.random.randrange(len(slots))
        num_slots = self.pool["blocks"] * self.pool["block_size"]
        slots[number] = self.random.choice([slot for slot in range(num_slots) if slot != slots[number]])
        row["slots"] = slots
        kinds = (
            "address ownership unwritten wild_write lost_write content token position chain transfer namespace index"
        )
        return Fault(self.pool, self.operations, index, kinds, at_once=True)

    def wrong_index_entry(self) -> Fault | None:
        index = self._place()
        oracle = self._before(index)
        size = self.pool["block_size"]
        slots = [
            oracle.slot(name, position)
            for name in oracle.running
            for position in oracle.readable(name)
            if position % size == size - 1 and oracle.holds(name, position)
        ]
        if not slots:
            return None
        slot = self.random.choice(slots)
        content: Any = oracle.contents[0][slot]
        _, _, _, tokens, _ = content
        key = list(tokens)
        key[self.random.randrange(len(key))] += 5
        fault = self._insert(index, {"op": "index", "key_tokens": key, "block": slot // size}, "index")
        fault.at_once = True
        return fault

    # Places

    def _place(self) -> int:
        return self.random.randint(1, len(self.operations))

    def _before(self, index: int) -> Oracle:
        return Oracle(self.pool).follow(self.operations[:index])

    def _pick(self, op: str) -> int | None:
        found = [index for index, operation in enumerate(self.operations) if operation["op"] == op]
        return self.random.choice(found) if found else None

    def _pick_row(self) -> tuple[int, Json, int] | None:
        index = self._pick("forward")
        if index is None:
            return None
        row = self.random.choice(self.operations[index]["batch"])
        return index, row, row.get("start", self._before(index).computed(row["req"]))

    def _live_slots(self, oracle: Oracle) -> list[int]:
        """The slots that requests are going to read, if they go on."""
        return [oracle.slot(name, position) for name in oracle.running for position in oracle.readable(name)]

    def _live_slot(self, oracle: Oracle) -> int | None:
        slots = self._live_slots(oracle)
        return self.random.choice(slots) if slots else None

    # Ways to put a fault in

    def _insert(self, index: int, operation: Json, kinds: str) -> Fault:
        self.operations.insert(index, operation)
        return Fault(self.pool, self.operations, index, kinds)

    def _some_bits(self) -> list[list[int]]:
        element_bytes = {"float32": 4, "float16": 2, "bfloat16": 2}.get(self.pool["dtype"], 1)
        payload_bytes = self.pool["kv_heads"] * self.pool["head_dim"] * element_bytes
        places = self.random.sample(range(payload_bytes), self.random.randint(1, 2))
        return [[byte, 1 << self.random.randrange(8)] for byte in places]

    def _poke(self, change: Json, kinds: str) -> Fault | None:
        index = self._place()
        slot = self._live_slot(self._before(index))
        if slot is None:
            return None
        block, offset = divmod(slot, self.pool["block_size"])
        layer = self.random.randrange(self.pool["layers"])
        where: Json = {"block": block, "offset": offset, "layer": layer, "part": self.random.choice("kv")}
        if self.random.random() < 0.5:
            where["rank"] = self.random.randrange(self.pool["ranks"])
        return self._insert(index, {"op": "poke", **where, **change}, kinds)

    def _map(self, block: int, more_kinds: str = "") -> Fault | None:
        index = self._place()
        oracle = self._before(index)
        names = [name for name in oracle.running if oracle.readable(name)]
        if not names:
            return None
        name = self.random.choice(names)
        entry = self.random.choice(oracle.readable(name)) // self.pool["block_size"]
        if oracle.table(name)[entry] == block:
            return None
        operation = {"op": "map", "req": name, "index": entry, "block": block}
        kinds = "address ownership token position chain namespace epoch unwritten index transfer"
        return self._insert(index, operation, kinds + more_kinds)


# What each fault needs more of in a history than there is by chance.
FAULTS: dict[Callable[[Saboteur], Fault | None], tuple[str, ...]] = {
    Saboteur.flipped_bits: (),
    Saboteur.nan: (),
    Saboteur.zeros: (),
    Saboteur.padding_on_a_live_slot: (),
    Saboteur.lost_write: (),
    Saboteur.stale_row: (),
    Saboteur.row_outside_the_pool: (),
    Saboteur.freed_while_in_use: (),
    Saboteur.handed_out_while_held: (),
    Saboteur.late_write: ("finish", "preempt", "arrive"),
    Saboteur.half_a_copy: ("fork",),
    Saboteur.half_a_load: ("swap_out", "swap_in"),
    Saboteur.load_on_one_rank: ("swap_out", "swap_in"),
    Saboteur.other_token: (),
    Saboteur.other_namespace: ("arrive",),
    Saboteur.forgotten_epoch: (),
    Saboteur.other_slot: (),
    Saboteur.wrong_index_entry: (),
}
