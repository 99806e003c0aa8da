"""``KVCANARY_ON_VIOLATION=evict``: blocks that a worker has found corrupt leave the scheduler's prefix index.

The worker finds them and the scheduler's process owns the index. Their numbers travel back as an attribute of the
`ModelRunnerOutput`, which every step returns anyway, of builtin types only, as `events` do on the way there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.attached_runner import AttachedRunner, attached_to
from kvcanary_agent.adapters.vllm.pool import NotCovered

_ATTRIBUTE = "kvcanary_condemned"
_FORM = 1
# An output that is complete only later holds the one that is sent in an attribute of one of these names.
_WITHIN = ("_model_runner_output", "model_runner_output")


def is_asked_for() -> bool:
    """Whether this process is to take corrupt blocks out of the prefix index."""
    return runtime.settings().on_violation == "evict"


# In the worker


def patch_worker_outputs(cls: type) -> None:
    """Patch ``Worker``, whose outputs go to the scheduler."""
    points = {"execute_model": ("scheduler_output",), "sample_tokens": ()}
    problem = runtime.unexpected_methods(cls, points)
    if problem is not None:
        runtime.not_covered("vllm", "eviction", problem)
        return
    part = runtime.FailOpen("vllm", "eviction")

    def around_output(call: Callable[..., Any], worker: Any, /, *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        attached = attached_to(worker.model_runner, AttachedRunner)
        if part.on and attached is not None and attached.condemned is not None:
            with part:
                _refuse_what_goes_nowhere(worker, attached)
                sent = _sent(output)
                blocks = attached.condemned.take() if sent is not None else []
                if blocks:
                    attach(sent, [block for _, block in blocks])
        return output

    runtime.patch_class("vllm", cls, dict.fromkeys(points, around_output))


def _refuse_what_goes_nowhere(worker: Any, attached: AttachedRunner) -> None:
    """Raise NotCovered in a process whose outputs the scheduler does not get, which switches this off."""
    layout = attached.canary.layout
    if layout.rank:
        raise NotCovered(f"what rank {layout.rank} of {layout.world_size} finds does not reach the scheduler")
    if worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise NotCovered("what other pipeline stages than the last find does not reach the scheduler")


def _sent(output: Any) -> Any | None:
    """The object that the scheduler will get; None if this call returns none, or one that is not only this step's."""
    for name in _WITHIN:
        output = getattr(output, name, output)
    # The engine keeps one output for all steps in which nothing ran.
    empty = getattr(sys.modules.get("vllm.v1.outputs"), "EMPTY_MODEL_RUNNER_OUTPUT", None)
    return None if output is empty or not getattr(output, "req_ids", None) else output


def attach(output: Any, blocks: Sequence[int]) -> None:
    """Send the numbers of corrupt blocks along with a ``ModelRunnerOutput``."""
    setattr(output, _ATTRIBUTE, {"form": _FORM, "blocks": list(blocks)})


def attached_blocks(output: Any) -> list[int]:
    """The blocks that came with a ``ModelRunnerOutput``; none if its worker does not send any."""
    sent = getattr(output, _ATTRIBUTE, None)
    if not isinstance(sent, dict) or sent.get("form") != _FORM:
        return []
    return list(sent["blocks"])


# In the scheduler's process


def patch_scheduler_updates(cls: type, affected_of: Callable[[Any], set[str] | None]) -> None:
    """Patch ``Scheduler``, which is told of every output.

    Args:
        cls: The class.
        affected_of: For a ``KVCacheManager``, the set of requests whose later blocks are not to be indexed; None if
            its pool is not followed.
    """
    problem = runtime.unexpected_methods(cls, {"update_from_output": ("scheduler_output", "model_runner_output")})
    if problem is not None:
        runtime.not_covered("vllm", "eviction", problem)
        return
    part = runtime.FailOpen("vllm", "eviction")

    def around_update(
        call: Callable[..., Any], scheduler: Any, /, scheduler_output: Any, output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        blocks = attached_blocks(output)
        if blocks and part.on:
            with part:
                manager = scheduler.kv_cache_manager
                evict(manager, blocks, affected_of(manager))
        return call(scheduler_output, output, *args, **kwargs)

    runtime.patch_class("vllm", cls, {"update_from_output": around_update})


def evict(manager: Any, corrupt: Iterable[int], affected: set[str] | None) -> None:
    """Take corrupt blocks out of the prefix index, and all that the requests which hold them have computed after them.

    The blocks themselves stay where they are: with the requests that hold them, or in the list of free ones.

    Args:
        manager: The ``KVCacheManager``.
        corrupt: Numbers of blocks.
        affected: Requests that hold a corrupt block are added.
    """
    pool = manager.block_pool
    counts = dict.fromkeys(("evicted", "held", "following"), 0)
    named = []
    held: dict[int, None] = {}
    for number in corrupt:
        block = pool.blocks[number]
        if block.is_null:
            continue  # every table that a window has passed over has it
        if block.ref_cnt:
            held[number] = None
        if block.block_hash is not None:
            pool.evict_blocks({number})
            counts["held" if block.ref_cnt else "evicted"] += 1
            named.append(number)
    if held:
        for request, following in _tables_from(manager, held):
            if affected is not None:
                affected.add(request)
            indexed = {block.block_id for block in following if block.block_hash is not None}
            pool.evict_blocks(indexed)
            counts["following"] += len(indexed)
    runtime.evicted("vllm", named, counts)


def _tables_from(manager: Any, blocks: dict[int, None]) -> Iterable[tuple[str, list[Any]]]:
    """Each request that holds one of these blocks, and its table from the first of them on."""
    for of_group in manager.coordinator.single_type_managers:
        for request, table in list(of_group.req_to_blocks.items()):
            for at, block in enumerate(table):
                if block.block_id in blocks:
                    yield request, table[at:]
                    break
