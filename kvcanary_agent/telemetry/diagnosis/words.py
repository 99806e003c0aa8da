"""Facts of a violation in words, for the sentences of causes: each says something sensible when the fact is missing."""

from __future__ import annotations

from kvcanary_agent.canary.violation import Kind, Violation


def place(violation: Violation) -> str:
    return f"block {violation.block}, slot {violation.slot} (group {violation.group})"


def who(violation: Violation) -> str:
    """The request at work."""
    if violation.request is None:
        return "a padded row" if violation.kind == Kind.ADDRESS else "no request in particular"
    return violation.request if violation.position is None else f"{violation.request} (position {violation.position})"


def bytes_of(violation: Violation) -> str:
    return f"layer {violation.layer}, part {violation.part or 'unknown'}" if violation.layer else "some layer"


def writer_of(violation: Violation) -> str:
    return violation.writer or "an unknown request"


def written(violation: Violation) -> str:
    """When the slot was written, with a blank before it."""
    return "" if violation.written_step is None else f" at step {violation.written_step}"


def recorded(violation: Violation) -> str:
    return "some position" if violation.recorded_position is None else f"position {violation.recorded_position}"


def compared(violation: Violation) -> str:
    """The two values that differ; empty if none are known."""
    if violation.found is None and violation.expected is None:
        return ""
    return f"found {violation.found or 'nothing'}, wanted {violation.expected or 'nothing'}"


def told(violation: Violation) -> str:
    return violation.detail or "no more is known"


def damage(violation: Violation) -> str:
    """Whose bytes changed, where and when it was seen."""
    return (
        f"{place(violation)}: the bytes of {bytes_of(violation)} changed after {writer_of(violation)} wrote "
        f"them{written(violation)}, seen at step {violation.step}"
    )
