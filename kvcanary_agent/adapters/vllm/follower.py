"""The worker's side of the allocator's events: what the scheduler's process sends is told to the pool's canary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.events import Action, BlockEvent, StepEvents, attached_to
from kvcanary_agent.canary.canary import Canary


class AllocatorFollower:
    """Follows the allocator for one pool's canary, for as long as no event is missing.

    A block that a request uses without holding it is a violation only if every act of the allocator since the start has
    been told. So following begins with a scheduler's first output and ends where one without events, or with a gap
    before it, arrives.

    Attributes:
        salts: The ``cache_salt`` of each request of the last step that has one.
        step: What came with the last output; None if it came without events.
    """

    def __init__(self, canary: Canary, group_ids: Sequence[int]) -> None:
        """
        Args:
            canary: Of the worker's pool.
            group_ids: For each group of its layout, vLLM's number of the group.
        """
        self.salts: dict[str, str] = {}
        self.step: StepEvents | None = None
        self._canary = canary
        self._group_ids = group_ids
        self._outputs = 0

    def apply(self, scheduler_output: Any) -> bool:
        """Tell the canary what happened before this step; whether that was everything that happened."""
        events = self.step = attached_to(scheduler_output)
        # Before the new requests: an id may be used again in the output that says that it is finished.
        for request in scheduler_output.finished_req_ids:
            self.salts.pop(request, None)
        if events is None:
            self._lost_track("the scheduler's process does not tell what the allocator does")
            return False
        self.salts.update(events.salts)
        if events.number == 1:
            self._canary.follow_ownership(True)
            runtime.covered("vllm", "ownership")
        elif events.number != self._outputs + 1:
            self._lost_track(f"the scheduler's output {events.number} follows its output {self._outputs} here")
            return False
        self._outputs = events.number
        for event in events.blocks:
            self._apply(event)
        return True

    def _lost_track(self, reason: str) -> None:
        runtime.not_covered("vllm", "ownership", reason)
        if self._outputs:
            self._outputs = 0
            self._canary.follow_ownership(False)

    def _apply(self, event: BlockEvent) -> None:
        if event.action is Action.INDEX_RESET:
            self._canary.index_reset()
            return
        for index, group in enumerate(self._group_ids):
            if group != event.group:
                # Blocks of one id lie over the same bytes in every group, covered or not.
                if event.action is Action.ALLOCATED:
                    self._canary.recycled(event.blocks, group=index)
            elif event.action is Action.ALLOCATED:
                self._canary.allocated(event.blocks, group=index, request=event.request)
            elif event.action is Action.SHARED:
                self._canary.shared(event.blocks, group=index, request=event.request)
            else:
                cached = event.action is Action.FREED_CACHED
                self._canary.freed(event.blocks, group=index, request=event.request, cached=cached)
