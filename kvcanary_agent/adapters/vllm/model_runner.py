"""Patch points of vLLM's V1 model runner, and what its steps mean to the canary.

Written against vLLM 0.32; the methods and their parameters are checked before anything is patched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.pool import NULL_BLOCK, NotCovered, Pool, describe_pool
from kvcanary_agent.canary.canary import Canary
from kvcanary_agent.canary.layout import LayoutError
from kvcanary_agent.canary.step import ForwardStep, GroupStep, KnownTokens

# What the arounds below rely on: each method's leading parameters after self.
_PATCH_POINTS = {
    "initialize_kv_cache": ("kv_cache_config", "is_profiling"),
    "_update_states": ("scheduler_output",),
    "_prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
    "_model_forward": ("input_ids", "positions"),
    "shutdown": (),
}


class AttachedRunner:
    """A model runner whose pool is watched.

    A step is *armed* by `_prepare_inputs`, which dummy, profiling and capture runs never reach, and is over when
    `_model_forward` returns.
    """

    def __init__(self, runner: Any, pool: Pool, canary: Canary) -> None:
        self.canary = canary
        self.part = runtime.FailOpen("vllm", "model runner step")
        self._pool = pool
        # Blocks of one id lie over the same bytes in every group, covered or not.
        self._block_sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
        self._rows = torch.arange(runner.max_num_reqs, device=runner.device)
        # Elsewhere the histories are on the host only; under asynchronous scheduling they hold placeholders, and a
        # prompt given as embeddings has no tokens.
        self._histories_are_known = (
            runner.device.type == "cpu" and not runner.use_async_scheduling and not runner.enable_prompt_embeds
        )
        self._armed_tokens: int | None = None

    def arm(self, tokens: int) -> None:
        """The inputs of a real step of so many tokens are prepared."""
        self._armed_tokens = tokens

    def disarm(self) -> int | None:
        """Take the armed step: its number of tokens, or None if none is armed."""
        tokens, self._armed_tokens = self._armed_tokens, None
        return tokens

    def hand_out_blocks(self, scheduler_output: Any) -> None:
        """Tell the canary which blocks the scheduler has given out as new, and which it has copied."""
        for request, group_id, blocks in fresh_blocks(scheduler_output, self._block_sizes):
            for index, covered in enumerate(self._pool.group_ids):
                owner = request if covered == group_id else None
                self.canary.allocated(blocks, group=index, request=owner)
        if scheduler_output.kv_cache_block_copies:
            sources, targets = zip(*scheduler_output.kv_cache_block_copies, strict=True)
            for index in range(len(self._pool.group_ids)):
                self.canary.copied(sources, targets, group=index)

    def describe_step(self, runner: Any, tokens: int, padded_tokens: int) -> ForwardStep:
        """The step whose inputs lie in the runner's buffers. Slices only: nothing is copied, nothing waits."""
        batch = runner.input_batch
        rows = batch.num_reqs
        groups = []
        for index in self._pool.tables:
            table = batch.block_table.block_tables[index]
            slots = table.slot_mapping.gpu
            groups.append(
                GroupStep(
                    block_table=table.block_table.gpu[:rows],
                    write_slots=slots[:tokens],
                    pad_slots=slots[tokens:padded_tokens] if padded_tokens > tokens else None,
                )
            )
        known = None
        if self._histories_are_known:
            known = KnownTokens(
                tokens=batch.token_ids_cpu_tensor,
                rows=self._rows[:rows],
                lengths=batch.num_tokens_no_spec_cpu_tensor[:rows],
            )
        requests = tuple(batch.req_ids)
        namespaces = None
        if runner.lora_config is not None:
            namespaces = [_lora_namespace(runner.requests[request].lora_request) for request in requests]
        return ForwardStep(
            requests=requests,
            prefix_lens=runner.num_computed_tokens[:rows],
            query_offsets=runner.query_start_loc.gpu[: rows + 1],
            token_ids=runner.input_ids.gpu[:tokens],
            positions=runner.positions[:tokens],
            groups=groups,
            known_tokens=known,
            namespaces=namespaces,
        )


# Weak, so that an engine that is dropped in-process takes its records with it.
_attached: WeakKeyDictionary[Any, AttachedRunner] = WeakKeyDictionary()
runtime.on_shut_down(_attached.clear)


def patch_model_runner(cls: type) -> None:
    """Patch ``GPUModelRunner`` of the V1 module; say why not if it is not the class that this adapter knows."""
    problem = _unexpected(cls)
    if problem is not None:
        runtime.not_covered("vllm", "V1 model runner", problem)
        if hasattr(cls, "initialize_kv_cache"):
            runtime.patch_class("vllm", cls, {"initialize_kv_cache": _around_initialize_unknown})
        return
    runtime.patch_class(
        "vllm",
        cls,
        {
            "initialize_kv_cache": _around_initialize_kv_cache,
            "_update_states": _around_update_states,
            "_prepare_inputs": _around_prepare_inputs,
            "_model_forward": _around_model_forward,
            "shutdown": _around_shutdown,
        },
    )


def pool_contents_lost(runner: Any) -> None:
    """Forget what the records say about the pool of ``runner``: its memory was given away and mapped anew."""
    attached = _attached.get(runner)
    if attached is not None and attached.part.on:
        with attached.part:
            attached.canary.reset()


def export_coverage() -> None:
    """Start to export what is known in this process; without a canary nothing else does.

    To be called when a pool is there: an earlier start would be in processes that never have one, before their forks.
    """
    with runtime.FailOpen("vllm", "telemetry"):
        runtime.telemetry().exporting()


def _unexpected(cls: type) -> str | None:
    """What is missing or different in ``cls``, or None."""
    for name, wanted in _PATCH_POINTS.items():
        method = getattr(cls, name, None)
        if method is None:
            return f"{cls.__qualname__} has no method {name}"
        found = tuple(inspect.signature(method).parameters)[1:]
        if found[: len(wanted)] != wanted:
            return f"{cls.__qualname__}.{name} takes ({', '.join(found)}), wanted ({', '.join(wanted)}, ...)"
    return None


def _around_initialize_kv_cache(
    call: Callable[..., Any],
    runner: Any,
    /,
    kv_cache_config: Any,
    is_profiling: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _detach(runner)
    result = call(kv_cache_config, is_profiling, *args, **kwargs)
    # A profiling pool is thrown away before the first request.
    if not is_profiling:
        with runtime.FailOpen("vllm", "description of the KV pool"):
            _attach(runner)
        if runner not in _attached:
            export_coverage()
    return result


def _around_initialize_unknown(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    export_coverage()
    return result


def _around_update_states(
    call: Callable[..., Any], runner: Any, /, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    result = call(scheduler_output, *args, **kwargs)
    attached = _attached.get(runner)
    if attached is not None and attached.part.on:
        with attached.part:
            if attached.disarm() is not None:
                runtime.not_covered("vllm", "V1 model runner", "its forward does not go through _model_forward")
            attached.hand_out_blocks(scheduler_output)
    return result


def _around_prepare_inputs(
    call: Callable[..., Any], runner: Any, /, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    result = call(scheduler_output, *args, **kwargs)
    attached = _attached.get(runner)
    if attached is not None and attached.part.on:
        with attached.part:
            attached.arm(scheduler_output.total_num_scheduled_tokens)
    return result


def _around_model_forward(
    call: Callable[..., Any], runner: Any, /, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any
) -> Any:
    attached = _attached.get(runner)
    tokens = attached.disarm() if attached is not None else None
    if attached is None or tokens is None or not attached.part.on:
        return call(input_ids, positions, *args, **kwargs)
    return runtime.watched_forward(
        attached.part,
        attached.canary,
        lambda: attached.describe_step(runner, tokens, positions.shape[-1]),
        lambda: call(input_ids, positions, *args, **kwargs),
    )


def _around_shutdown(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    # Before the engine frees its pool: the records' views would keep it alive.
    _detach(runner)
    return call(*args, **kwargs)


def _attach(runner: Any) -> None:
    try:
        pool = describe_pool(runner)
    except (NotCovered, LayoutError) as reason:
        runtime.not_covered("vllm", "KV pool", str(reason))
        return
    canary = runtime.open_canary(pool.layout)
    if canary is not None:
        _attached[runner] = AttachedRunner(runner, pool, canary)


def _detach(runner: Any) -> None:
    attached = _attached.pop(runner, None)
    if attached is not None:
        with attached.part:
            runtime.close_canary(attached.canary)


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


def _lora_namespace(lora: Any) -> str | None:
    """The same as vLLM's prefix cache distinguishes adapters by."""
    return None if lora is None else f"lora:{lora.lora_name}:{lora.lora_path}"
