"""A server of one of the stand-ins: ``serve.py ENGINE`` answers, ``serve.py ENGINE faults`` is broken again and again.

Prints one JSON object: the answers, or for each fault the kinds of violation that ended its step in raise mode.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

ENGINE, *MODE = sys.argv[1:]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 12, 13], [3, 1, 4, 1, 5]]


class Server:
    """Any of the engines, with three requests in it that have computed a few tokens each."""

    def __init__(self) -> None:
        module: Any = __import__(ENGINE)
        self.engine = module.Decoder() if ENGINE == "contiguous" else module.Engine()
        self.requests: list[Any] = []
        for number, prompt in enumerate(PROMPTS):
            self.add(f"r{number}", prompt)
        for _ in range(2):
            self.step()

    def add(self, name: str, prompt: list[int]) -> Any:
        if ENGINE == "contiguous":
            self.engine.start(name, prompt)
        else:
            self.requests.append(self.engine.add(*(() if ENGINE == "nano" else (name,)), prompt, 6))
            return self.requests[-1]
        return None

    def step(self) -> None:
        self.engine.decode() if ENGINE == "contiguous" else self.engine.step()

    def answers(self) -> list[list[int]]:
        if ENGINE == "contiguous":
            return list(self.engine.tokens.values())
        return [request.token_ids if ENGINE == "nano" else request.tokens for request in self.requests]

    def tensor(self) -> Any:
        """Where the first request's first key is."""
        engine = self.engine
        if ENGINE == "nano":
            return engine.runner.kv_cache[0, 1, self.requests[0].block_table[0], 0]
        if ENGINE == "layered":
            return engine.cache.keys[1][self.requests[0].blocks[0], :, 0]
        if ENGINE == "hybrid":
            return engine.caches["window"][self.requests[2].blocks["window"][-1], 1, 0]
        if ENGINE == "tokenpool":
            return engine.pool.kv_buffers[1][int(engine.runner.req_to_token[0, 0])]
        return engine.cache.k[1, 0, :, 0]

    def writer(self) -> Any:
        """The object whose method of the name `store` or `write` writes."""
        return {
            "nano": lambda: self.engine.runner,
            "tokenpool": lambda: self.engine.runner,
            "layered": lambda: self.engine.cache,
            "hybrid": lambda: self.engine,
            "contiguous": lambda: self.engine,
        }[ENGINE]()


def content(server: Server) -> None:
    tensor = server.tensor()
    tensor[(0,) * tensor.dim()] += 1


def lost_write(server: Server) -> None:
    name = "store" if ENGINE == "contiguous" else "write"
    setattr(server.writer(), name, lambda *_: None)


def nonfinite(server: Server) -> None:
    writer, name = server.writer(), "store" if ENGINE == "contiguous" else "write"
    write = getattr(writer, name)
    setattr(writer, name, lambda *args: write(*args[:-1], args[-1] * float("inf")))


def unwritten(server: Server) -> None:
    if ENGINE == "contiguous":
        server.engine.tokens["r2"] += [9, 9, 9]
    elif ENGINE == "nano":
        server.engine.manager.prefixes[(9, 9, 9, 9)] = server.engine.manager.free_ids[-1]
        server.add("late", [9, 9, 9, 9, 9])
    elif ENGINE == "tokenpool":
        request, table = server.requests[2], server.engine.runner.req_to_token
        table[request.row, request.computed] = server.engine.pool.alloc(1)[0]
        request.tokens.append(9)
        request.computed += 1
    else:
        request = server.requests[2]
        request.tokens += [9, 9, 9]
        request.computed += 2


def position(server: Server) -> None:
    if ENGINE == "tokenpool":
        table = server.engine.runner.req_to_token
        table[0, :2] = table[0, :2].flip(0)
        return
    table = server.requests[0].block_table
    table[0], table[1] = table[1], table[0]


def token(server: Server) -> None:
    if ENGINE == "nano":
        server.requests[0].token_ids[2] += 1
    elif ENGINE in ("hybrid", "tokenpool"):
        server.requests[0].tokens[2] += 1
    else:
        rows = server.engine.rows
        rows[0], rows[1] = rows[1], rows[0]


def chain(server: Server) -> None:
    if ENGINE == "layered":
        first, _, other = server.requests
        first.blocks[0], other.blocks[0] = other.blocks[0], first.blocks[0]
        return
    if ENGINE == "tokenpool":
        table = server.engine.runner.req_to_token
        other = server.add("other", [7, 2, 3, 4, 5, 6, 7, 8, 9])
        server.engine.running.remove(other)
        table[0, 1:8] = table[other.row, 1:8]
        return
    manager, first = server.engine.manager, server.requests[0]
    other = server.add("other", [20, 21, 22, 23, 24])
    server.step()
    manager.prefixes[(20, 21, 22, 23, 5, 6, 7, 8)] = first.block_table[1]
    assert manager.prefixes[(20, 21, 22, 23)] == other.block_table[0]
    server.add("late", [20, 21, 22, 23, 5, 6, 7, 8, 9])


def address(server: Server) -> None:
    if ENGINE == "tokenpool":
        alloc = server.engine.batch

        def batch(reqs: Any) -> Any:
            built = alloc(reqs)
            built.out_cache_loc = built.out_cache_loc + 1
            return built

        server.engine.batch = batch
        return
    runner = server.engine.runner
    slot_of = runner.slot_of
    runner.slot_of = lambda seq, position: slot_of(seq, position) + 1


def ownership(server: Server) -> None:
    if ENGINE == "nano":
        server.requests[2].block_table[0] = server.requests[0].block_table[0]
    elif ENGINE == "tokenpool":
        server.engine.pool.free(server.engine.runner.req_to_token[0, :1].clone())
    elif ENGINE == "layered":
        server.engine.cache.give_back(server.requests[0].blocks[:1])
    else:
        server.requests[2].blocks["full"][0] = server.requests[0].blocks["full"][0]


def double_free(server: Server) -> None:
    if ENGINE == "nano":
        seq = server.requests[0]
        table = list(seq.block_table)
        server.engine.manager.deallocate(seq)
        seq.block_table += table
        server.engine.manager.deallocate(seq)
        server.engine.running.remove(seq)
    elif ENGINE == "tokenpool":
        slots = server.engine.pool.alloc(1)
        server.engine.pool.free(slots)
        server.engine.pool.free(slots)
    elif ENGINE == "layered":
        blocks = server.engine.cache.take(1)
        server.engine.cache.give_back(blocks)
        server.engine.cache.give_back(blocks)
    else:
        allocator = server.engine.allocators["full"]
        block = allocator.take("r0")
        allocator.give_back("r0", [block])
        allocator.give_back("r0", [block])


FAULTS = {
    "nano": (content, lost_write, nonfinite, unwritten, position, token, chain, address, ownership, double_free),
    "layered": (content, lost_write, nonfinite, unwritten, chain, ownership, double_free),
    "contiguous": (content, lost_write, nonfinite, unwritten, token),
    "tokenpool": (
        content,
        lost_write,
        nonfinite,
        unwritten,
        position,
        token,
        chain,
        address,
        ownership,
        double_free,
    ),
    "hybrid": (content, lost_write, nonfinite, unwritten, token, ownership, double_free),
}


def main() -> None:
    if not MODE:
        server = Server()
        while ENGINE != "contiguous" and server.engine.running:
            server.step()
        print(json.dumps(server.answers()))
        return
    found: dict[str, list[str]] = {}
    for fault in FAULTS[ENGINE]:
        server = Server()
        fault(server)
        found[fault.__name__] = []
        try:
            server.step()
            server.step()
        except Exception as error:
            if type(error).__name__ != "KVCanaryError":
                raise
            found[fault.__name__] = sorted({str(violation.kind) for violation in error.violations})  # type: ignore[attr-defined]
        # Two servers at once would be two pools.
        del server, fault
        gc.collect()
    print(json.dumps(found))


main()
