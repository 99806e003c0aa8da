"""Random healthy histories of a paged pool, as operations of the case language.

A small but complete engine on its host side: a scheduler that batches prefills, decodes and drafts, and an allocator
with reference counts, a prefix index and eviction. It only ever does what it may; what it does is written down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

Json = dict[str, Any]
_Prefix = tuple[str | None, tuple[int, ...]]

# Parts of at least this many bytes, so that two tokens never have the same bytes by chance.
_HEAD_DIMS = {"float32": (2, 5, 8), "float16": (4, 7), "bfloat16": (5, 8), "float8_e4m3fn": (12, 17)}
_HEAD_DIMS |= {"float8_e5m2": (13, 16), "int8": (9, 16)}
_NAMESPACES: tuple[Json | None, ...] = (None, None, None, {"lora": "x"}, {"salt": "x"}, {"lora": "x", "mm": "cat"})


# How often things happen.
_WEIGHTS = {
    "step": 8,
    "arrive": 4,
    "fork": 2,
    "resume": 2,
    "swap_in": 3,
    "swap_out": 2,
    "finish": 1,
    "preempt": 1,
    "new_weights": 1,
    "patrol": 1,
}


@dataclass
class _Request:
    """``blocks`` are what it holds, None where its window has left a block behind."""

    name: str
    tokens: list[int]
    namespace: Json | None
    computed: int = 0
    engine_computed: int = 0
    blocks: list[int | None] = field(default_factory=list)

    def prefix(self, length: int) -> _Prefix:
        return str(self.namespace), tuple(self.tokens[:length])


@dataclass
class _Stored:
    key: str
    blocks: int
    request: _Request


class Traffic:
    """Writes a history, action by action.

    Attributes:
        operations: What has happened so far.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.operations: list[Json] = []
        dtype = random.choice(sorted(_HEAD_DIMS))
        blocks = random.randint(6, 12)
        self.pool: Json = {
            "blocks": blocks,
            "block_size": random.randint(1, 5),
            "layers": random.randint(1, 2),
            "kv_heads": random.randint(1, 2),
            "head_dim": random.choice(_HEAD_DIMS[dtype]),
            "dtype": dtype,
            "null_block": random.choice((0, 0, blocks - 1, None)),
            "window": random.choice((None, None, random.randint(2, 7))),
            "ranks": random.choice((1, 1, 2)),
        }
        self._size: int = self.pool["block_size"]
        self._window: int | None = self.pool["window"]
        self._references = dict.fromkeys(range(blocks), 0)
        self._references.pop(self.pool["null_block"], None)
        self._index: dict[_Prefix, int] = {}
        self._running: list[_Request] = []
        self._waiting: list[_Request] = []
        self._stored: list[_Stored] = []
        self._names = 0

    def run(self, actions: int, favoured: tuple[str, ...] = ()) -> None:
        """Let ``actions`` things happen, above all ``favoured`` ones (names of methods)."""
        acts = [getattr(self, name) for name, weight in _WEIGHTS.items() for _ in range(weight)]
        acts += [getattr(self, name) for name in favoured for _ in range(5)]
        self.arrive()
        self.step()
        for _ in range(actions):
            self.random.choice(acts)()
        self.step()

    # Actions

    def arrive(self) -> None:
        relative = self.random.choice(self._running + self._waiting or [None])
        tokens = self._some_tokens(self.random.randint(1, 3 * self._size))
        namespace = self.random.choice(_NAMESPACES)
        if relative is not None and self.random.random() < 0.7:
            namespace = relative.namespace
            tokens = (
                relative.tokens[: self.random.randint(1, len(relative.tokens))] + tokens[: self.random.randint(0, 2)]
            )
        request = _Request(self._name("R"), tokens, namespace)
        self._emit_request(request)
        self._admit(request, {})

    def step(self) -> None:
        """One forward over some of the running requests, and over newcomers that share what it computes."""
        rows: list[tuple[_Request, Json]] = []
        in_this_step: dict[_Prefix, int] = {}
        drafting = []
        for request in self.random.sample(self._running, self.random.randint(0, len(self._running))):
            start = request.computed
            of_prompt = request.tokens[start : start + self.random.randint(1, 2 * self._size)]
            new = of_prompt or self._some_tokens(self.random.choice((1, 1, 1, 3)))
            if not self._extend(request, start + len(new)):
                continue
            if not of_prompt:
                request.tokens += new
            rows.append((request, self._row(request, start, new)))
            if not of_prompt and len(new) > 1:
                drafting.append((request, start))
            else:
                in_this_step |= self._full_blocks(request)
        if rows and self.random.random() < 0.3:
            request, _ = self.random.choice(rows)
            newcomer = _Request(self._name("R"), [*request.tokens, *self._some_tokens(1)], request.namespace)
            self._emit_request(newcomer)
            if self._admit(newcomer, in_this_step) and self._extend(newcomer, len(newcomer.tokens)):
                rows.append((newcomer, self._row(newcomer, newcomer.computed, newcomer.tokens[newcomer.computed :])))
        if not rows:
            return
        self.random.shuffle(rows)
        forward: Json = {"op": "forward", "batch": [row for _, row in rows]}
        if self.random.random() < 0.3:
            null_block = self.pool["null_block"]
            null_slots = [] if null_block is None else [null_block * self._size]
            forward["pad"] = [self.random.choice([-1, *null_slots]) for _ in range(2)]
        self.operations.append(forward)
        for request, start in drafting:
            self._reject_drafts(request, start)
        for request, _ in rows:
            self._publish(request)
            self._recycle_behind_window(request)

    def fork(self) -> None:
        """A copy of a request: full blocks shared, the last one copied before it is written (copy on write)."""
        parents = [request for request in self._running if request.computed and None not in request.blocks]
        if not parents:
            return
        parent = self.random.choice(parents)
        full, rest = divmod(parent.computed, self._size)
        if rest and not self._free_blocks():
            return
        child = _Request(self._name("F"), parent.tokens[: parent.computed], parent.namespace)
        self._emit_request(child)
        self._share(child, [block for block in parent.blocks[:full] if block is not None])
        if rest:
            self._allocate(child, 1)
            self.operations.append({"op": "copy_block", "from": parent.blocks[full], "to": child.blocks[full]})
        child.computed = parent.computed
        self._running.append(child)

    def finish(self) -> None:
        if self._running:
            self._free(self.random.choice(self._running))

    def preempt(self) -> None:
        if self._running:
            request = self.random.choice(self._running)
            self._free(request)
            self._waiting.append(request)

    def resume(self) -> None:
        if self._waiting:
            request = self._waiting.pop(self.random.randrange(len(self._waiting)))
            if not self._admit(request, {}):
                self._waiting.append(request)

    def swap_out(self) -> None:
        """Copy full blocks of a request to another tier, perhaps during a step, and perhaps preempt it then."""
        candidates = [r for r in self._running if r.computed >= self._size and None not in r.blocks]
        if not candidates:
            return
        request = self.random.choice(candidates)
        count = self.random.randint(1, request.computed // self._size)
        blocks = request.blocks[:count]
        stored = _Stored(self._name("K"), count, _Request("", request.tokens[: count * self._size], request.namespace))
        self.operations.append({"op": "store_begin", "key": stored.key, "blocks": blocks})
        if self._window is None and self.random.random() < 0.5:
            self.step()
        self.operations.append({"op": "store_end", "key": stored.key, "blocks": blocks})
        self._stored.append(stored)
        if request in self._running and self.random.random() < 0.7:
            self._free(request)
            self._waiting.append(request)

    def swap_in(self) -> None:
        """A preempted request, or a new one with the same prefix, takes its first blocks from the other tier."""
        if not self._stored:
            return
        stored = self.random.choice(self._stored)
        prefix = stored.request.tokens
        if len(self._free_blocks()) < stored.blocks:
            return
        again = [
            request
            for request in self._waiting
            if request.namespace == stored.request.namespace and request.tokens[: len(prefix)] == prefix
        ]
        if again:
            request = again[0]
            self._waiting.remove(request)
        else:
            request = _Request(self._name("R"), [*prefix, *self._some_tokens(1)], stored.request.namespace)
            self._emit_request(request)
        self._allocate(request, stored.blocks)
        self.operations.append({"op": "load", "key": stored.key, "req": request.name, "blocks": list(request.blocks)})
        request.computed = request.engine_computed = len(prefix)
        self._running.append(request)

    def new_weights(self) -> None:
        """Everything computed so far is void, here and in the other tier."""
        if self.random.random() < 0.5:
            return
        for request in list(self._running):
            self._free(request)
            self._waiting.append(request)
        self._index.clear()
        self._stored.clear()
        self.operations.append({"op": "epoch"})

    def patrol(self) -> None:
        self.operations.append({"op": "sweep"})

    # Requests

    def _name(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names}"

    def _some_tokens(self, count: int) -> list[int]:
        # Few different tokens, so that much is alike and little is the same.
        return [self.random.randint(1, 4) for _ in range(count)]

    def _emit_request(self, request: _Request) -> None:
        operation: Json = {"op": "request", "req": request.name, "prompt": list(request.tokens)}
        if request.namespace is not None:
            operation["namespace"] = request.namespace
        self.operations.append(operation)

    def _admit(self, request: _Request, in_this_step: dict[_Prefix, int]) -> bool:
        """Start a request on the longest prefix that there is; False (and nothing happened) if no block is left."""
        hit: list[int] = []
        known = {**in_this_step, **self._index}
        while (block := known.get(request.prefix((len(hit) + 1) * self._size))) is not None and (
            (len(hit) + 1) * self._size <= len(request.tokens)
        ):
            hit.append(block)
        if len(hit) * self._size == len(request.tokens) and in_this_step:
            hit.pop()
        if not hit and not self._free_blocks():
            return False
        self._share(request, hit)
        # Of a prompt that is known to its end, the last token is computed again, into the shared block.
        request.computed = min(len(hit) * self._size, len(request.tokens) - 1)
        self._running.append(request)
        return True

    def _row(self, request: _Request, start: int, new: list[int]) -> Json:
        row: Json = {"req": request.name, "tokens": list(new)}
        if start != request.engine_computed or self.random.random() < 0.2:
            row["start"] = start
        request.computed = request.engine_computed = start + len(new)
        return row

    def _reject_drafts(self, request: _Request, start: int) -> None:
        accepted = self.random.randint(start + 1, request.computed)
        if accepted < request.computed or self.random.random() < 0.3:
            self.operations.append({"op": "rollback", "req": request.name, "to": accepted})
            request.computed = request.engine_computed = accepted
            del request.tokens[accepted:]

    def _full_blocks(self, request: _Request) -> dict[_Prefix, int]:
        return {
            request.prefix((number + 1) * self._size): block
            for number, block in enumerate(request.blocks[: request.computed // self._size])
            if block is not None
        }

    def _publish(self, request: _Request) -> None:
        for prefix, block in self._full_blocks(request).items():
            if prefix not in self._index:
                self._index[prefix] = block
                if self.random.random() < 0.3:
                    self.operations.append({"op": "index", "key_tokens": list(prefix[1]), "block": block})

    def _recycle_behind_window(self, request: _Request) -> None:
        if self._window is None:
            return
        behind = max(0, request.computed - self._window + 1) // self._size
        # The language does not say whose reference is given back by number, so there must be one holder only.
        blocks = [block for block in request.blocks[:behind] if block is not None and self._references[block] == 1]
        if blocks and self.random.random() < 0.7:
            request.blocks = [None if block in blocks else block for block in request.blocks]
            self._give_back({"op": "free", "blocks": blocks}, blocks)

    # Blocks

    def _free_blocks(self) -> list[int]:
        return [block for block, count in self._references.items() if not count]

    def _extend(self, request: _Request, length: int) -> bool:
        missing = max(0, -(-length // self._size) - len(request.blocks))
        if missing > len(self._free_blocks()):
            return False
        spare = self.random.random() < 0.1 and missing < len(self._free_blocks())
        self._allocate(request, missing + spare)
        return True

    def _allocate(self, request: _Request, count: int) -> None:
        if not count:
            return
        blocks = self.random.sample(self._free_blocks(), count)
        for block in blocks:
            self._references[block] = 1
            self._forget(block)
        request.blocks += blocks
        self.operations.append({"op": "alloc", "req": request.name, "blocks": blocks})

    def _share(self, request: _Request, blocks: list[int]) -> None:
        if not blocks:
            return
        for block in blocks:
            self._references[block] += 1
        request.blocks += blocks
        request.computed = request.engine_computed = len(blocks) * self._size
        self.operations.append({"op": "share", "req": request.name, "blocks": list(blocks)})

    def _free(self, request: _Request) -> None:
        blocks = [block for block in request.blocks if block is not None]
        self._give_back({"op": "free", "req": request.name}, blocks)
        request.blocks.clear()
        request.computed = request.engine_computed = 0
        self._running.remove(request)

    def _give_back(self, operation: Json, blocks: list[int]) -> None:
        cached = self.random.random() < 0.6
        self.operations.append({**operation, "cached": cached})
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block] and not cached:
                self._forget(block)

    def _forget(self, block: int) -> None:
        for prefix in [prefix for prefix, indexed in self._index.items() if indexed == block]:
            del self._index[prefix]
