"""``KVCANARY_ON_VIOLATION=evict``: pages that were found corrupt leave the radix tree, with all that follows from them.

The tree lists the pages that it holds, and which of them no running request uses, but not which node has a page. So it
is told to evict, as for want of memory, the least recently used first, until the page is gone. A node goes after its
children: what was computed from a corrupt page is gone before it. A page in use stays until its requests have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvcanary_agent import runtime
from kvcanary_agent.adapters.sglang.prefix_cache import can_be_walked, pages_of
from kvcanary_agent.canary.canary import Canary
from kvcanary_agent.canary.condemned import Condemned

# A page that must wait is looked for every so many steps, and whenever the scheduler is idle: a look lists the tree.
_STEPS_BETWEEN_LOOKS = 32
# The first time so small a part of what may be evicted is, then twice as much each time.
_FIRST_SHARE = 16


class Containment:
    """The corrupt pages of one pool that the tree may still hold. All calls come from the scheduler's thread."""

    def __init__(self, condemned: Condemned, page_size: int) -> None:
        self.part = runtime.FailOpen("sglang", "eviction")
        self._condemned = condemned
        self._page_size = page_size
        self._waiting: set[int] = set()
        self._held: set[int] = set()
        self._steps = 0

    def act(self, tree_cache: Any, is_idle: Callable[[], bool]) -> None:
        """Evict what can be evicted now.

        Args:
            tree_cache: The scheduler's prefix cache.
            is_idle: Whether there is no request: what the tree does not hold then it never will.
        """
        fresh = [page for _, page in self._condemned.take()]
        self._waiting.update(fresh)
        self._steps += 1
        if not self._waiting:
            return
        idle = is_idle()
        if not (fresh or idle or self._steps % _STEPS_BETWEEN_LOOKS == 0):
            return
        if not can_be_walked(tree_cache):
            runtime.not_covered("sglang", "eviction", f"{type(tree_cache).__name__} does not list what it holds")
            self._waiting.clear()
            return
        unlocked = self._waiting & pages_of(tree_cache, self._page_size, unlocked_only=True)
        left = self._evict(tree_cache, unlocked) if unlocked else unlocked
        gone = unlocked - left
        cached = self._waiting & pages_of(tree_cache, self._page_size, unlocked_only=False)
        held = cached - self._held
        self._waiting -= gone
        if idle:
            self._waiting &= cached
        self._held = (self._held | held) & self._waiting
        runtime.evicted("sglang", sorted(gone), {"evicted": len(gone), "held": len(held)})

    def _evict(self, tree_cache: Any, pages: set[int]) -> set[int]:
        """Evict until the tree holds none of these pages; those that are left, if it does not come to that."""
        parameters = sys.modules["sglang.srt.mem_cache.base_prefix_cache"].EvictParams
        share, left = _FIRST_SHARE, pages
        while left:
            tokens = max(self._page_size, tree_cache.evictable_size() // share)
            if not tree_cache.evict(parameters(num_tokens=tokens)).num_tokens_evicted:
                break
            share = max(1, share // 2)
            left = left & pages_of(tree_cache, self._page_size, unlocked_only=False)
        return left


def containment_of(runner: Any, canary: Canary) -> Containment | None:
    """What takes corrupt pages of a runner's pool out of the tree; None if that is not asked for, or cannot be."""
    condemned = runtime.condemned_blocks(canary)
    if condemned is None:
        return None
    arguments = runner.server_args
    if canary.layout.world_size > 1 or getattr(arguments, "pp_size", 1) > 1:
        reason = "each rank has a tree of its own, and they must stay alike"
    elif len(canary.layout.groups) > 1:
        reason = "slots of a sliding window are not those that the tree names"
    else:
        return Containment(condemned, canary.layout.groups[0].block_size)
    runtime.not_covered("sglang", "eviction", reason)
    return None


def patch_scheduler_turns(cls: type, containment_of: Callable[[Any], Containment | None]) -> None:
    """Patch ``Scheduler`` where it looks for what to do next.

    Args:
        cls: The class.
        containment_of: Of a scheduler; None if it has none.
    """
    problem = runtime.unexpected_methods(cls, {"get_next_batch_to_run": (), "is_fully_idle": ()})
    if problem is not None:
        runtime.not_covered("sglang", "eviction", problem)
        return

    def around_next_batch(call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
        containment = containment_of(scheduler)
        if containment is not None and containment.part.on:
            with containment.part:
                containment.act(scheduler.tree_cache, scheduler.is_fully_idle)
        return call(*args, **kwargs)

    runtime.patch_class("sglang", cls, {"get_next_batch_to_run": around_next_batch})
