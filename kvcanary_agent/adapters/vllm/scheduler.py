"""vLLM's scheduler process: the block pool's acts, checked there and sent to the workers.

Written against vLLM 0.32; the methods and their parameters are checked before anything is patched. The pool does not
know for whom it acts, its manager does: the manager's methods say which request the acts inside them are for.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from kvcanary_agent import runtime
from kvcanary_agent.activation.patching import Around
from kvcanary_agent.adapters.vllm import containment
from kvcanary_agent.adapters.vllm.events import Action, BlockEvent, ExternalLoad, StepEvents, attach
from kvcanary_agent.adapters.vllm.pool import engine_version
from kvcanary_agent.canary.allocator import AllocatorCanary, AllocatorLayout

# What the arounds below rely on: each method's leading parameters after self.
_MANAGER = {"allocate_slots": ("request", "num_new_tokens"), "free": ("request",)}
# Not every version has these; what they do then happens inside the others.
_MANAGER_IF_THERE = {"pop_blocks_for_free": ("request",), "remove_skipped_blocks": ("request_id",)}
_POOL = {
    "get_new_blocks": ("num_blocks",),
    "touch": ("blocks",),
    "free_blocks": ("ordered_blocks",),
    "cache_full_blocks": ("request", "blocks", "num_cached_blocks", "num_full_blocks"),
    "reset_prefix_cache": (),
}
_POOL_IF_THERE = {"evict_blocks": ("block_ids",)}
# Kinds of managers whose references are all taken and given back through the methods above. Those of other kinds, and
# any beside a Mamba manager, which brings copy on write, move blocks between tables in ways of their own.
_FOLLOWED = frozenset(
    {
        "FullAttentionManager",
        "SlidingWindowManager",
        "ChunkedLocalAttentionManager",
        "CrossAttentionManager",
        "RSWAManager",
        "SinkFullAttentionManager",
    }
)
# A step compares so many blocks with the pool, whether or not anything happened to them: about 20 us. A pool of 100,000
# blocks is compared every 1,563 steps, well within a minute of decoding.
_AUDITED_BLOCKS = 64
_UNKNOWN_GROUP = -1
# More than any step brings: outputs are then made by a scheduler that does not go through the patched method.
_MAX_WAITING = 1 << 16
_TRACE_HEADERS = ("traceparent", "tracestate")


class WatchedPool:
    """What is known of a block pool, and what the workers have not been told yet.

    It keeps no part of the engine: the pool, and its manager, come with each call that needs them.
    """

    def __init__(self, num_blocks: int, canary: AllocatorCanary) -> None:
        self.canary = canary
        self.part = runtime.FailOpen("vllm", "allocator")
        self.request: str | None = None
        """For whom the pool acts now."""
        self.affected: set[str] = set()
        """Requests that have read a corrupt block: what they compute is not to be found by others."""
        self._group_of = [_UNKNOWN_GROUP] * num_blocks
        self._with_table: set[str] = set()
        self._waiting: list[BlockEvent] = []
        # Where in `_waiting` the acts are whose group is known only when the request's table is complete.
        self._without_group: list[int] = []
        self._external: list[ExternalLoad] = []
        self._outputs = 0
        self._audited = 0

    # Acts of the pool

    def allocated(self, blocks: Sequence[Any]) -> None:
        numbers = [block.block_id for block in blocks]
        self.canary.allocated(numbers, self.request, *_as_the_pool_has(blocks))
        for number in numbers:
            self._group_of[number] = _UNKNOWN_GROUP
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.clear()
            raise RuntimeError("no output of Scheduler.schedule has taken the events along")
        self._without_group.append(len(self._waiting))
        self._waiting.append(BlockEvent(Action.ALLOCATED, self.request, _UNKNOWN_GROUP, tuple(numbers)))

    def shared(self, blocks: Iterable[Any]) -> None:
        real = [block for block in blocks if not block.is_null]
        self.canary.shared([block.block_id for block in real], self.request, *_as_the_pool_has(real))
        if self.request is not None:
            self._tell(Action.SHARED, self.request, real)

    def freed(self, pool: Any, blocks: Iterable[Any]) -> None:
        """Of ``blocks``, those of other pools go on to them."""
        real = [block for block in blocks if not block.is_null and getattr(block, "pool", None) in (None, pool)]
        self.canary.freed([block.block_id for block in real], self.request, *_as_the_pool_has(real))
        if self.request is not None:
            self._tell_freed(self.request, real)

    def indexed(self, request: str, blocks: Iterable[Any]) -> None:
        self.canary.indexed([block.block_id for block in blocks if block.block_hash is not None], request)

    def evicted(self, pool: Any, numbers: Iterable[int]) -> None:
        self.canary.evicted([number for number in numbers if pool.blocks[number].block_hash is None])

    def index_reset(self) -> None:
        self.canary.index_reset()
        self._waiting.append(BlockEvent(Action.INDEX_RESET, None, _UNKNOWN_GROUP, ()))

    # Acts of the manager

    def has_new_table(self, request: str) -> bool:
        """Whether the pool has given the request anything since its table was ready last."""
        return bool(self._without_group) or request not in self._with_table

    def table_ready(self, manager: Any, request: Any, new_blocks: Any) -> None:
        """The request has the slots that it needs: its table is as the next step will use it."""
        name = request.request_id
        if name in self._with_table:
            tables = new_blocks.blocks
        else:
            self._with_table.add(name)
            tables = manager.coordinator.get_blocks(name)
            self._check_hits(manager, request, tables)
        for group, blocks in enumerate(tables):
            for block in blocks:
                if not block.is_null:
                    self._group_of[block.block_id] = group
        for at in self._without_group:
            event = self._waiting[at]
            self._waiting[at] = dataclasses.replace(event, group=self._group_of[event.blocks[0]])
        self._without_group.clear()

    def loads(self, manager: Any, request: Any, first_token: int, tokens: int, asynchronous: bool) -> None:
        """A connector will fill the blocks of ``tokens`` tokens of the request, whose table is ready."""
        end = first_token + tokens
        blocks = []
        tables = manager.coordinator.get_blocks(request.request_id)
        for table, of_group in zip(tables, manager.coordinator.single_type_managers, strict=True):
            size = of_group.block_size
            blocks.append(tuple(block.block_id for block in table[first_token // size : -(-end // size)]))
        self._external.append(ExternalLoad(request.request_id, first_token, tokens, tuple(blocks), asynchronous))

    def table_dropped(self, request: str) -> None:
        """The request gives back all that it holds."""
        self._with_table.discard(request)
        self.affected.discard(request)

    def given_up(self, blocks: Iterable[Any], request: str) -> None:
        """The request is over, but its blocks return to the pool later, when no step writes to them any more."""
        self._with_table.discard(request)
        self.affected.discard(request)
        real = [block for block in blocks if not block.is_null]
        self.canary.given_up([block.block_id for block in real], request)
        self._tell_freed(request, real)

    def _check_hits(self, manager: Any, request: Any, tables: Sequence[Sequence[Any]]) -> None:
        """A request has a table for the first time: it holds every block in it, and has hit the right ones."""
        name = request.request_id
        key_of = getattr(sys.modules.get("vllm.v1.core.kv_cache_utils"), "make_block_hash_with_group_id", None)
        hash_size = getattr(manager.coordinator.block_pool, "hash_block_size", None)
        managers = manager.coordinator.single_type_managers
        for group, (blocks, of_group) in enumerate(zip(tables, managers, strict=True)):
            self.canary.in_table([block.block_id for block in blocks if not block.is_null], name)
            if key_of is None or of_group.block_size != hash_size:
                continue  # several hashes to a block
            for block, block_hash in zip(blocks, request.block_hashes, strict=False):
                if block.block_hash is not None and block.block_hash != key_of(block_hash, group):
                    self.canary.wrong_hit(block.block_id, name)

    # What the workers are told

    def send(self, scheduler_output: Any, requests: dict[str, Any]) -> None:
        """Let everything that happened since the output before travel with this one."""
        self._outputs += 1
        events = StepEvents(number=self._outputs, blocks=self._waiting, external=self._external)
        self._waiting, self._external = [], []
        self._without_group.clear()
        for new in scheduler_output.scheduled_new_reqs:
            request = requests.get(new.req_id)
            if request is None:
                continue
            if request.cache_salt:
                events.salts[new.req_id] = request.cache_salt
            if request.trace_headers:
                headers = {name.lower(): value for name, value in request.trace_headers.items()}
                events.traces[new.req_id] = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
        attach(scheduler_output, events)

    def audit(self, pool: Any) -> None:
        """Compare some blocks, every block in turn, with what the pool has."""
        blocks = pool.blocks[self._audited : self._audited + _AUDITED_BLOCKS]
        self.canary.audit(
            self._audited,
            [block.ref_cnt for block in blocks],
            [block.next_free_block is not None for block in blocks],
        )
        self.canary.balance(pool.get_num_free_blocks())
        self._audited += len(blocks)
        if self._audited == pool.num_gpu_blocks:
            self._audited = 0

    def _tell(self, action: Action, request: str, blocks: Iterable[Any]) -> None:
        by_group: dict[int, list[int]] = {}
        for block in blocks:
            by_group.setdefault(self._group_of[block.block_id], []).append(block.block_id)
        self._waiting.extend(BlockEvent(action, request, group, tuple(found)) for group, found in by_group.items())

    def _tell_freed(self, request: str, blocks: Sequence[Any]) -> None:
        self._tell(Action.FREED, request, [block for block in blocks if block.block_hash is None])
        self._tell(Action.FREED_CACHED, request, [block for block in blocks if block.block_hash is not None])


def _as_the_pool_has(blocks: Sequence[Any]) -> tuple[list[int], list[bool]]:
    """Reference counters, and whether the prefix index has the blocks."""
    return [block.ref_cnt for block in blocks], [block.block_hash is not None for block in blocks]


# Weak, so that an engine that is dropped in-process takes its books with it. By manager and by pool.
_watched: WeakKeyDictionary[Any, WatchedPool] = WeakKeyDictionary()
runtime.on_shut_down(_watched.clear)


def patch_block_pool(cls: type) -> None:
    """Patch ``BlockPool``."""
    _patch(cls, _POOL, _POOL_IF_THERE)


def patch_manager(cls: type) -> None:
    """Patch ``KVCacheManager``. Its module imports that of ``BlockPool``, which is patched by then."""
    _patch(cls, {**_MANAGER, "__init__": ()}, _MANAGER_IF_THERE)


def patch_scheduler(cls: type) -> None:
    """Patch ``Scheduler``."""
    _patch(cls, {"schedule": ()})
    if containment.is_asked_for():
        containment.patch_scheduler_updates(cls, _affected_of)


def _affected_of(manager: Any) -> set[str] | None:
    watched = _watch_of(manager)
    return None if watched is None else watched.affected


# Classes that are not as this adapter knows them: no pool of this process is watched.
_unknown_classes: set[str] = set()


def _patch(
    cls: type, points: Mapping[str, tuple[str, ...]], if_there: Mapping[str, tuple[str, ...]] | None = None
) -> None:
    points = {**points, **{name: wanted for name, wanted in (if_there or {}).items() if hasattr(cls, name)}}
    problem = runtime.unexpected_methods(cls, points)
    if problem is not None:
        runtime.not_covered("vllm", "allocator", problem)
    if problem is not None or not runtime.patch_class("vllm", cls, {name: _AROUNDS[name] for name in points}):
        _unknown_classes.add(cls.__qualname__)


def _watch_of(owner: Any) -> WatchedPool | None:
    """What watches a pool or a manager, if it is on."""
    try:
        watched = _watched.get(owner)
    except TypeError:
        return None  # no weak reference to it can be made: it was not watched either
    return watched if watched is not None and watched.part.on else None


def _around_manager_init(call: Callable[..., Any], manager: Any, /, *args: Any, **kwargs: Any) -> None:
    call(*args, **kwargs)
    with runtime.FailOpen("vllm", "allocator"):
        _attach(manager)


def _attach(manager: Any) -> None:
    pool = manager.coordinator.block_pool
    managers = manager.coordinator.single_type_managers
    unknown = sorted({type(m).__name__ for m in managers} - _FOLLOWED)
    if unknown or _unknown_classes or not managers:
        if unknown:
            runtime.not_covered("vllm", "allocator", f"blocks managed by {', '.join(unknown)}")
        return
    sizes = {m.block_size for m in managers}
    canary = runtime.open_allocator(
        AllocatorLayout(
            engine="vllm",
            engine_version=engine_version(),
            num_blocks=pool.num_gpu_blocks,
            block_size=sizes.pop() if len(sizes) == 1 else 0,
            null_block=pool.null_block.block_id,
        )
    )
    if canary is not None:
        _watched[manager] = _watched[pool] = WatchedPool(pool.num_gpu_blocks, canary)


def _around_allocate_slots(call: Callable[..., Any], manager: Any, /, request: Any, *args: Any, **kwargs: Any) -> Any:
    watched = _watch_of(manager)
    if watched is None:
        return call(request, *args, **kwargs)
    watched.request = request.request_id
    try:
        new_blocks = call(request, *args, **kwargs)
    finally:
        watched.request = None
    # Most calls are for the next token of a request, whose last block has room.
    if new_blocks is not None and watched.part.on and watched.has_new_table(request.request_id):
        with watched.part:
            watched.table_ready(manager, request, new_blocks)
            loaded = kwargs.get("num_external_computed_tokens", 0)
            if loaded:
                first = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0)
                watched.loads(manager, request, first, loaded, kwargs.get("delay_cache_blocks", False))
    return new_blocks


def _around_free(call: Callable[..., Any], manager: Any, /, request: Any, *args: Any, **kwargs: Any) -> Any:
    watched = _watch_of(manager)
    if watched is None:
        return call(request, *args, **kwargs)
    watched.request = request.request_id
    try:
        return call(request, *args, **kwargs)
    finally:
        watched.request = None
        watched.table_dropped(request.request_id)


def _around_remove_skipped_blocks(
    call: Callable[..., Any], manager: Any, /, request_id: str, *args: Any, **kwargs: Any
) -> Any:
    watched = _watch_of(manager)
    if watched is None:
        return call(request_id, *args, **kwargs)
    watched.request = request_id
    try:
        return call(request_id, *args, **kwargs)
    finally:
        watched.request = None


def _around_pop_blocks_for_free(
    call: Callable[..., Any], manager: Any, /, request: Any, *args: Any, **kwargs: Any
) -> Any:
    blocks = call(request, *args, **kwargs)
    watched = _watch_of(manager)
    if watched is not None:
        with watched.part:
            watched.given_up(blocks, request.request_id)
    return blocks


def _around_get_new_blocks(call: Callable[..., Any], pool: Any, /, *args: Any, **kwargs: Any) -> Any:
    blocks = call(*args, **kwargs)
    watched = _watch_of(pool)
    if watched is not None and blocks:
        with watched.part:
            watched.allocated(blocks)
    return blocks


def _around_touch(call: Callable[..., Any], pool: Any, /, blocks: Any, *args: Any, **kwargs: Any) -> Any:
    result = call(blocks, *args, **kwargs)
    watched = _watch_of(pool)
    if watched is not None:
        with watched.part:
            watched.shared(blocks)
    return result


def _around_free_blocks(call: Callable[..., Any], pool: Any, /, ordered_blocks: Any, *args: Any, **kwargs: Any) -> Any:
    watched = _watch_of(pool)
    if watched is None:
        return call(ordered_blocks, *args, **kwargs)
    # It may be an iterator, which the pool uses up.
    blocks = list(ordered_blocks)
    result = call(blocks, *args, **kwargs)
    with watched.part:
        watched.freed(pool, blocks)
    return result


def _around_cache_full_blocks(
    call: Callable[..., Any],
    pool: Any,
    /,
    request: Any,
    blocks: Any,
    num_cached_blocks: int,
    num_full_blocks: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = call(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
    watched = _watch_of(pool)
    if watched is not None:
        with watched.part:
            fresh = blocks[num_cached_blocks:num_full_blocks]
            watched.indexed(request.request_id, fresh)
            if request.request_id in watched.affected:
                pool.evict_blocks({block.block_id for block in fresh if not block.is_null})
    return result


def _around_evict_blocks(call: Callable[..., Any], pool: Any, /, block_ids: Any, *args: Any, **kwargs: Any) -> Any:
    numbers = list(block_ids)
    result = call(block_ids, *args, **kwargs)
    watched = _watch_of(pool)
    if watched is not None:
        with watched.part:
            watched.evicted(pool, numbers)
    return result


def _around_reset_prefix_cache(call: Callable[..., Any], pool: Any, /, *args: Any, **kwargs: Any) -> Any:
    done = call(*args, **kwargs)
    watched = _watch_of(pool)
    if done and watched is not None:
        with watched.part:
            watched.index_reset()
    return done


def _around_schedule(call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
    output = call(*args, **kwargs)
    watched = _watch_of(getattr(scheduler, "kv_cache_manager", None))
    if watched is not None:
        with watched.part:
            watched.send(output, scheduler.requests)
            watched.audit(scheduler.kv_cache_manager.coordinator.block_pool)
            watched.canary.step_finished()
    return output


_AROUNDS: dict[str, Around] = {
    "__init__": _around_manager_init,
    "allocate_slots": _around_allocate_slots,
    "free": _around_free,
    "remove_skipped_blocks": _around_remove_skipped_blocks,
    "pop_blocks_for_free": _around_pop_blocks_for_free,
    "get_new_blocks": _around_get_new_blocks,
    "touch": _around_touch,
    "free_blocks": _around_free_blocks,
    "cache_full_blocks": _around_cache_full_blocks,
    "evict_blocks": _around_evict_blocks,
    "reset_prefix_cache": _around_reset_prefix_cache,
    "schedule": _around_schedule,
}
