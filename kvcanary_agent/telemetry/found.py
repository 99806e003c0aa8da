"""A violation with all that a report says about it, on its way from the step's thread to the reporter's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcanary_agent.canary.violation import Neighbourhood, Violation
from kvcanary_agent.telemetry.incidents.document import StepContext
from kvcanary_agent.telemetry.pool_facts import PoolFacts
from kvcanary_agent.telemetry.tallies import PoolTally

if TYPE_CHECKING:
    from opentelemetry.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundViolation:
    """A violation in its pool.

    Attributes:
        attributes, facts, tally: Of the pool.
        step: What the violation's step was doing, if incidents are written.
        neighbourhood: The slots around it, if incidents are written and it is the first of a burst.
        trace: The trace that the violation's request belongs to; None if that is not known.
        time_ns: When it was found, nanoseconds since the epoch.
    """

    violation: Violation
    attributes: Mapping[str, str | int]
    facts: PoolFacts
    step: StepContext | None
    neighbourhood: Neighbourhood | None
    tally: PoolTally
    trace: Context | None = None
    time_ns: int = field(default_factory=time.time_ns)
