"""The demo engine: the reference for an adapter that knows the pool, the step and every event of the allocator."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcanary_agent import runtime
from kvcanary_agent.canary import Canary, ForwardStep, GroupStep, KnownTokens, KVGroup, KVLayout, KVPart

ENGINE = "kvcanary-demo"


class _Watch:
    """One engine with its canary, and the sequences of the step that is being built."""

    def __init__(self, canary: Canary) -> None:
        self.canary = canary
        # One part for events and steps: without its events a step cannot be judged.
        self.part = runtime.FailOpen(ENGINE, f"pool {canary.layout.pool}")
        self.sequences: list[Any] = []


# An engine's model runner and block manager, each to the watch of that engine.
_watches: WeakKeyDictionary[Any, _Watch] = WeakKeyDictionary()
runtime.on_shut_down(_watches.clear)


targets = ("kvcanary_agent.demo.engine",)


def patch(module: ModuleType) -> None:
    """Patch the classes of `kvcanary_agent.demo.engine`."""
    events: dict[str, Callable[..., Any]] = {
        "allocate": _around_allocate,
        "share": _around_share,
        "copy_on_write": _around_copy_on_write,
        "free": _around_free,
    }
    steps: dict[str, Callable[..., Any]] = {"build_batch": _around_build_batch, "forward": _around_forward}
    # The pool last: without every event and step it cannot be judged, and is not opened.
    if runtime.patch_class(ENGINE, module.BlockManager, events) and runtime.patch_class(
        ENGINE, module.ModelRunner, steps
    ):
        runtime.patch_class(ENGINE, module.Engine, {"__init__": _around_engine_init})


def _around_engine_init(call: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> None:
    call(*args, **kwargs)
    setup = runtime.FailOpen(ENGINE, "KV pool")
    with setup:
        canary = runtime.open_canary(_layout(engine.runner.pool.data, engine.config.block_size))
        if canary is not None:
            _watches[engine.runner] = _watches[engine.block_manager] = _Watch(canary)


def _layout(data: torch.Tensor, block_size: int) -> KVLayout:
    parts = tuple(
        KVPart(layer=f"layers.{layer}", part=part, view=data[layer, index])
        for layer in range(data.shape[0])
        for index, part in enumerate(("k", "v"))
    )
    group = KVGroup(name="full", block_size=block_size, parts=parts, null_block=0)
    return KVLayout(engine=ENGINE, groups=(group,), reports_ownership=True)


# Events of the allocator


def _around_allocate(call: Callable[..., Any], manager: Any, seq: Any, /, *args: Any, **kwargs: Any) -> Any:
    blocks = call(seq, *args, **kwargs)
    watch = _watches.get(manager)
    if watch and watch.part.on:
        with watch.part:
            watch.canary.allocated(blocks, request=seq.request_id)
    return blocks


def _around_share(call: Callable[..., Any], manager: Any, seq: Any, blocks: Any, /) -> None:
    watch = _watches.get(manager)
    if watch and watch.part.on:
        with watch.part:
            watch.canary.shared(list(blocks), request=seq.request_id)
    call(seq, blocks)


def _around_copy_on_write(call: Callable[..., Any], manager: Any, seq: Any, index: int, /) -> Any:
    source, destination = call(seq, index)
    watch = _watches.get(manager)
    if watch and watch.part.on:
        with watch.part:
            # The bytes follow before the next forward. By then the source may have been freed and handed out again,
            # so its records are copied now.
            watch.canary.allocated([destination], request=seq.request_id)
            watch.canary.copied([source], [destination])
            watch.canary.freed([source], request=seq.request_id, cached=manager.is_indexed(source))
    return source, destination


def _around_free(call: Callable[..., Any], manager: Any, seq: Any, /) -> None:
    watch = _watches.get(manager)
    if watch and watch.part.on:
        with watch.part:
            for cached in (False, True):
                blocks = [block for block in seq.block_table if manager.is_indexed(block) == cached]
                watch.canary.freed(blocks, request=seq.request_id, cached=cached)
    call(seq)


# Steps


def _around_build_batch(call: Callable[..., Any], runner: Any, rows: Any, /) -> Any:
    watch = _watches.get(runner)
    if watch:
        watch.sequences = [seq for seq, _ in rows]
    return call(rows)


def _around_forward(call: Callable[..., Any], runner: Any, batch: Any, /) -> Any:
    watch = _watches.get(runner)
    if not watch or not watch.part.on:
        return call(batch)
    return runtime.watched_forward(watch.part, watch.canary, lambda: _step(batch, watch.sequences), lambda: call(batch))


def _step(batch: Any, sequences: list[Any]) -> ForwardStep:
    longest = max(seq.num_tokens for seq in sequences)
    device = batch.token_ids.device
    tokens = [seq.token_ids + [-1] * (longest - seq.num_tokens) for seq in sequences]
    return ForwardStep(
        requests=batch.request_ids,
        prefix_lens=batch.prefix_lens,
        query_offsets=batch.query_offsets,
        token_ids=batch.token_ids,
        positions=batch.positions,
        groups=[GroupStep(block_table=batch.block_tables, write_slots=batch.slot_mapping)],
        known_tokens=KnownTokens(
            tokens=torch.tensor(tokens, device=device),
            rows=torch.arange(len(sequences), device=device),
            lengths=torch.tensor([seq.num_tokens for seq in sequences], device=device),
        ),
    )
