"""Violations that belong together: of one pool, close in time. A diagnosis looks at them as one."""

from __future__ import annotations

from collections import Counter, deque

from kvcanary_agent.canary.violation import Kind, Violation

QUIET_S = 5.0
"""A burst ends when so long nothing more was found. A damaged slot is found part by part, over many steps."""

MAX_S = 60.0
"""A burst ends after this, even if it goes on."""

MAX_KEPT = 512
"""Violations of a burst that are kept, half of them the first; of the others only the numbers."""


class PoolBurst:
    """What was found in one pool from one quiet period to the next.

    Attributes:
        number: Of the burst, from 1, in this process.
        first_ns, last_ns: When the first and the last violation came, nanoseconds since the epoch.
        kinds: How many violations of each kind.
    """

    def __init__(self, number: int, now_ns: int) -> None:
        self.number = number
        self.first_ns = self.last_ns = now_ns
        self.kinds: Counter[Kind] = Counter()
        self._first: list[Violation] = []
        self._last: deque[Violation] = deque(maxlen=MAX_KEPT // 2)

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def kept(self) -> list[Violation]:
        """The first and the last violations, in the order in which they came."""
        return [*self._first, *self._last]

    def add(self, violation: Violation, now_ns: int) -> None:
        self.last_ns = max(now_ns, self.last_ns)
        self.kinds[violation.kind] += 1
        if len(self._first) < MAX_KEPT // 2:
            self._first.append(violation)
        else:
            self._last.append(violation)

    def goes_on(self, now_ns: int) -> bool:
        """Whether what is found now still belongs to it."""
        return now_ns - self.last_ns < QUIET_S * 1e9 and now_ns - self.first_ns < MAX_S * 1e9
