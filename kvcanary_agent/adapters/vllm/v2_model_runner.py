"""Patch points of vLLM's V2 model runner, and what its steps mean to the canary.

Written against vLLM 0.32; the methods and their parameters are checked before anything is patched, and the version
before a pool is watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.attached_runner import (
    AttachedRunner,
    around_shutdown,
    attached_to,
    initialize_kv_cache_watched,
    patch_runner,
)
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
from kvcanary_agent.adapters.vllm.versions import V2, refuse_unknown_version
from kvcanary_agent.canary.step import ForwardStep, GroupStep, KnownTokens

# What the arounds below rely on: each method's leading parameters after self.
PATCH_POINTS = {
    "initialize_kv_cache": ("kv_cache_config",),
    "execute_model": ("scheduler_output", "intermediate_tensors", "dummy_run"),
    "prepare_attn": ("input_batch",),
    "shutdown": (),
}


class AttachedV2Runner(AttachedRunner):
    """A V2 model runner whose pool is watched.

    A step begins at the end of `prepare_attn`, which dummy, profiling and capture runs never reach, and is over when
    `execute_model` returns.
    """

    def describe_step(self, runner: Any, batch: Any, block_tables: Any, slot_mappings: Any) -> ForwardStep:
        """The step of an ``InputBatch``. Slices and gathers on the device: nothing is copied back, nothing waits.

        Args:
            runner: The model runner.
            batch: Its input batch.
            block_tables: For each of vLLM's groups, ``[padded rows, blocks]`` int32.
            slot_mappings: ``[groups, padded tokens]`` int64, -1 for padding.
        """
        rows, tokens, padded_tokens = batch.num_reqs, batch.num_tokens, batch.num_tokens_after_padding
        states = runner.req_states
        known = None
        # Other ranks of a pipeline learn of sampled tokens later than of how many there are.
        if runner.is_last_pp_rank:
            known = KnownTokens(
                tokens=states.all_token_ids.gpu,
                rows=batch.idx_mapping,
                lengths=states.total_len.gpu[batch.idx_mapping],
            )
        namespaces = None
        if runner.lora_config is not None or self.allocator.salts:
            adapters = runner.lora_state.lora_requests
            namespaces = [self.namespace_of(request, adapters.get(request)) for request in batch.req_ids]
        return ForwardStep(
            requests=tuple(batch.req_ids),
            prefix_lens=states.num_computed_tokens.gpu[batch.idx_mapping],
            query_offsets=batch.query_start_loc[: rows + 1],
            token_ids=batch.input_ids[:tokens],
            positions=batch.positions[:tokens],
            groups=[
                GroupStep(
                    block_table=block_tables[index][:rows],
                    write_slots=slot_mappings[index, :tokens],
                    pad_slots=slot_mappings[index, tokens:padded_tokens] if padded_tokens > tokens else None,
                )
                for index in self.pool.tables
            ],
            known_tokens=known,
            namespaces=namespaces,
        )


def patch_v2_model_runner(cls: type) -> None:
    """Patch ``GPUModelRunner`` of the V2 module; say why not if it is not the class that this adapter knows.

    Servers that run V1 import the module, too; nothing is said or done there beyond the patch.
    """
    patch_runner(
        cls,
        "V2 model runner",
        PATCH_POINTS,
        {
            "initialize_kv_cache": _around_initialize_kv_cache,
            "execute_model": _around_execute_model,
            "prepare_attn": _around_prepare_attn,
            "shutdown": around_shutdown,
        },
    )


def _around_initialize_kv_cache(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    return initialize_kv_cache_watched(call, runner, args, kwargs, _describe, AttachedV2Runner)


def _describe(runner: Any) -> Pool:
    refuse_unknown_version(engine_version(), "V2 model runner", V2)
    config = runner.vllm_config
    parallel = config.parallel_config
    context_parallel_ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    # Until 0.31, tables are in the blocks of the attention kernel.
    kernel_blocks = max(getattr(runner.block_tables, "blocks_per_kv_block", None) or [1])
    refuse_what_spreads_blocks(context_parallel_ranks, kernel_blocks)
    if runner.model_state.num_new_sampled_tokens_per_step != 1:
        raise NotCovered("a model that samples several tokens at once writes positions that are not final")
    return describe_pool(
        PoolSource(
            kv_cache_config=runner.kv_cache_config,
            layers=runner.compilation_config.static_forward_context,
            dtype=runner.dtype,
            tables=[
                index if has_block_table(group) else None
                for index, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            ],
            draft_layers=_draft_layers(runner),
        )
    )


def _draft_layers(runner: Any) -> frozenset[str]:
    # Only the last rank of a pipeline has a speculator, and the draft model's layers.
    if runner.speculator is None or speculates_without_layers(runner.vllm_config):
        return frozenset()
    names = getattr(runner.speculator, "draft_attn_layer_names", None)
    if names is None:
        method = runner.vllm_config.speculative_config.method
        raise NotCovered(f"cannot tell the layers of the {method!r} drafter from those of the model")
    return frozenset(names)


def _around_execute_model(
    call: Callable[..., Any],
    runner: Any,
    /,
    scheduler_output: Any,
    intermediate_tensors: Any = None,
    dummy_run: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    attached = None if dummy_run else attached_to(runner, AttachedV2Runner)
    if attached is None:
        return call(scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs)
    with attached.part:
        attached.hand_out_blocks(scheduler_output)
    return runtime.recorded_forward(
        attached.part,
        attached.canary,
        lambda: call(scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs),
    )


def _around_prepare_attn(call: Callable[..., Any], runner: Any, /, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
    result = call(input_batch, *args, **kwargs)
    attached = attached_to(runner, AttachedV2Runner)
    if attached is not None:
        with attached.part:
            # While an engine is rebuilt around its ranks, warm-up requests share the null block.
            if not getattr(runner.block_tables, "redirect_writes_to_null_block", False):
                block_tables, slot_mappings = result
                attached.canary.before_forward(attached.describe_step(runner, input_batch, block_tables, slot_mappings))
    return result
