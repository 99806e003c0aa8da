"""Events of SGLang's allocators: which pages they hand out and take back.

Their free lists are tensors and an allocation is for a whole batch, so nothing tells which request a page is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.events import Events

_KNOWN = frozenset({"TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"})


class _Followed:
    """An allocator of one group's pages."""

    def __init__(self, events: Events, group: int, page_size: int) -> None:
        self.events, self._group, self._page_size = events, group, page_size

    def handed_out(self, slots: torch.Tensor) -> None:
        """Slots were handed out; a page is new if its first slot is among them, otherwise it was partly used before."""
        pages = slots.to(torch.int64, copy=True)
        if self._page_size > 1:
            pages = torch.where(pages % self._page_size == 0, pages // self._page_size, -1)
        self.events.add(lambda canary: canary.taken(pages, group=self._group), pages)

    def taken_back(self, pages: torch.Tensor) -> None:
        """Pages went back to the free list. The tensor may be a view of a table that is about to be rewritten."""
        pages = pages.to(torch.int64, copy=True)
        self.events.add(lambda canary: canary.returned(pages, group=self._group), pages)

    def cleared(self) -> None:
        """Every page is free."""
        self.events.add_once(("cleared", self._group), lambda canary: canary.all_returned(group=self._group))


_followed: WeakKeyDictionary[Any, _Followed] = WeakKeyDictionary()
runtime.on_shut_down(_followed.clear)


def allocators_of(allocator: Any, sliding: int | None) -> list[Any] | None:
    """The allocators of the groups of a pool, in order; None if one is of a class whose ways are not known.

    Args:
        allocator: ``token_to_kv_pool_allocator`` of a model runner.
        sliding: The index of the canary's sliding-window group, which has an allocator of its own; None if there is
            none.
    """
    found = [allocator]
    if sliding is not None:
        both = (getattr(allocator, "full_attn_allocator", None), getattr(allocator, "swa_attn_allocator", None))
        found = list(both[-(sliding + 1) :])
    return found if all(type(each).__name__ in _KNOWN for each in found) else None


def follow(allocators: Sequence[Any], events: Events) -> None:
    """Start to listen to the allocators of the groups of a pool."""
    for group, allocator in enumerate(allocators):
        _followed[allocator] = _Followed(events, group, allocator.page_size)


def patch_token_allocator(cls: type) -> None:
    """Patch ``TokenToKVPoolAllocator``, whose pages are single slots."""
    runtime.patch_class("sglang", cls, {"alloc": _around_alloc, "free": _around_free, "clear": _around_clear})


def patch_paged_allocator(cls: type) -> None:
    """Patch ``PagedTokenToKVPoolAllocator``."""
    runtime.patch_class(
        "sglang",
        cls,
        {
            "alloc": _around_alloc,
            "alloc_extend": _around_alloc,
            "alloc_decode": _around_alloc,
            "_release_page_ids": _around_release_page_ids,
            "clear": _around_clear,
        },
    )


def _around_alloc(call: Callable[..., Any], allocator: Any, /, *args: Any, **kwargs: Any) -> Any:
    slots = call(*args, **kwargs)
    followed = _followed.get(allocator)
    if slots is not None and followed is not None and followed.events.part.on:
        with followed.events.part:
            followed.handed_out(slots)
    return slots


def _around_free(call: Callable[..., Any], allocator: Any, /, free_index: Any, *args: Any, **kwargs: Any) -> Any:
    followed = _followed.get(allocator)
    # Inside a group of frees they are only collected, and come here again when it ends.
    if followed is not None and followed.events.part.on and allocator.free_group is None:
        with followed.events.part:
            followed.taken_back(free_index)
    return call(free_index, *args, **kwargs)


def _around_release_page_ids(call: Callable[..., Any], allocator: Any, /, *page_ids: Any) -> Any:
    followed = _followed.get(allocator)
    if followed is not None and followed.events.part.on:
        with followed.events.part:
            for pages in page_ids:
                followed.taken_back(pages)
    return call(*page_ids)


def _around_clear(call: Callable[..., Any], allocator: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    followed = _followed.get(allocator)
    if followed is not None and followed.events.part.on:
        with followed.events.part:
            followed.cleared()
    return result
