"""The adapter of the hybrid stand-in: two groups of layers, of which each has block tables and an allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcanary_agent import adapter as kv

if TYPE_CHECKING:
    from tests.adapters.stand_ins.hybrid import Allocator, Engine, Request

GROUPS = {"full": None, "window": 6}


class HybridAdapter(kv.Adapter):
    engine = "hybrid"
    module = "hybrid"

    @kv.opens("Engine.__init__")
    def layout(self, engine: Engine) -> kv.KVLayout:
        axes = {"kv": ("blocks", "kv", "tokens", "dim")}
        return kv.KVLayout(
            engine=self.engine,
            groups=tuple(
                kv.KVGroup(
                    name=name,
                    block_size=4,
                    parts=kv.parts_of({"kv": engine.caches[name]}, axes, names=[name]),
                    window=window,
                )
                for name, window in GROUPS.items()
            ),
            reports_ownership=True,
        )

    def used_by(self, engine: Engine) -> list[object]:
        return list(engine.allocators.values())

    @kv.after("Allocator.take")
    def taken(self, pool: kv.WatchedPool, allocator: Allocator, owner: str, result: int) -> None:
        pool.canary.allocated([result], group=list(GROUPS).index(allocator.layer), request=owner)

    @kv.before("Allocator.give_back")
    def freed(self, pool: kv.WatchedPool, allocator: Allocator, owner: str, blocks: list[int]) -> None:
        pool.canary.freed(blocks, group=list(GROUPS).index(allocator.layer), request=owner)

    @kv.forward("Engine.forward")
    def step(self, pool: kv.WatchedPool, engine: Engine, requests: list[Request]) -> kv.ForwardStep:
        return kv.step(
            pool,
            requests=[request.name for request in requests],
            block_table=[[request.blocks[group] for request in requests] for group in GROUPS],
            token_ids=[token for request in requests for token in request.tokens[request.computed :]],
            prefix_lens=[request.computed for request in requests],
            query_lens=[len(request.tokens) - request.computed for request in requests],
            known_tokens=[request.tokens for request in requests],
        )
