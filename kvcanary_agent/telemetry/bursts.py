"""Violations that belong together: of one pool, close in time. A diagnosis looks at them as one."""

from __future__ import annotations

from collections import Counter, deque

from kvcanary_agent.canary.violation import Kind, Violation
from kvcanary_agent.telemetry.found import FoundViolation

QUIET_S = 5.0
"""A burst ends when so long nothing more was found. A damaged slot is found part by part, over many steps."""

MAX_S = 60.0
"""A burst ends after this, even if it goes on."""

NEAR_STEPS = 4
"""What has nothing else in common with a burst belongs to it if it comes within so many steps."""

MAX_KEPT = 512
"""Violations of a burst that are kept, half of them the first; of the others only the numbers."""


class PoolBurst:
    """What was found in one pool from one quiet period to the next.

    Attributes:
        number: Of the burst, from 1, in this process.
        first: The violation that it began with.
        last_ns: When the last one came, nanoseconds since the epoch.
        kinds: How many violations of each kind.
    """

    def __init__(self, number: int, first: FoundViolation) -> None:
        self.number = number
        self.first = first
        self.last_ns = first.time_ns
        self.kinds: Counter[Kind] = Counter()
        self._last_step = first.violation.step
        self._blocks: set[tuple[str, int]] = set()
        self._requests: set[str | None] = set()
        self._first: list[Violation] = []
        self._last: deque[Violation] = deque(maxlen=MAX_KEPT // 2)

    @property
    def kept(self) -> list[Violation]:
        """The first and the last violations, in the order in which they came."""
        return [*self._first, *self._last]

    def add(self, found: FoundViolation) -> None:
        violation, now_ns = found.violation, found.time_ns
        self.last_ns = max(now_ns, self.last_ns)
        self.kinds[violation.kind] += 1
        self._last_step = max(violation.step, self._last_step)
        if len(self._blocks) < MAX_KEPT:
            self._blocks.add((violation.group, violation.block))
            self._requests |= {violation.request, violation.writer} - {None}
        if len(self._first) < MAX_KEPT // 2:
            self._first.append(violation)
        else:
            self._last.append(violation)

    def goes_on(self, found: FoundViolation) -> bool:
        """Whether what was found now still belongs to it: it comes soon, and is next to it in steps or otherwise."""
        violation, now_ns = found.violation, found.time_ns
        in_time = now_ns - self.last_ns < QUIET_S * 1e9 and now_ns - self.first.time_ns < MAX_S * 1e9
        return in_time and (
            violation.step - self._last_step <= NEAR_STEPS
            or violation.kind in self.kinds
            or (violation.group, violation.block) in self._blocks
            or bool({violation.request, violation.writer} & self._requests)
        )
