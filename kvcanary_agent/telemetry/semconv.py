"""The names this agent uses in OpenTelemetry: its own ``kvcanary.*`` namespace, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcanary_agent.canary.violation import Violation
    from kvcanary_agent.telemetry.diagnosis import Diagnosis

SCOPE = "kvcanary_agent"
"""Instrumentation scope, and the name of the ``logging`` logger."""

ERROR_TYPE = "error.type"
"""The standard attribute; on ``kvcanary.checks`` only where slots failed."""

ENGINE = "kvcanary.engine"
ENGINE_VERSION = "kvcanary.engine.version"
POOL = "kvcanary.pool"
RANK = "kvcanary.rank"
WORLD_SIZE = "kvcanary.world_size"
MODE = "kvcanary.mode"
CONTENT = "kvcanary.content"
CHECK = "kvcanary.check"
CHECKS = "kvcanary.checks"
KIND = "kvcanary.kind"
LAYER = "kvcanary.layer"
PART = "kvcanary.part"
PHASE = "kvcanary.phase"
SUBJECT = "kvcanary.subject"
REASON = "kvcanary.reason"
OUTCOME = "kvcanary.outcome"
STEP = "kvcanary.step"
GROUP = "kvcanary.group"
SLOT = "kvcanary.slot"
BLOCK = "kvcanary.block"
OFFSET = "kvcanary.offset"
REQUEST = "kvcanary.request"
POSITION = "kvcanary.position"
EXPECTED = "kvcanary.expected"
FOUND = "kvcanary.found"
WRITER = "kvcanary.writer"
WRITTEN_STEP = "kvcanary.written_step"
RECORDED_POSITION = "kvcanary.recorded_position"
BLOCK_HISTORY = "kvcanary.block_history"
DETAIL = "kvcanary.detail"
CAUSE = "kvcanary.cause"
CONFIDENCE = "kvcanary.confidence"
INCIDENTS = "kvcanary.incidents"

DRILL_EVENT = "kvcanary.drill"
"""Name of the log record's event when a drill has injected a fault."""

VIOLATION_EVENT = "kvcanary.violation"
"""Name of the span event and of the log record's event."""

AttributeValue = str | int | float | tuple[str, ...]


def violation_attributes(violation: Violation, diagnosis: Diagnosis) -> dict[str, AttributeValue]:
    """Everything that is known about a violation, for spans and logs: request ids are in it, so never for metrics."""
    known: dict[str, AttributeValue | None] = {
        KIND: str(violation.kind),
        POOL: violation.pool,
        GROUP: violation.group,
        SLOT: violation.slot,
        BLOCK: violation.block,
        OFFSET: violation.offset,
        STEP: violation.step,
        REQUEST: violation.request,
        POSITION: violation.position,
        LAYER: violation.layer,
        PART: violation.part,
        EXPECTED: violation.expected,
        FOUND: violation.found,
        WRITER: violation.writer,
        WRITTEN_STEP: violation.written_step,
        RECORDED_POSITION: violation.recorded_position,
        BLOCK_HISTORY: violation.block_history or None,
        DETAIL: violation.detail or None,
        CAUSE: diagnosis.cause,
        CONFIDENCE: diagnosis.confidence,
    }
    return {name: value for name, value in known.items() if value is not None}
