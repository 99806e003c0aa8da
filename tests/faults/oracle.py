"""What a pool really holds while a case runs, by the rules of the language alone and in plain dictionaries.

It knows no records, hashes or tensors. Bytes are represented by what they are made from, so two slots hold the same
bytes exactly if they are represented by equal values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class _Request:
    prompt: list[int]
    namespace: str
    known: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)
    held: list[int | None] = field(default_factory=list)


class Oracle:
    """Follows a case with one layer group.

    Attributes:
        wrong: For each operation that goes wrong visibly, in order: a row reads bytes that are not its own prefix's, or
            a block that nobody holds; a block is handed out while it is held, or freed when it is not.
        contents: For each rank, what each slot holds.
        written: For each row of each forward, by index and request, the slots that it wrote and with what.
    """

    def __init__(self, pool: Json) -> None:
        self._size: int = pool["block_size"]
        self._window: int | None = pool["window"]
        self._epoch = 0
        self._requests: dict[str, _Request] = {}
        self._references: dict[int, int] = {}
        # Slots of blocks that were handed out, and that nobody has written since.
        self._unwritten: set[int] = set()
        self._stores: dict[str, list[list[object]]] = {}
        self.written: dict[tuple[int, str], list[tuple[int, object]]] = {}
        self.contents: list[dict[int, object]] = [{} for _ in range(pool["ranks"])]
        self.wrong: list[int] = []

    def follow(self, operations: list[Json]) -> Oracle:
        for index, operation in enumerate(operations):
            if not getattr(self, "on_" + operation["op"])(index, operation):
                self.wrong.append(index)
        return self

    def readable(self, name: str) -> range:
        """The positions that the next step of a request reads if it goes on where it is."""
        computed = self._requests[name].computed
        return range(0 if self._window is None else max(0, computed - self._window + 1), computed)

    def slot(self, name: str, position: int) -> int:
        return self._requests[name].table[position // self._size] * self._size + position % self._size

    def holds(self, name: str, position: int) -> bool:
        """Whether the request's own bytes have been written there, on every rank."""
        own, slot = self._own(self._requests[name], self._requests[name].known, position), self.slot(name, position)
        return slot not in self._unwritten and all(contents.get(slot) == own for contents in self.contents)

    @property
    def running(self) -> list[str]:
        return [name for name, request in self._requests.items() if request.table]

    def table(self, name: str) -> list[int]:
        return self._requests[name].table

    def computed(self, name: str) -> int:
        return self._requests[name].computed

    def _own(self, request: _Request, tokens: list[int], position: int) -> object:
        return ("kv", request.namespace, self._epoch, tuple(tokens[: position + 1]), position)

    def on_request(self, index: int, operation: Json) -> bool:
        namespace = sorted((operation.get("namespace") or {}).items())
        prompt = operation["prompt"]
        self._requests[operation["req"]] = _Request(prompt, str(namespace), list(prompt))
        return True

    def on_alloc(self, index: int, operation: Json) -> bool:
        request, blocks = self._requests[operation["req"]], operation["blocks"]
        held = any(self._references.get(block, 0) for block in blocks)
        self._references.update(dict.fromkeys(blocks, 1))
        self._unwritten.update(block * self._size + offset for block in blocks for offset in range(self._size))
        request.table += blocks
        request.held += blocks
        return not held

    def on_share(self, index: int, operation: Json) -> bool:
        request, blocks = self._requests[operation["req"]], operation["blocks"]
        for block in blocks:
            self._references[block] = self._references.get(block, 0) + 1
        request.table += blocks
        request.held += blocks
        request.computed += len(blocks) * self._size
        return True

    def on_map(self, index: int, operation: Json) -> bool:
        table = self._requests[operation["req"]].table
        table[operation["index"] : operation["index"] + 1] = [operation["block"]]
        return True

    def on_free(self, index: int, operation: Json) -> bool:
        if "req" in operation:
            request = self._requests[operation["req"]]
            blocks = [block for block in request.held if block is not None]
            request.table, request.held, request.computed = [], [], 0
        else:
            blocks = operation["blocks"]
            for block in blocks:
                self._leave_behind(block)
        held = all(self._references.get(block, 0) for block in blocks)
        for block in blocks:
            self._references[block] = max(0, self._references.get(block, 0) - 1)
        return held

    def _leave_behind(self, block: int) -> None:
        """A window that has passed a block explains why it is freed by number: its holder will not free it again."""
        for request in self._requests.values():
            for number, held in enumerate(request.held):
                last = (number + 1) * self._size - 1
                if self._window and held == block and last < request.computed - self._window + 1:
                    request.held[number] = None
                    return

    def on_forward(self, index: int, operation: Json) -> bool:
        reads = []
        for row in operation["batch"]:
            request = self._requests[row["req"]]
            start = row.get("start", request.computed)
            request.computed = start
            reads.append((request, self.readable(row["req"]), list(request.known)))
            tokens = request.known[:start] + row["tokens"]
            written = []
            for number in range(len(row["tokens"])):
                position = start + number
                slot = row["slots"][number] if "slots" in row else self.slot(row["req"], position)
                if position not in row.get("drop", ()):
                    written.append((slot, self._own(request, tokens, position)))
                if position >= len(request.prompt) or position >= len(request.known):
                    request.known[position : position + 1] = [tokens[position]]
            self.written[index, row["req"]] = written
            self._write(written)
            request.computed = start + len(row["tokens"])
        self._write([(slot, ("garbage", index, n)) for n, slot in enumerate(operation.get("pad", ())) if slot >= 0])
        return all(self._reads_its_own(*read) for read in reads)

    def _reads_its_own(self, request: _Request, positions: range, known: list[int]) -> bool:
        for position in positions:
            block = request.table[position // self._size]
            if not self._references.get(block, 0):
                return False
            slot = block * self._size + position % self._size
            own = self._own(request, known, position)
            if any(contents.get(slot) != own for contents in self.contents):
                return False
        return True

    def _write(self, written: list[tuple[int, object]]) -> None:
        self._unwritten.difference_update(slot for slot, _ in written)
        for contents in self.contents:
            contents.update(written)

    def on_replay_write(self, index: int, operation: Json) -> bool:
        self._write(self.written[operation["of"], operation["req"]])
        return True

    def on_poke(self, index: int, operation: Json) -> bool:
        slot = operation["block"] * self._size + operation["offset"]
        for rank, contents in enumerate(self.contents):
            if operation.get("rank") in (None, rank):
                contents[slot] = ("poked", index, contents.get(slot))
        return True

    def on_copy_block(self, index: int, operation: Json) -> bool:
        for contents in self.contents:
            for offset in range(self._size):
                source, target = (operation[end] * self._size + offset for end in ("from", "to"))
                self._move(contents, target, contents.get(source), whole=operation.get("fraction", 1) == 1, index=index)
        return True

    def _move(self, contents: dict[int, object], target: int, value: object, *, whole: bool, index: int) -> None:
        self._unwritten.discard(target)
        if whole or contents.get(target) == value:
            contents[target] = value
        else:
            contents[target] = ("half", index, value)

    def on_store_begin(self, index: int, operation: Json) -> bool:
        return True

    def on_store_end(self, index: int, operation: Json) -> bool:
        slots = [block * self._size + offset for block in operation["blocks"] for offset in range(self._size)]
        self._stores[operation["key"]] = [[contents.get(slot) for slot in slots] for contents in self.contents]
        return True

    def on_load(self, index: int, operation: Json) -> bool:
        slots = [block * self._size + offset for block in operation["blocks"] for offset in range(self._size)]
        for rank, (contents, values) in enumerate(zip(self.contents, self._stores[operation["key"]], strict=True)):
            if operation.get("rank") in (None, rank):
                for slot, value in zip(slots, values, strict=False):
                    self._move(contents, slot, value, whole="layers" not in operation, index=index)
        self._requests[operation["req"]].computed += len(slots)
        return True

    def on_index(self, index: int, operation: Json) -> bool:
        return True

    def on_rollback(self, index: int, operation: Json) -> bool:
        request = self._requests[operation["req"]]
        request.computed = operation["to"]
        del request.known[operation["to"] :]
        return True

    def on_epoch(self, index: int, operation: Json) -> bool:
        self._epoch += 1
        return True

    def on_sweep(self, index: int, operation: Json) -> bool:
        return True
