"""From what is wrong with slots to what probably went wrong in the server, in an engineer's words.

Each rule of :mod:`.rules` looks at one violation in the light of its burst, everything that was found around it, and
yields the causes that it sees, each with a confidence. Rules are independent of each other; a diagnosis is all their
causes, the likeliest first. What a cause is called and what to try next is in :mod:`.causes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvcanary_agent.canary.violation import Violation
from kvcanary_agent.telemetry.diagnosis.burst import Burst
from kvcanary_agent.telemetry.diagnosis.causes import Cause, Diagnosis
from kvcanary_agent.telemetry.diagnosis.rules import causes_of

__all__ = ["Burst", "Cause", "Diagnosis", "diagnose", "diagnose_burst"]

_OF_A_CONSEQUENCE = 0.7
"""What is left of a cause's confidence if it explains only what was found in later steps than the first."""


def diagnose(violation: Violation, burst: Burst) -> Diagnosis:
    """Names the probable causes of one violation.

    Args:
        violation: What was found.
        burst: What was found around it in the same pool; it may lack the violation itself.
    """
    return _ranked(causes_of(violation, burst))


def diagnose_burst(violations: Sequence[Violation], parts: Mapping[str, int]) -> Diagnosis:
    """Names the probable causes of all that was found: what broke first explains what followed from it.

    Args:
        violations: At least one, of one pool, in the order in which they were found.
        parts: For each group of layers how many parts (K, V, scales of each layer) a slot of it has; may be empty.
    """
    burst = Burst(violations, parts)
    first_step = violations[0].step
    found: dict[str, Cause] = {}
    for violation in violations:
        for cause in causes_of(violation, burst):
            if violation.step != first_step:
                cause = replace(cause, confidence=cause.confidence * _OF_A_CONSEQUENCE)
            known = found.get(cause.cause)
            if known is None or cause.confidence > known.confidence:
                found[cause.cause] = cause
    return _ranked(list(found.values()))


def _ranked(causes: Sequence[Cause]) -> Diagnosis:
    return Diagnosis(causes=tuple(sorted(causes, key=lambda cause: -cause.confidence)))
