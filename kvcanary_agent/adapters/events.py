"""What happened to a pool since its last step.

Events wait until the next step: it uses the pool as the scheduler had arranged it by then, while the scheduler itself
may be a step ahead, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from kvcanary_agent import runtime
from kvcanary_agent.canary.canary import Canary
from kvcanary_agent.kernels.transit import is_asynchronous

Event = Callable[[Canary], None]


class Events:
    """Events of one pool, in order."""

    def __init__(self, part: runtime.FailOpen) -> None:
        """Start with none.

        Args:
            part: Switched off when an event cannot be followed: without its events a step cannot be judged.
        """
        self._waiting: list[tuple[Event, torch.Tensor | None]] = []
        self._said: set[Hashable] = set()
        self.part = part

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: Event, numbers: torch.Tensor | None = None) -> None:
        """Something has happened.

        Args:
            event: Tells the canary.
            numbers: What it reads of the device, if that was made on the scheduler's stream.
        """
        self._said.clear()
        self._waiting.append((event, numbers))

    def add_once(self, key: Hashable, event: Event) -> None:
        """Something has happened that makes no difference when it happens again before anything else does.

        An engine that idles may do such a thing any number of times, and takes no step for which it waits.
        """
        if key not in self._said:
            self._said.add(key)
            self._waiting.append((event, None))

    def apply(self, canary: Canary) -> None:
        """Tell the canary, in order."""
        waiting, self._waiting = self._waiting, []
        self._said.clear()
        for event, numbers in waiting:
            if numbers is not None and is_asynchronous(numbers.device):
                # Its memory must not be given away before this stream, which is another one, has read it.
                numbers.record_stream(torch.cuda.current_stream(numbers.device))
            event(canary)
