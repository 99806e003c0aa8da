"""Patch points of SGLang's model runner, around which the steps of a pool are checked.

Written against SGLang 0.5.23; the methods and their parameters are checked before anything is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.events import Events
from kvcanary_agent.adapters.histories import Histories
from kvcanary_agent.adapters.sglang.allocator import follow
from kvcanary_agent.adapters.sglang.containment import Containment, containment_of, patch_scheduler_turns
from kvcanary_agent.adapters.sglang.host_tier import Arrivals, follow_copies, why_not_followed
from kvcanary_agent.adapters.sglang.pool import NotCovered, Pool, describe_pool
from kvcanary_agent.adapters.sglang.prefix_cache import can_be_walked, walk
from kvcanary_agent.adapters.sglang.steps import describe_step, is_step
from kvcanary_agent.canary.canary import Canary
from kvcanary_agent.canary.layout import LayoutError
from kvcanary_agent.canary.step import ForwardStep

# What the arounds below rely on: each method's leading parameters after self.
_PATCH_POINTS: dict[str, tuple[str, ...]] = {
    "_init_post_memory_pool_components": (),
    "forward": ("forward_batch",),
}

_WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


# The histories may take 0.2 % of the pool's bytes.
_POOL_BYTES_PER_HISTORY_BYTE = 500


class WatchedRunner:
    """A model runner whose pool is watched."""

    def __init__(self, pool: Pool, canary: Canary, allocators: Sequence[Any], containment: Containment | None) -> None:
        self.canary = canary
        self.part = runtime.FailOpen("sglang", f"pool {canary.layout.pool}")
        self.containment = containment
        self._pool = pool
        self.events = Events(self.part)
        self.arrivals = Arrivals()
        follow(allocators, self.events)
        with torch.inference_mode(False):
            self._histories = Histories(
                canary.layout.device,
                canary.layout.num_bytes // _POOL_BYTES_PER_HISTORY_BYTE,
                lambda request: (request.origin_input_ids, request.output_ids),
            )
        self._audited = 0
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def remember(self, requests: Sequence[Any]) -> None:
        """A batch is being made of these requests of the scheduler."""
        for request in requests:
            self._requests[request.rid] = request

    def weights_changed(self) -> None:
        """The steps from the next one on use other weights."""
        self.events.add_once("weights", lambda canary: canary.weights_changed())

    def audit(self, tree_cache: Any) -> None:
        """Check all that the prefix cache holds, once after each busy time."""
        if self._audited == self.canary.step:
            return
        self._audited = self.canary.step
        if can_be_walked(tree_cache):
            self.events.apply(self.canary)
            self.canary.walked_index(*walk(tree_cache, self.canary.layout.device))

    def is_step(self, batch: Any) -> bool:
        """Whether a ``ForwardBatch`` is one that is to be checked."""
        with self.part:
            return is_step(batch)
        return False

    def describe_step(self, runner: Any, batch: Any) -> ForwardStep:
        """What happened to the pool since the last step, and the step itself."""
        self.arrivals.forget()
        self.events.apply(self.canary)
        requests = [self._requests.get(request) for request in batch.rids]
        if None in requests:
            raise NotCovered("a batch of requests that the scheduler did not make")
        with torch.inference_mode(False):
            return describe_step(runner, self._pool, batch, requests, self._histories)


# Weak, so that an engine that is dropped in-process takes its records with it.
_watched: WeakKeyDictionary[Any, WatchedRunner] = WeakKeyDictionary()
runtime.on_shut_down(_watched.clear)
_waiting_for_memory: WeakSet[Any] = WeakSet()
runtime.on_shut_down(_waiting_for_memory.clear)


def _watched_of(runner: object) -> WatchedRunner | None:
    """The watch of a model runner; None for what the engine has in the place of one."""
    try:
        return _watched.get(runner)
    except TypeError:
        return None


def patch_model_runner(cls: type) -> None:
    """Patch ``ModelRunner``; say why not if it is not the class that this adapter knows."""
    problem = runtime.unexpected_methods(cls, _PATCH_POINTS)
    if problem is not None:
        runtime.not_covered("sglang", "model runner", problem)
        return
    runtime.patch_class(
        "sglang",
        cls,
        {
            "_init_post_memory_pool_components": _around_init_pool,
            "forward": _around_forward,
        },
    )


def patch_weight_updater(cls: type) -> None:
    """Patch ``WeightUpdater``, through which a running model is given other weights."""
    methods = [name for name in _WEIGHT_UPDATES if hasattr(cls, name)]
    if not methods:
        runtime.not_covered("sglang", "weight updates", f"{cls.__qualname__} has none of {', '.join(_WEIGHT_UPDATES)}")
        return
    runtime.patch_class("sglang", cls, dict.fromkeys(methods, _around_weight_update))


def patch_scheduler(cls: type) -> None:
    """Patch ``Scheduler``, which says when there is nothing to do."""
    if hasattr(cls, "on_idle"):
        runtime.patch_class("sglang", cls, {"on_idle": _around_on_idle})
    if runtime.settings().on_violation == "evict":
        patch_scheduler_turns(cls, _containment_of)


def _containment_of(scheduler: Any) -> Containment | None:
    watched = _watched_of(_runner_of(scheduler))
    return None if watched is None else watched.containment


def _runner_of(scheduler: Any) -> object:
    return getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)


def patch_forward_batch(cls: type) -> None:
    """Patch ``ForwardBatch``, whose making sees the scheduler's requests."""
    runtime.patch_class("sglang", cls, {"init_new": _around_init_new})


def _around_init_pool(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    if getattr(getattr(runner, "token_to_kv_pool", None), "post_capture_active", False):
        # Its memory is mapped, and its size settled, only when the graphs are captured.
        _waiting_for_memory.add(runner)
        return result
    _try_to_attach(runner)
    return result


def _try_to_attach(runner: Any) -> None:
    with runtime.FailOpen("sglang", "description of the KV pool"):
        _attach(runner)
    if runner not in _watched:
        with runtime.FailOpen("sglang", "telemetry"):
            runtime.telemetry().exporting()


def _around_init_new(
    call: Callable[..., Any], cls: type, /, batch: Any, model_runner: Any, *args: Any, **kwargs: Any
) -> Any:
    made = call(batch, model_runner, *args, **kwargs)
    watched = _watched_of(model_runner)
    if watched is not None and watched.part.on:
        with watched.part:
            watched.remember(batch.reqs)
    return made


def _around_on_idle(call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
    watched = _watched_of(_runner_of(scheduler))
    if watched is not None and watched.part.on:
        with watched.part:
            watched.audit(scheduler.tree_cache)
    return call(*args, **kwargs)


def _around_weight_update(call: Callable[..., Any], updater: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    with runtime.FailOpen("sglang", "weight update"):
        watched = _watched_of(updater.get_model_runner())
        # Even one that failed may have replaced some.
        if watched is not None:
            watched.weights_changed()
    return result


def _around_forward(call: Callable[..., Any], runner: Any, /, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    if runner in _waiting_for_memory:
        _waiting_for_memory.discard(runner)
        _try_to_attach(runner)
    watched = _watched.get(runner)
    if watched is None or not watched.part.on or not watched.is_step(forward_batch):
        return call(forward_batch, *args, **kwargs)

    def forward() -> Any:
        result = call(forward_batch, *args, **kwargs)
        if watched.part.on:
            with watched.part:
                watched.arrivals.completed(watched.canary)
        return result

    return runtime.watched_forward(
        watched.part, watched.canary, lambda: watched.describe_step(runner, forward_batch), forward
    )


def _attach(runner: Any) -> None:
    if runner.is_draft_worker:
        runtime.not_covered("sglang", "KV pool of the draft model", "it is written outside the model's step")
        return
    try:
        _refuse_what_is_not_known(runner)
        pool = describe_pool(runner)
        copied = bool(getattr(_arguments_of(runner), "enable_hierarchical_cache", False))
        reason = why_not_followed(runner.token_to_kv_pool, len(pool.layout.groups)) if copied else None
        if reason is not None:
            raise NotCovered(f"enable_hierarchical_cache=True: {reason}")
    except (NotCovered, LayoutError) as error:
        runtime.not_covered("sglang", "KV pool", str(error))
        return
    canary = runtime.open_canary(pool.layout)
    if canary is not None:
        watched = WatchedRunner(pool, canary, pool.allocators, containment_of(runner, canary))
        _watched[runner] = watched
        if copied:
            follow_copies(runner.token_to_kv_pool, watched.events, watched.arrivals)


def _arguments_of(runner: Any) -> Any:
    """The server's arguments as the engine has resolved them: it leaves what it was given as it is."""
    resolved = getattr(sys.modules.get("sglang.srt.arg_groups.overrides"), "resolved_view", None)
    return runner.server_args if resolved is None else resolved(runner.server_args)


def _refuse_what_is_not_known(runner: Any) -> None:
    """Raise NotCovered for ways to serve in which slots are written or moved unseen."""
    arguments = _arguments_of(runner)
    for name, harmless, reason in _REFUSED:
        found = getattr(arguments, name, None)
        if found is not None and found not in harmless:
            raise NotCovered(f"{name}={found}: {reason}")
    drafts = getattr(arguments, "speculative_eagle_topk", None)
    if getattr(arguments, "speculative_algorithm", None) not in (None, "NONE") and drafts != 1:
        reason = "a tree of drafts is written to slots that are not their positions', and moved"
        raise NotCovered(f"speculative_eagle_topk={drafts}: {reason}")
    if runner.model_config.is_encoder_decoder:
        raise NotCovered("an encoder's keys and values are in the same pool, without positions")


_REFUSED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    (
        "speculative_algorithm",
        ("NONE", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"),
        "drafts are written outside the steps that this adapter knows",
    ),
    (
        "speculative_ngram_external_sam_budget",
        (0,),
        "a tree of drafts is written to slots that are not their positions'",
    ),
    ("disaggregation_mode", ("null",), "keys and values arrive from another server"),
    ("enable_hisparse", (False,), "keys and values come back from host memory"),
    ("enable_lmcache", (False,), "keys and values come from another cache"),
    ("enable_flexkv", (False,), "keys and values come from another cache"),
    ("enable_unified_cache_external_linker", (False,), "keys and values come from another cache"),
    ("dllm_algorithm", (), "a diffusion model rewrites its tokens in place"),
    ("enable_pdmux", (False,), "a prefill is split into several forwards"),
    ("dcp_size", (1,), "the positions of a request are spread over several ranks"),
    ("enable_prefill_cp", (False,), "the positions of a request are spread over several ranks"),
    ("enable_kv_cache_sharding", (False,), "the positions of a request are spread over several ranks"),
    ("enable_dsa_cache_layer_split", (False,), "the layers of a request are spread over several ranks"),
)
"""Server arguments, the values with which all is well, and what is wrong with others. One that a version of the engine
does not have is not in use."""
