"""The telemetry of one pool: what its canary reports to."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcanary_agent.canary.violation import CheckCounts, Neighbourhood, Sink, Violation
from kvcanary_agent.telemetry import semconv
from kvcanary_agent.telemetry.bursts import QUIET_S
from kvcanary_agent.telemetry.diagnosis import Burst, diagnose
from kvcanary_agent.telemetry.found import FoundViolation
from kvcanary_agent.telemetry.incidents.document import StepContext
from kvcanary_agent.telemetry.log_lines import ViolationLines
from kvcanary_agent.telemetry.pool_facts import PoolFacts
from kvcanary_agent.telemetry.tallies import PoolKey, PoolTally

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from kvcanary_agent.telemetry.exporting import Exporting
    from kvcanary_agent.telemetry.process import Telemetry


FLUSH_TIMEOUT_S = 1.0

_REMEMBERED_STEPS = 4
_MAX_REQUESTS = 64
TRACED = 4096
"""Requests of a pool whose traces are remembered; of more, the oldest are forgotten."""


class PoolTelemetry(Sink):
    """What the canary of one pool reports to. Made by :meth:`Telemetry.open_pool`.

    Every method is cheap, never waits and never raises. The thread that runs the pool's steps is the only one to call
    them.
    """

    def __init__(self, telemetry: Telemetry, key: PoolKey, engine_version: str, facts: PoolFacts) -> None:
        self._telemetry = telemetry
        self._key = key
        self._facts = facts
        self._attributes: dict[str, str | int] = {
            semconv.ENGINE: key.engine,
            semconv.ENGINE_VERSION: engine_version,
            semconv.POOL: key.pool,
            semconv.RANK: key.rank,
        }
        self._phase_attributes: dict[str, dict[str, str | int]] = {}
        self._tally: PoolTally | None = None
        self._exporting: Exporting | None = None
        self._records_bytes: int | None = None
        self._steps: dict[int, StepContext] = {}
        self._slots_around: Callable[[str, int], Neighbourhood | None] | None = None
        self._found_last = -math.inf
        self._listener: Callable[[Violation], None] | None = None
        self._traces: OrderedDict[str, Mapping[str, str]] = OrderedDict()
        # For violations that cannot be reported in any other way.
        self._lines = ViolationLines()

    def start(self) -> None:
        """Builds what is not yet built in this process; called by :meth:`Telemetry.open_pool`."""
        try:
            self._attach()
        except Exception as error:
            self._telemetry.failures.log("starting telemetry", error)

    def close(self) -> None:
        """The pool is gone: it no longer counts among the pools, and its records' memory is given back."""
        self._records_bytes = self._slots_around = None
        if self._tally is not None:
            self._tally.records_bytes = None

    def flush(self) -> None:
        """Waits until what was reported has been exported, at most :data:`FLUSH_TIMEOUT_S` seconds."""
        try:
            self._telemetry.flush(FLUSH_TIMEOUT_S)
        except Exception as error:
            self._telemetry.failures.log("exporting before a step is failed", error)

    def coverage(self, subject: str, covered: bool, reason: str = "") -> None:
        """States whether something of this pool (a layer, a check) is checked; see :meth:`Telemetry.coverage`."""
        self._telemetry.coverage(self._key.engine, subject, covered, reason, pool=self._key.pool)

    def traced(self, request: str, headers: Mapping[str, str]) -> None:
        """Remembers what trace a request belongs to: its violations are reported as part of it."""
        self._traces.pop(request, None)
        if headers:
            self._traces[request] = headers
            if len(self._traces) > TRACED:
                self._traces.popitem(last=False)

    def listen(self, listener: Callable[[Violation], None]) -> None:
        """Has ``listener`` hear of every violation, too, on the thread that finds it."""
        self._listener = listener

    def violation(self, violation: Violation) -> None:
        """Counts a violation and has it logged and exported at once by another thread."""
        if self._listener is not None:
            self._listener(violation)
        try:
            tally, exporting = self._attach()
            layer = self._telemetry.tallies.bounded_layer(violation.layer)
            series = (str(violation.kind), layer, violation.part or "")
            tally.violations[series] = tally.violations.get(series, 0) + 1
            self._telemetry.status_changed()
            found = FoundViolation(
                violation=violation,
                attributes=self._attributes,
                facts=self._facts,
                step=self._steps.get(violation.step),
                neighbourhood=self._neighbourhood(violation),
                tally=tally,
                trace=self._trace_of(violation),
            )
            if not exporting.reporter.violation(found):
                tally.lost += 1
        except Exception as error:
            self._telemetry.failures.log("reporting a violation", error)
            self._log_without_opentelemetry(violation)

    def step_started(self, step: int, requests: Sequence[str], num_new_tokens: int) -> None:
        """Remembers what the step is doing, for incidents; a GPU reports what it found one step later."""
        if self._telemetry.writes_incidents:
            steps, first = self._steps, tuple(requests[:_MAX_REQUESTS])
            steps[step] = StepContext(
                step=step, requests=first, num_requests=len(requests), num_new_tokens=num_new_tokens
            )
            if len(steps) > _REMEMBERED_STEPS:
                del steps[next(iter(steps))]

    def look_with(self, slots_around: Callable[[str, int], Neighbourhood | None]) -> None:
        """How to look at the records around a violation; it is done for incident files alone, once for each burst."""
        self._slots_around = slots_around

    def _neighbourhood(self, violation: Violation) -> Neighbourhood | None:
        now = time.monotonic()
        quiet, self._found_last = now - self._found_last >= QUIET_S, now
        if not quiet or not self._telemetry.writes_incidents or self._slots_around is None:
            return None
        return self._slots_around(violation.group, violation.block)

    def _trace_of(self, violation: Violation) -> Context | None:
        """What the request of a violation brought along, if it is traced."""
        headers = self._traces.get(violation.request or "")
        if headers is None:
            return None
        # Not before there is a pool: OpenTelemetry is imported with the first.
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract(headers)

    def _log_without_opentelemetry(self, violation: Violation) -> None:
        try:
            diagnosis = diagnose(violation, Burst([violation]))
            self._lines.write(self._key.engine, violation, diagnosis, already_exported=False)
        except Exception as error:
            self._telemetry.failures.log("logging a violation", error)

    def pass_finished(
        self, phase: str, step: int, start_ns: int, end_ns: int, counts: CheckCounts, violations: tuple[Violation, ...]
    ) -> None:
        """Counts the slots that were checked and records the pass's duration and its span."""
        try:
            tally, exporting = self._attach()
            total = 0
            for check, (compared, failures) in counts.slots.items():
                passed_and_failed = tally.checks.get(check)
                if passed_and_failed is None:
                    passed_and_failed = tally.checks[check] = [0, 0]
                passed_and_failed[0] += compared - failures
                passed_and_failed[1] += failures
                total += compared
            exporting.step_duration.record((end_ns - start_ns) * 1e-9, self._of_phase(phase))
            if not violations and not exporting.exports_spans:
                return
            attributes = {
                **self._attributes,
                semconv.STEP: step,
                semconv.CHECKS: total,
                semconv.OUTCOME: "violation" if violations else "ok",
            }
            name = f"kvcanary.{phase}"
            if violations:
                traces = [trace for trace in map(self._trace_of, violations) if trace is not None]
                exporting.reporter.failed_pass(name, attributes, start_ns, end_ns, violations, traces)
            else:
                exporting.tracer.start_span(name, attributes=attributes, start_time=start_ns).end(end_ns)
        except Exception as error:
            self._telemetry.failures.log("reporting a pass of checks", error)

    def lost_violations(self, count: int) -> None:
        """Counts violations whose details the canary could not keep."""
        try:
            tally, _ = self._attach()
            tally.lost += count
        except Exception as error:
            self._telemetry.failures.log("counting lost violations", error)

    def drill(self, kind: str, step: int, description: str) -> None:
        """Announces, in the log and as a log record, that a drill has injected a fault."""
        try:
            tally, exporting = self._attach()
            tally.drills[kind] = tally.drills.get(kind, 0) + 1
            attributes = {**self._attributes, semconv.KIND: kind, semconv.STEP: step}
            exporting.reporter.drill(f"DRILL: {kind} injected at step {step}: {description}", attributes)
        except Exception as error:
            self._telemetry.failures.log("announcing a drill", error)

    def records_memory(self, num_bytes: int, pool_bytes: int) -> None:
        """States the memory of the canary's records and scratch: the pool is watched from now on, which is exported at
        once rather than at the end of the first interval."""
        self._records_bytes = num_bytes
        try:
            tally, exporting = self._attach()
            tally.records_bytes = num_bytes
            exporting.request_export()
        except Exception as error:
            self._telemetry.failures.log("reporting memory", error)

    def detach(self) -> None:
        """Drops what belongs to the process; the next report attaches to what the process has then."""
        self._tally = None
        self._exporting = None

    def _attach(self) -> tuple[PoolTally, Exporting]:
        if self._tally is not None and self._exporting is not None:
            return self._tally, self._exporting
        exporting = self._telemetry.exporting()
        tally = self._telemetry.tallies.pool(self._key)
        tally.records_bytes = self._records_bytes
        self._tally, self._exporting = tally, exporting
        return tally, exporting

    def _of_phase(self, phase: str) -> dict[str, str | int]:
        attributes = self._phase_attributes.get(phase)
        if attributes is None:
            attributes = {
                semconv.ENGINE: self._key.engine,
                semconv.POOL: self._key.pool,
                semconv.RANK: self._key.rank,
                semconv.PHASE: phase,
            }
            self._phase_attributes[phase] = attributes
        return attributes
