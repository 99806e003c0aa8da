"""Events of the allocators of continuous batching: which blocks they hand out, share, copy, move and take back.

The thread that schedules is the one that runs the steps, and may be a batch ahead of the device: events wait until the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from kvcanary_agent import runtime
from kvcanary_agent.adapters.events import Events


class _Followed:
    """An allocator, and the group of the canary whose blocks it has."""

    def __init__(self, events: Events, group: int) -> None:
        self.events, self.group = events, group

    def held(self, allocator: Any, request: str) -> list[int]:
        return list(allocator.block_table.get(request, ()))

    def allocated(self, blocks: Sequence[int], request: str) -> None:
        if blocks:
            self.events.add(lambda canary: canary.allocated(blocks, group=self.group, request=request))

    def shared(self, blocks: Sequence[int], request: str) -> None:
        if blocks:
            self.events.add(lambda canary: canary.shared(blocks, group=self.group, request=request))

    def freed(self, blocks: Sequence[int], request: str, cached: bool) -> None:
        if blocks:
            self.events.add(lambda canary: canary.freed(blocks, group=self.group, request=request, cached=cached))

    def emptied(self, blocks: Sequence[int]) -> None:
        """Nobody may read these blocks any more."""
        if blocks:
            self.events.add(lambda canary: canary.recycled(blocks, group=self.group))

    def copied(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        if sources:
            self.events.add(lambda canary: canary.copied(sources, destinations, group=self.group))

    def stored(self, blocks: Sequence[int], request: str) -> None:
        if blocks:
            self.events.add(lambda canary: canary.stored(request, blocks, group=self.group))

    def loaded(self, blocks: Sequence[int], request: str) -> None:
        if blocks:
            self.events.add(lambda canary: canary.loaded(request, blocks, group=self.group, request=request))

    def indexed(self, tokens: Sequence[int], block: int) -> None:
        self.events.add(lambda canary: canary.indexed(tokens, block, group=self.group))


_followed: WeakKeyDictionary[Any, _Followed] = WeakKeyDictionary()
runtime.on_shut_down(_followed.clear)


def follow(allocators: Sequence[Any], part: runtime.FailOpen) -> Events:
    """Start to listen to the allocators of the groups of a pool."""
    events = Events(part)
    for group, allocator in enumerate(allocators):
        _followed[allocator] = _Followed(events, group)
    return events


def emptied(allocators: Sequence[Any], blocks: Sequence[Sequence[int]]) -> None:
    """The prefix index has given up these blocks of each allocator."""
    for allocator, given_up in zip(allocators, blocks, strict=True):
        followed = _followed.get(allocator)
        if followed is not None:
            followed.emptied(given_up)


def _following(allocator: Any) -> _Followed | None:
    followed = _followed.get(allocator)
    return followed if followed is not None and followed.events.part.on else None


def _around_allocate(call: Callable[..., Any], allocator: Any, /, request_id: str, *args: Any, **kwargs: Any) -> Any:
    followed = _following(allocator)
    if followed is None:
        return call(request_id, *args, **kwargs)
    before = len(allocator.block_table.get(request_id, ()))
    result = call(request_id, *args, **kwargs)
    with followed.events.part:
        followed.allocated(followed.held(allocator, request_id)[before:], request_id)
    return result


def _around_free(
    call: Callable[..., Any], allocator: Any, /, request_id: str, no_cache: bool = False, *args: Any, **kwargs: Any
) -> Any:
    followed = _following(allocator)
    if followed is None:
        return call(request_id, no_cache, *args, **kwargs)
    blocks = followed.held(allocator, request_id)
    ledger = allocator.ledger
    last = {block for block in blocks if ledger.shared_ref_counts.get(block, 1) == 1}
    result = call(request_id, no_cache, *args, **kwargs)
    with followed.events.part:
        if no_cache:
            # It may go on later, with what its blocks hold now.
            followed.stored(blocks, request_id)
        for cached in (False, True):
            followed.freed([block for block in blocks if (block in ledger.cached_blocks) == cached], request_id, cached)
        followed.emptied([block for block in blocks if block in last and block not in ledger.cached_blocks])
    return result


def _around_fork(
    call: Callable[..., Any],
    allocator: Any,
    /,
    source_request_id: str,
    dest_request_id: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    to_copy, fresh = call(source_request_id, dest_request_id, *args, **kwargs)
    followed = _following(allocator)
    if followed is not None:
        with followed.events.part:
            table = followed.held(allocator, dest_request_id)
            followed.shared(table[: len(table) - len(fresh)], dest_request_id)
            followed.allocated(list(fresh), dest_request_id)
            followed.copied(list(to_copy), list(fresh))
    return to_copy, fresh


def _around_acquire_prefix(
    call: Callable[..., Any], allocator: Any, /, request_id: str, *args: Any, **kwargs: Any
) -> Any:
    result = call(request_id, *args, **kwargs)
    followed = _following(allocator)
    if followed is not None:
        with followed.events.part:
            followed.shared(followed.held(allocator, request_id), request_id)
    return result


def _around_mark_complete(
    call: Callable[..., Any], allocator: Any, /, request_id: str, token_ids: list[int], *args: Any, **kwargs: Any
) -> Any:
    followed = _following(allocator)
    if followed is None:
        return call(request_id, token_ids, *args, **kwargs)
    index = allocator.ledger.block_to_hash
    before = followed.held(allocator, request_id)
    known = {block for block in before if block in index}
    result = call(request_id, token_ids, *args, **kwargs)
    with followed.events.part:
        after = followed.held(allocator, request_id)
        for column, (old, new) in enumerate(zip(before, after, strict=True)):
            if new != old:
                # Another block holds the same already.
                followed.shared([new], request_id)
                followed.freed([old], request_id, cached=False)
            elif new in index and new not in known:
                followed.indexed(token_ids[: (column + 1) * allocator.tokens_per_page], new)
    return result


def _around_restore(
    call: Callable[..., Any], manager: Any, /, requests_in_batch: list[Any], *args: Any, **kwargs: Any
) -> Any:
    returning = [each.state.request_id for each in requests_in_batch if each.state.is_cpu_offloaded]
    result = call(requests_in_batch, *args, **kwargs)
    for allocator in manager.cache.cache_allocators.values():
        followed = _following(allocator)
        if followed is not None:
            with followed.events.part:
                for request in returning:
                    followed.loaded(followed.held(allocator, request), request)
    return result


_Patch = tuple[Mapping[str, tuple[str, ...]], Mapping[str, Callable[..., Any]]]

EVENTS: dict[str, _Patch] = {
    "CacheAllocator": (
        {
            "free_blocks": ("request_id", "no_cache"),
            "fork_blocks": ("source_request_id", "dest_request_id", "past_length"),
            "acquire_prefix_blocks": ("request_id", "prefix_len", "block_ids"),
            "mark_complete_blocks": ("request_id", "token_ids"),
        },
        {
            "free_blocks": _around_free,
            "fork_blocks": _around_fork,
            "acquire_prefix_blocks": _around_acquire_prefix,
            "mark_complete_blocks": _around_mark_complete,
        },
    ),
    # From which that of sliding windows inherits.
    "FullAttentionCacheAllocator": (
        {"allocate_cache_to_request": ("request_id", "past_length", "query_length")},
        {"allocate_cache_to_request": _around_allocate},
    ),
    # Moves blocks to host memory and back.
    "OffloadingManager": (
        {"restore_scheduled_requests": ("requests_in_batch",)},
        {"restore_scheduled_requests": _around_restore},
    ),
}
"""The classes whose acts are followed: the leading parameters, after ``self``, that the methods have to have, and what
runs around them."""
