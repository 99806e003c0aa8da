"""Patch points of vLLM's V1 model runner, and what its steps mean to the canary.

Written against vLLM 0.32; the methods and their parameters are checked before anything is patched, and the version
before a pool is watched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.attached_runner import (
    AttachedRunner,
    around_shutdown,
    attached_to,
    initialize_kv_cache_watched,
    patch_runner,
)
from kvcanary_agent.adapters.vllm.histories import Histories
from kvcanary_agent.adapters.vllm.pool import (
    NotCovered,
    Pool,
    PoolSource,
    describe_pool,
    engine_version,
    has_block_table,
    refuse_what_spreads_blocks,
    speculates_without_layers,
)
from kvcanary_agent.adapters.vllm.versions import V1, refuse_unknown_version
from kvcanary_agent.canary.canary import Canary
from kvcanary_agent.canary.step import ForwardStep, GroupStep, KnownTokens

# The histories may take 0.2 % of the pool's bytes.
_POOL_BYTES_PER_HISTORY_BYTE = 500

# What the arounds below rely on: each method's leading parameters after self.
PATCH_POINTS = {
    "initialize_kv_cache": ("kv_cache_config",),
    "_update_states": ("scheduler_output",),
    "_prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
    "_model_forward": ("input_ids", "positions"),
    "shutdown": (),
}


class AttachedV1Runner(AttachedRunner):
    """A V1 model runner whose pool is watched.

    A step is *armed* by `_prepare_inputs`, which dummy, profiling and capture runs never reach, and is over when
    `_model_forward` returns.
    """

    def __init__(self, runner: Any, pool: Pool, canary: Canary) -> None:
        super().__init__(runner, pool, canary)
        self._rows = torch.arange(runner.max_num_reqs, device=runner.device)
        # The runner's own are on the host, and hold placeholders under asynchronous scheduling.
        self._runner_has_histories = runner.device.type == "cpu" and not runner.use_async_scheduling
        # A prompt given as embeddings has no tokens.
        self._has_tokens = not runner.enable_prompt_embeds
        self._histories: Histories | None = None
        if self._has_tokens and not self._runner_has_histories:
            self._histories = Histories(runner.device, pool.layout.num_bytes // _POOL_BYTES_PER_HISTORY_BYTE)
        self._armed_tokens: int | None = None
        self._step: ForwardStep | None = None

    def arm(self, tokens: int) -> None:
        """The inputs of a real step of so many tokens are prepared."""
        self._armed_tokens = tokens

    def disarm(self) -> int | None:
        """Take the armed step: its number of tokens, or None if none is armed."""
        tokens, self._armed_tokens = self._armed_tokens, None
        return tokens

    def describe_step(self, runner: Any, tokens: int, padded_tokens: int) -> ForwardStep:
        """The step whose inputs lie in the runner's buffers. Slices only: nothing is copied, nothing waits."""
        batch = runner.input_batch
        rows = batch.num_reqs
        groups = []
        for index in self.pool.tables:
            table = batch.block_table.block_tables[index]
            slots = table.slot_mapping.gpu
            groups.append(
                GroupStep(
                    block_table=table.block_table.gpu[:rows],
                    write_slots=slots[:tokens],
                    pad_slots=slots[tokens:padded_tokens] if padded_tokens > tokens else None,
                )
            )
        requests = tuple(batch.req_ids)
        prefix_lens = runner.num_computed_tokens[:rows]
        known = None
        if self._histories is not None:
            known = self._histories.known_tokens(requests, prefix_lens)
        elif self._has_tokens:
            known = KnownTokens(
                tokens=batch.token_ids_cpu_tensor,
                rows=self._rows[:rows],
                lengths=batch.num_tokens_no_spec_cpu_tensor[:rows],
            )
        namespaces = None
        if runner.lora_config is not None or self.allocator.salts:
            namespaces = [self.namespace_of(request, runner.requests[request].lora_request) for request in requests]
        self._step = ForwardStep(
            requests=requests,
            prefix_lens=prefix_lens,
            query_offsets=runner.query_start_loc.gpu[: rows + 1],
            token_ids=runner.input_ids.gpu[:tokens],
            positions=runner.positions[:tokens],
            groups=groups,
            known_tokens=known,
            namespaces=namespaces,
        )
        return self._step

    def follow_requests(self, scheduler_output: Any) -> None:
        """Keep the histories of the requests that come and go."""
        if self._histories is not None:
            self._histories.finish(scheduler_output.finished_req_ids)
            for new in scheduler_output.scheduled_new_reqs:
                self._histories.start(new.req_id, new.prompt_token_ids or ())

    def remember_step(self, runner: Any) -> None:
        """The step that was described last has run."""
        step, self._step = self._step, None
        if self._histories is not None and step is not None:
            computed = runner.input_batch.num_computed_tokens_cpu[: len(step.requests)]
            self._histories.written(step, int(computed.max()) + step.token_ids.shape[0])


def patch_model_runner(cls: type) -> None:
    """Patch ``GPUModelRunner`` of the V1 module; say why not if it is not the class that this adapter knows."""
    patch_runner(
        cls,
        "V1 model runner",
        PATCH_POINTS,
        {
            "initialize_kv_cache": _around_initialize_kv_cache,
            "_update_states": _around_update_states,
            "_prepare_inputs": _around_prepare_inputs,
            "_model_forward": _around_model_forward,
            "shutdown": around_shutdown,
        },
    )


def _around_initialize_kv_cache(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    return initialize_kv_cache_watched(call, runner, args, kwargs, _describe, AttachedV1Runner)


def _describe(runner: Any) -> Pool:
    refuse_unknown_version(engine_version(), "V1 model runner", V1)
    tables = runner.input_batch.block_table.block_tables
    context_parallel_ranks = max((table.dcp_world_size * table.pcp_world_size for table in tables), default=1)
    # Until 0.31, tables are in the blocks of the attention kernel.
    kernel_blocks = max((getattr(table, "blocks_per_kv_block", 1) for table in tables), default=1)
    refuse_what_spreads_blocks(context_parallel_ranks, kernel_blocks)
    index = itertools.count()
    return describe_pool(
        PoolSource(
            kv_cache_config=runner.kv_cache_config,
            layers=runner.compilation_config.static_forward_context,
            dtype=runner.dtype,
            tables=[
                next(index) if has_block_table(group) else None for group in runner.kv_cache_config.kv_cache_groups
            ],
            draft_layers=_draft_layers(runner),
        )
    )


def _draft_layers(runner: Any) -> frozenset[str]:
    if speculates_without_layers(runner.vllm_config):
        return frozenset()
    names = getattr(runner.drafter, "_draft_attn_layer_names", None)
    if names is None:
        method = runner.vllm_config.speculative_config.method
        raise NotCovered(f"cannot tell the layers of the {method!r} drafter from those of the model")
    return frozenset(names)


def _around_update_states(
    call: Callable[..., Any], runner: Any, /, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    result = call(scheduler_output, *args, **kwargs)
    attached = attached_to(runner, AttachedV1Runner)
    if attached is not None:
        with attached.part:
            if attached.disarm() is not None:
                runtime.not_covered("vllm", "V1 model runner", "its forward does not go through _model_forward")
            attached.hand_out_blocks(scheduler_output)
            attached.follow_requests(scheduler_output)
    return result


def _around_prepare_inputs(
    call: Callable[..., Any], runner: Any, /, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    result = call(scheduler_output, *args, **kwargs)
    attached = attached_to(runner, AttachedV1Runner)
    if attached is not None:
        with attached.part:
            attached.arm(scheduler_output.total_num_scheduled_tokens)
    return result


def _around_model_forward(
    call: Callable[..., Any], runner: Any, /, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any
) -> Any:
    attached = attached_to(runner, AttachedV1Runner)
    tokens = attached.disarm() if attached is not None else None
    if attached is None or tokens is None:
        return call(input_ids, positions, *args, **kwargs)
    result = runtime.watched_forward(
        attached.part,
        attached.canary,
        lambda: attached.describe_step(runner, tokens, positions.shape[-1]),
        lambda: call(input_ids, positions, *args, **kwargs),
    )
    if attached.part.on:
        with attached.part:
            attached.remember_step(runner)
    return result
