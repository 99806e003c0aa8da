"""A model runner whose pool is watched: what vLLM's two generations of runners have in common.

A runner is *attached* when its pool has been allocated and described, and *detached* before the pool is freed. In
between, each generation's own subclass of `AttachedRunner` describes the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.connector import WatchedConnector, unwatch_connector, watch_connector
from kvcanary_agent.adapters.vllm.follower import AllocatorFollower
from kvcanary_agent.adapters.vllm.pool import NULL_BLOCK, NotCovered, Pool
from kvcanary_agent.adapters.vllm.weights import watch_weights
from kvcanary_agent.canary.canary import Canary
from kvcanary_agent.canary.layout import LayoutError


class AttachedRunner:
    """A model runner whose pool is watched.

    Attributes:
        canary: The pool's.
        part: What switches itself off if the agent fails in one of the runner's steps.
        pool: The pool, as `pool.describe_pool` has found it.
        allocator: What the scheduler's process tells.
        condemned: Blocks that are to leave the prefix index; None if none ever is.
        connector: What moves K/V from and to elsewhere; None if nothing does.
    """

    def __init__(self, runner: Any, pool: Pool, canary: Canary) -> None:
        self.canary = canary
        self.part = runtime.FailOpen("vllm", "model runner step")
        self.condemned = runtime.condemned_blocks(canary)
        self.pool = pool
        self.allocator = AllocatorFollower(canary, pool.group_ids)
        self.connector: WatchedConnector | None = watch_connector(
            runner.vllm_config, canary, pool.group_ids, self.namespace_of
        )
        # Blocks of one id lie over the same bytes in every group, covered or not.
        self._block_sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]

    def hand_out_blocks(self, scheduler_output: Any) -> None:
        """Tell the canary what the allocator has done, at least which blocks are new, and which were copied."""
        if not self.allocator.apply(scheduler_output):
            for request, group_id, blocks in fresh_blocks(scheduler_output, self._block_sizes):
                for index, covered in enumerate(self.pool.group_ids):
                    owner = request if covered == group_id else None
                    self.canary.allocated(blocks, group=index, request=owner)
        if self.allocator.step is not None:
            for new in scheduler_output.scheduled_new_reqs:
                self.canary.traced(new.req_id, self.allocator.step.traces.get(new.req_id, {}))
        if self.connector is not None:
            self.connector.scheduled(scheduler_output, self.allocator.step)
        copies = getattr(scheduler_output, "kv_cache_block_copies", None)
        if copies:
            sources, targets = zip(*copies, strict=True)
            for index in range(len(self.pool.group_ids)):
                self.canary.copied(sources, targets, group=index)

    def namespace_of(self, request: str, lora: Any) -> str | None:
        """What, beside its tokens, the K/V of a request depends on, as vLLM's prefix cache distinguishes requests.

        Multimodal inputs and prompts given as embeddings are not in it: what is before them may be shared.

        Args:
            request: Its id.
            lora: Its ``LoRARequest``, or None.
        """
        salt = self.allocator.salts.get(request)
        named = () if lora is None else ("lora", lora.lora_name, lora.lora_path)
        salted = () if salt is None else ("salt", salt)
        return ":".join((*named, *salted)) or None


Attached = TypeVar("Attached", bound=AttachedRunner)

# Weak, so that an engine that is dropped in-process takes its records with it.
_attached: WeakKeyDictionary[Any, AttachedRunner] = WeakKeyDictionary()
runtime.on_shut_down(_attached.clear)


def attached_to(runner: Any, kind: type[Attached]) -> Attached | None:
    """What is attached to ``runner``, if it is of this kind and its part is still on."""
    attached = _attached.get(runner)
    return attached if isinstance(attached, kind) and attached.part.on else None


def initialize_kv_cache_watched(
    call: Callable[..., Any],
    runner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    describe: Callable[[Any], Pool],
    attach: Callable[[Any, Pool, Canary], AttachedRunner],
) -> Any:
    """Have ``runner`` allocate its pool, and attach to it.

    Args:
        call, args, kwargs: The engine's ``initialize_kv_cache`` and its arguments; its result is returned.
        runner: The model runner.
        describe: Describes the pool of the runner; raises `NotCovered` or `LayoutError`.
        attach: The subclass of `AttachedRunner` for this generation of runners.
    """
    detach(runner)
    result = call(*args, **kwargs)
    # A pool to measure memory with is thrown away before the first request. Its flag is the second parameter where
    # there is one.
    if kwargs.get("is_profiling", args[1] if len(args) > 1 else False):
        return result
    with runtime.FailOpen("vllm", "description of the KV pool"):
        try:
            pool = describe(runner)
        except (NotCovered, LayoutError) as reason:
            runtime.not_covered("vllm", "KV pool", str(reason))
        else:
            canary = runtime.open_canary(pool.layout)
            if canary is not None:
                _attached[runner] = attach(runner, pool, canary)
                watch_weights(runner.get_model(), canary)
    if runner not in _attached:
        export_coverage()
    return result


def detach(runner: Any) -> None:
    """Let go of the pool of ``runner``: the records' views would keep it alive."""
    attached = _attached.pop(runner, None)
    if attached is not None:
        unwatch_connector(attached.connector)
        with attached.part:
            runtime.close_canary(attached.canary)


def around_shutdown(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Around a runner's ``shutdown``, which frees its pool."""
    detach(runner)
    return call(*args, **kwargs)


def pool_contents_lost(runner: Any) -> None:
    """Forget what the records say about the pool of ``runner``: its memory was given away and mapped anew."""
    attached = attached_to(runner, AttachedRunner)
    if attached is not None:
        with attached.part:
            attached.canary.reset()


def weights_changed(runner: Any) -> None:
    """The model of ``runner`` has other weights from now on."""
    attached = attached_to(runner, AttachedRunner)
    if attached is not None:
        with attached.part:
            attached.canary.weights_changed()


def patch_runner(
    cls: type, generation: str, expected: Mapping[str, tuple[str, ...]], arounds: Mapping[str, Callable[..., Any]]
) -> None:
    """Patch a class of model runners; say why not if it is not the class that this adapter knows.

    Args:
        cls: The class.
        generation: What the class is called in reports.
        expected: Method -> its leading parameters after ``self``, which the arounds rely on.
        arounds: Method -> what runs instead.
    """
    problem = runtime.unexpected_methods(cls, expected)
    if problem is None:
        runtime.patch_class("vllm", cls, arounds)
        return

    def around_initialize_unknown(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
        runtime.not_covered("vllm", generation, problem)
        result = call(*args, **kwargs)
        export_coverage()
        return result

    # Said when the engine makes use of the class: the module may be imported where the other generation runs.
    if hasattr(cls, "initialize_kv_cache"):
        runtime.patch_class("vllm", cls, {"initialize_kv_cache": around_initialize_unknown})
    else:
        runtime.not_covered("vllm", generation, problem)


def export_coverage() -> None:
    """Start to export what is known in this process; without a canary nothing else does.

    To be called when a pool is there: an earlier start would be in processes that never have one, before their forks.
    """
    with runtime.FailOpen("vllm", "telemetry"):
        runtime.telemetry().exporting()


def fresh_blocks(scheduler_output: Any, block_sizes: Sequence[int]) -> Iterator[tuple[str, int, list[int]]]:
    """Request, group id and blocks of everything that was handed out as new for this step.

    A request that starts or resumes brings its whole list of blocks; those that hold its computed prefix were found in
    the prefix cache and keep their records, as does one that the prefix fills in part (it was copied, or is the
    request's own).
    """
    given: list[tuple[str, Any, int]] = [
        (new.req_id, new.block_ids, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs
    ]
    cached = scheduler_output.scheduled_cached_reqs
    for request, block_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if block_ids is not None:
            given.append((request, block_ids, computed if request in cached.resumed_req_ids else 0))
    for request, block_ids, computed in given:
        for group_id, (blocks, block_size) in enumerate(zip(block_ids, block_sizes, strict=False)):
            found = -(-computed // block_size)
            fresh = [block for block in blocks[found:] if block != NULL_BLOCK]
            if fresh:
                yield request, group_id, fresh
