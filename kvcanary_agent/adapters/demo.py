"""The demo engine: the reference for an adapter that knows the pool, the step and every event of the allocator."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from kvcanary_agent import adapter as kv

if TYPE_CHECKING:
    from kvcanary_agent.demo.block_manager import BlockManager
    from kvcanary_agent.demo.engine import Engine
    from kvcanary_agent.demo.model import Batch
    from kvcanary_agent.demo.model_runner import ModelRunner
    from kvcanary_agent.demo.sequence import Sequence


class DemoAdapter(kv.Adapter):
    """Follows `kvcanary_agent.demo.engine.Engine`."""

    engine = "kvcanary-demo"
    module = "kvcanary_agent.demo.engine"

    @kv.opens("Engine.__init__")
    def pool(self, engine: Engine) -> kv.KVLayout:
        data = engine.runner.pool.data
        return kv.layout(self.engine, kv=data, axes="layers kv blocks tokens heads dim", null_block=0, ownership=True)

    def used_by(self, engine: Engine) -> tuple[object, ...]:
        return engine.runner, engine.block_manager

    # Events of the allocator

    @kv.after("BlockManager.allocate")
    def allocated(self, pool: kv.WatchedPool, manager: BlockManager, seq: Sequence, result: list[int]) -> None:
        pool.canary.allocated(result, request=seq.request_id)

    @kv.before("BlockManager.share")
    def shared(self, pool: kv.WatchedPool, manager: BlockManager, seq: Sequence, blocks: List[int]) -> None:
        pool.canary.shared(list(blocks), request=seq.request_id)

    @kv.after("BlockManager.copy_on_write")
    def copied(self, pool: kv.WatchedPool, manager: BlockManager, seq: Sequence, result: tuple[int, int]) -> None:
        source, destination = result
        # The bytes follow before the next forward. By then the source may have been freed and handed out again, so its
        # records are copied now.
        pool.canary.allocated([destination], request=seq.request_id)
        pool.canary.copied([source], [destination])
        pool.canary.freed([source], request=seq.request_id, cached=manager.is_indexed(source))

    @kv.before("BlockManager.free")
    def freed(self, pool: kv.WatchedPool, manager: BlockManager, seq: Sequence) -> None:
        for cached in (False, True):
            blocks = [block for block in seq.block_table if manager.is_indexed(block) == cached]
            pool.canary.freed(blocks, request=seq.request_id, cached=cached)

    # Steps

    @kv.after("ModelRunner.build_batch")
    def batch_built(self, pool: kv.WatchedPool, runner: ModelRunner, rows: List[tuple[Sequence, int]]) -> None:
        pool.notes["sequences"] = [seq for seq, _ in rows]

    @kv.forward("ModelRunner.forward")
    def step(self, pool: kv.WatchedPool, runner: ModelRunner, batch: Batch) -> kv.ForwardStep:
        return kv.step(
            pool,
            requests=batch.request_ids,
            block_table=batch.block_tables,
            token_ids=batch.token_ids,
            positions=batch.positions,
            write_slots=batch.slot_mapping,
            prefix_lens=batch.prefix_lens,
            query_offsets=batch.query_offsets,
            known_tokens=[seq.token_ids for seq in pool.notes["sequences"]],
        )
