"""Copies of pages in host memory (HiCache): what goes there, what gives way there, and what comes back.

Slots of the pool are tensors on its device, slots of the host's pool are tensors on the host, and each copy is of whole
pages. A copy to the host is kept under a number. Which number, and which place in it, each page of the host's pool
has, is what this module knows: pages that were copied together need not come back together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.events import Events
from kvcanary_agent.canary.canary import Canary
from kvcanary_agent.kernels.transit import to_device

# The classes of pools whose copies hold all that the pool holds of a page.
_COPIED_WHOLE = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
_CONTROLLER: dict[str, tuple[str, ...]] = {"start_writing": (), "start_loading": ()}
_HOST_POOL: dict[str, tuple[str, ...]] = {"alloc": ("need_size",)}
_NOTHING = 0


class HostTier:
    """What each page of a host's pool is a copy of."""

    def __init__(self, num_pages: int, page_size: int, events: Events) -> None:
        """Start with nothing in it.

        Args:
            num_pages: Of the host's pool.
            page_size: Slots per page, of both pools.
            events: Of the pool.
        """
        self.part = events.part
        self._page_size = page_size
        self._events = events
        with torch.inference_mode(False):
            self._copy = torch.full((num_pages,), _NOTHING, dtype=torch.int64, device="cpu")
            self._place = torch.zeros((num_pages,), dtype=torch.int64, device="cpu")
        self._pages_of: Counter[int] = Counter()
        self._last = _NOTHING

    def written(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """A copy of ``slots`` to ``host_slots`` begins, ``[n]`` integer each, page by page."""
        pages = self._pages(host_slots)
        self._give_up(pages)
        self._last = number = self._last + 1
        self._copy[pages], self._place[pages] = number, torch.arange(pages.shape[0])
        self._pages_of[number] = pages.shape[0]
        blocks = self._pages(slots)
        self._events.add(lambda canary: canary.stored(number, blocks), blocks)

    def given_away(self, host_slots: torch.Tensor) -> None:
        """What was in ``host_slots``, ``[n]`` integer, is to give way to something that may come from elsewhere."""
        self._give_up(self._pages(host_slots))

    def read(self, host_slots: torch.Tensor, slots: torch.Tensor) -> list[Arrival]:
        """A copy of ``host_slots`` to ``slots`` begins, ``[n]`` integer each, page by page."""
        pages, blocks = self._pages(host_slots), self._pages(slots)
        copies, places = self._copy[pages].tolist(), self._place[pages].tolist()
        return [
            Arrival(number, blocks, [at for at, copy in enumerate(copies) if copy == number], places)
            for number in sorted(set(copies))
        ]

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return slots[:: self._page_size].to(torch.int64, copy=True) // self._page_size

    def _give_up(self, pages: torch.Tensor) -> None:
        for number, count in Counter(self._copy[pages].tolist()).items():
            if number == _NOTHING:
                continue
            self._pages_of[number] -= count
            if not self._pages_of[number]:
                del self._pages_of[number]
                self._events.add(partial(_discard, number))
        self._copy[pages] = _NOTHING


def _discard(number: int, canary: Canary) -> None:
    canary.discarded(number)


class Arrival:
    """Pages that come back, all of them copies under one number, or of nothing that is known."""

    def __init__(self, number: int, blocks: torch.Tensor, among: Sequence[int], places: Sequence[int]) -> None:
        """Describe pages that come back.

        Args:
            number: Of the copy.
            blocks: ``[n]`` int64 on the pool's device: where the pages that are read together go.
            among: Which of those this is about.
            places: ``[n]``: which page of its copy each of them was.
        """
        self._number, self.blocks = number, blocks
        self._among, self._places = among, [places[at] for at in among]

    def tell(self, canary: Canary, *, complete: bool) -> None:
        """Tell the canary."""
        blocks = self.blocks
        if len(self._among) < blocks.shape[0]:
            blocks = blocks[to_device(self._among, blocks.device)]
        if self._number == _NOTHING:
            canary.arriving(blocks)
        else:
            canary.loaded(self._number, blocks, picked=self._places, complete=complete)


class Arrivals:
    """What is on its way back to one pool, from a step's beginning to its forward's end."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Arrival]] = []

    def begun(self, arrivals: Sequence[Arrival], finished: Any, canary: Canary) -> None:
        """Copies have begun; the device's event ``finished`` is their end."""
        for arrival in arrivals:
            arrival.tell(canary, complete=False)
            self._under_way.append((finished, arrival))

    def completed(self, canary: Canary) -> None:
        """The forward that reads them is over: it has waited for them, layer by layer."""
        under_way, self._under_way = self._under_way, []
        for finished, arrival in under_way:
            finished.wait()
            arrival.tell(canary, complete=True)

    def forget(self) -> None:
        """No forward has followed: what has come back is taken as it is."""
        self._under_way.clear()


class _Followed:
    """A pool whose copies are followed."""

    def __init__(self, events: Events, arrivals: Arrivals, page_size: int) -> None:
        self.events, self.arrivals, self.page_size = events, arrivals, page_size


_followed: WeakKeyDictionary[Any, _Followed] = WeakKeyDictionary()
_tiers: WeakKeyDictionary[Any, HostTier] = WeakKeyDictionary()
runtime.on_shut_down(_followed.clear)
runtime.on_shut_down(_tiers.clear)
_patched: set[str] = set()
runtime.on_shut_down(_patched.clear)


def why_not_followed(pool: Any, num_groups: int) -> str | None:
    """Why copies of this pool in host memory cannot be followed, in words, or None."""
    if len(_patched) < 2:
        return "the classes that copy are not those that the agent knows"
    if type(pool).__name__ not in _COPIED_WHOLE or num_groups > 1:
        return f"keys and values of a {type(pool).__name__} come back from host memory in several parts"
    return None


def follow_copies(pool: Any, events: Events, arrivals: Arrivals) -> None:
    """Start to listen to what is copied between a pool and host memory."""
    _followed[pool] = _Followed(events, arrivals, pool.page_size)


def patch_cache_controller(cls: type) -> None:
    """Patch ``HiCacheController``, which starts all copies."""
    _patch(cls, _CONTROLLER, {"start_writing": _around_start_writing, "start_loading": _around_start_loading})


def patch_host_pool(cls: type) -> None:
    """Patch ``HostKVCache``, whose pages are handed out for what comes from the device and from further tiers."""
    _patch(cls, _HOST_POOL, {"alloc": _around_alloc})


def _patch(cls: type, expected: dict[str, tuple[str, ...]], arounds: dict[str, Callable[..., Any]]) -> None:
    problem = runtime.unexpected_methods(cls, expected)
    if problem is not None:
        runtime.not_covered("sglang", "copies in host memory", problem)
    elif runtime.patch_class("sglang", cls, arounds):
        _patched.add(cls.__qualname__)


def _around_start_writing(call: Callable[..., Any], controller: Any, /, *args: Any, **kwargs: Any) -> Any:
    queued = list(controller.write_queue)
    result = call(*args, **kwargs)
    followed = _followed.get(controller.mem_pool_device)
    if queued and followed is not None and followed.events.part.on:
        with followed.events.part:
            tier = _tier_of(controller, followed)
            for operation in queued:
                tier.written(operation.host_indices, operation.device_indices)
    return result


def _around_start_loading(call: Callable[..., Any], controller: Any, /, *args: Any, **kwargs: Any) -> Any:
    queued = list(controller.load_queue)
    result = call(*args, **kwargs)
    followed = _followed.get(controller.mem_pool_device)
    if queued and followed is not None and followed.events.part.on:
        with followed.events.part:
            tier, arrivals = _tier_of(controller, followed), followed.arrivals
            finished = controller.ack_load_queue[-1].finish_event
            for operation in queued:
                back = tier.read(operation.host_indices, operation.device_indices)
                followed.events.add(partial(arrivals.begun, back, finished), back[0].blocks if back else None)
    return result


def _around_alloc(call: Callable[..., Any], host_pool: Any, /, *args: Any, **kwargs: Any) -> Any:
    slots = call(*args, **kwargs)
    tier = _tiers.get(host_pool)
    if slots is not None and tier is not None and tier.part.on:
        with tier.part:
            tier.given_away(slots)
    return slots


def _tier_of(controller: Any, followed: _Followed) -> HostTier:
    group = controller.mem_pool_host
    host_pool = group.anchor_entry.host_pool if hasattr(group, "anchor_entry") else group
    tier = _tiers.get(host_pool)
    if tier is None:
        tier = _tiers[host_pool] = HostTier(host_pool.page_num, followed.page_size, followed.events)
    return tier
