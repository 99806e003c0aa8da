"""Patch points of continuous batching: the cache that is the pool, and the model runner, around whose batches it is
checked.

Written against transformers 5.24; the methods and their parameters are checked before anything is patched.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.histories import Histories
from kvcanary_agent.adapters.transformers.paged_events import (
    EVENTS,
    emptied,
    follow,
)
from kvcanary_agent.adapters.transformers.paged_pool import (
    ENGINE,
    NotCovered,
    PagedGroup,
    describe_groups,
    layout_of,
)
from kvcanary_agent.adapters.transformers.paged_steps import Batch, batch_of, describe_step
from kvcanary_agent.canary.canary import Canary
from kvcanary_agent.canary.layout import LayoutError
from kvcanary_agent.canary.step import ForwardStep

_SUBJECT = "continuous batching"
# What the arounds below rely on: each method's leading parameters after self.
CACHE: dict[str, tuple[str, ...]] = {
    "__init__": ("config", "continuous_batching_config", "device", "distributed_helper"),
    "evict_cached_blocks": (),
    "free_all_requests": ("clear_ledgers",),
}
RUNNER: dict[str, tuple[str, ...]] = {"compute_batch": ("model", "batch_data"), "run_one_warmup": ()}
# The histories may take 0.2 % of the pool's bytes.
_POOL_BYTES_PER_HISTORY_BYTE = 500

# The classes of this process that are patched, and why others are not. A pool is judged only if all of them are, and
# what is missing is said when there is a pool: many a process imports transformers for something else.
_patched: set[str] = set()
_problems: dict[str, str] = {}


class WatchedPool:
    """A ``PagedAttentionCache`` that is watched."""

    def __init__(self, groups: tuple[PagedGroup, ...], canary: Canary) -> None:
        self.canary = canary
        self.groups = groups
        self.part = runtime.FailOpen(ENGINE, f"pool {canary.layout.pool}")
        self.events = follow([each.allocator for each in groups], self.part)
        with torch.inference_mode(False):
            self._histories = Histories(
                canary.layout.device,
                canary.layout.num_bytes // _POOL_BYTES_PER_HISTORY_BYTE,
                lambda state: (state.initial_tokens, state.generated_tokens),
            )

    def describe_step(self, batch: Batch, runner: Any, inputs: Any) -> ForwardStep:
        """What happened to the pool since the last step, and the step itself."""
        self.events.apply(self.canary)
        return describe_step(self.groups, batch, inputs, _token_ids(runner, inputs), self._histories)

    def forget_rings(self, batch: Batch) -> None:
        """What a step writes over tokens that it reads has no record: it is not judged until it is written anew."""
        for index, described in enumerate(self.groups):
            if described.ring is None:
                continue
            for row, state in enumerate(batch.states):
                if batch.wraps(row, described.ring):
                    self.canary.arriving(described.allocator.block_table[state.request_id], group=index)


_watched: WeakKeyDictionary[Any, WatchedPool] = WeakKeyDictionary()
_warming_up: WeakSet[Any] = WeakSet()
runtime.on_shut_down(_watched.clear)
runtime.on_shut_down(_patched.clear)
runtime.on_shut_down(_problems.clear)


def patch_cache(cls: type) -> None:
    """Patch ``PagedAttentionCache``."""
    arounds = {
        "__init__": _around_init,
        "evict_cached_blocks": _around_evict,
        "free_all_requests": _around_free_all,
    }
    if not _patch(cls, CACHE, arounds):
        runtime.patch_class(ENGINE, cls, {"__init__": _around_init})


def patch_model_runner(cls: type) -> None:
    """Patch ``ModelRunner``."""
    _patch(cls, RUNNER, {"compute_batch": _around_compute_batch, "run_one_warmup": _around_warmup})


def patch_events_of(cls: type) -> None:
    """Patch a class whose acts the pool is judged by."""
    _patch(cls, *EVENTS[cls.__name__])


def cannot_patch(class_name: str, reason: str) -> None:
    """A class is not there to be patched."""
    _problems[class_name] = reason


def _patch(cls: type, expected: Mapping[str, tuple[str, ...]], arounds: Mapping[str, Callable[..., Any]]) -> bool:
    problem = runtime.unexpected_methods(cls, expected)
    if problem is not None:
        cannot_patch(cls.__name__, problem)
    elif runtime.patch_class(ENGINE, cls, arounds):
        _patched.add(cls.__name__)
        return True
    return False


def _around_init(call: Callable[..., Any], cache: Any, /, *args: Any, **kwargs: Any) -> None:
    call(*args, **kwargs)
    with runtime.FailOpen(ENGINE, f"description of the pool of {_SUBJECT}"):
        _attach(cache, kwargs.get("distributed_helper", args[3] if len(args) > 3 else None))


def _attach(cache: Any, distributed: Any) -> None:
    try:
        missing = sorted({*EVENTS, "PagedAttentionCache", "ModelRunner"} - _patched)
        if missing:
            raise NotCovered("; ".join(_problems.get(name, f"{name} is not patched") for name in missing))
        groups, left_out = describe_groups(cache)
        layout = layout_of(groups, left_out, distributed)
    except (NotCovered, LayoutError) as reason:
        runtime.not_covered(ENGINE, f"pool of {_SUBJECT}", str(reason))
        return
    canary = runtime.open_canary(layout)
    if canary is None:
        return
    _watched[cache] = WatchedPool(groups, canary)
    weakref.finalize(cache, runtime.close_canary, canary).atexit = False


def _watching(cache: Any) -> WatchedPool | None:
    watched = _watched.get(cache)
    return watched if watched is not None and watched.part.on else None


def _around_evict(call: Callable[..., Any], cache: Any, /, *args: Any, **kwargs: Any) -> Any:
    watched = _watching(cache)
    if watched is None:
        return call(*args, **kwargs)
    allocators = [each.allocator for each in watched.groups]
    cached = [list(allocator.ledger.cached_blocks) for allocator in allocators]
    result = call(*args, **kwargs)
    with watched.part:
        emptied(allocators, cached)
    return result


def _around_free_all(
    call: Callable[..., Any], cache: Any, /, clear_ledgers: bool = False, *args: Any, **kwargs: Any
) -> Any:
    result = call(clear_ledgers, *args, **kwargs)
    watched = _watching(cache)
    if watched is not None and clear_ledgers:
        with watched.part:
            watched.events.add(lambda canary: canary.index_reset())
    return result


def _around_warmup(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    _warming_up.add(runner)
    try:
        return call(*args, **kwargs)
    finally:
        _warming_up.discard(runner)


def _around_compute_batch(
    call: Callable[..., Any], runner: Any, /, model: Any, batch_data: Any, *args: Any, **kwargs: Any
) -> Any:
    watched = _watching(runner.cache)
    if watched is None or runner in _warming_up:
        return call(model, batch_data, *args, **kwargs)
    with watched.part:
        batch = batch_of(runner.inputs_and_outputs)
    if not watched.part.on:
        return call(model, batch_data, *args, **kwargs)

    def forward() -> Any:
        if watched.part.on:
            with watched.part:
                watched.forget_rings(batch)
        return call(model, batch_data, *args, **kwargs)

    with _on_stream_of(runner):
        return runtime.watched_forward(
            watched.part, watched.canary, lambda: watched.describe_step(batch, runner, batch_data), forward
        )


def _on_stream_of(runner: Any) -> contextlib.AbstractContextManager[Any]:
    """The checks have to see the pool between the batch before and this one, which run on a stream of their own."""
    stream = runner.inputs_and_outputs.compute_stream
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else contextlib.nullcontext()


def _token_ids(runner: Any, inputs: Any) -> torch.Tensor:
    """The batch's tokens, ``[tokens]``: with asynchronous batching some are results of the batch before, which the
    forward fetches itself."""
    token_ids: torch.Tensor = inputs["input_ids"][0]
    if not hasattr(runner.inputs_and_outputs, "io_pairs"):
        return token_ids
    carried, results, _ = runner.inputs_and_outputs.get_cb_kwargs()
    carried = carried[: token_ids.shape[0]]
    return torch.where(carried != -1, results[0, carried], token_ids)
