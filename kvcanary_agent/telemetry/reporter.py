"""Turns violations into log lines, log records and spans, away from the thread that runs the model's steps."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry import trace
from opentelemetry._logs import Logger, SeverityNumber
from opentelemetry.context import Context, get_current

from kvcanary_agent.canary.violation import Violation
from kvcanary_agent.telemetry import semconv
from kvcanary_agent.telemetry.bursts import PoolBurst
from kvcanary_agent.telemetry.diagnosis import Burst, Diagnosis, diagnose, diagnose_burst
from kvcanary_agent.telemetry.failures import Failures
from kvcanary_agent.telemetry.found import FoundViolation
from kvcanary_agent.telemetry.incidents import Incident, IncidentRecorder
from kvcanary_agent.telemetry.log_lines import ViolationLines

MAX_PENDING = 4096
"""Reports that wait to be written; beyond this their details are dropped."""

GATHER_S = 0.05
"""The longest that a violation waits for others of its step, which change what it means."""

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassReport:
    name: str
    attributes: Attributes
    start_ns: int
    end_ns: int
    violations: tuple[Violation, ...]
    context: Context
    traces: Sequence[Context]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrillReport:
    sentence: str
    attributes: Attributes
    time_ns: int


_Report = FoundViolation | _PassReport | _DrillReport


class Reporter:
    """A queue of what was found, and the thread that empties it.

    Args:
        tracer, logger: Where spans and log records go.
        logs_are_exported: Whether log records given to ``logger`` go anywhere.
        request_export: Called, on the reporter's thread, when all that was pending has been reported.
        incidents: Who writes incident files, if anybody does.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        logger: Logger,
        logs_are_exported: Callable[[], bool],
        request_export: Callable[[], None],
        incidents: IncidentRecorder | None = None,
    ) -> None:
        self._tracer = tracer
        self._otel_logger = logger
        self._logs_are_exported = logs_are_exported
        self._request_export = request_export
        self._incidents = incidents
        self._pending: queue.SimpleQueue[_Report | threading.Event | None] = queue.SimpleQueue()
        self._lines = ViolationLines()
        self._bursts: dict[str, PoolBurst] = {}
        self._num_bursts = 0
        self._diagnoses: dict[Violation, Diagnosis] = {}
        self._failures = Failures()
        self._waiting_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvcanary-reports", daemon=True)
        self._thread.start()

    def violation(self, found: FoundViolation) -> bool:
        """Has a violation logged, and made part of an incident; never waits.

        Returns:
            False if too many reports are pending and this one was dropped.
        """
        return self._submit(found)

    def failed_pass(
        self,
        name: str,
        attributes: Attributes,
        start_ns: int,
        end_ns: int,
        violations: tuple[Violation, ...],
        traces: Sequence[Context] = (),
    ) -> bool:
        """Has the span of a pass that found ``violations`` written; never waits.

        It becomes a child of the calling thread's current span.

        Args:
            name: The span's name.
            attributes: The span's attributes.
            start_ns, end_ns: The span's times, nanoseconds since the epoch.
            traces: Traces of the violations' requests, to which the span is linked.

        Returns:
            False if too many reports are pending and this one was dropped.
        """
        return self._submit(
            _PassReport(
                name=name,
                attributes=attributes,
                start_ns=start_ns,
                end_ns=end_ns,
                violations=violations,
                context=get_current(),
                traces=traces,
            )
        )

    def drill(self, sentence: str, attributes: Attributes) -> bool:
        """Has an injected fault logged; never waits. False if too many reports are pending and it was dropped."""
        return self._submit(_DrillReport(sentence=sentence, attributes=attributes, time_ns=time.time_ns()))

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything submitted so far is reported (not exported); False after ``timeout_s`` seconds."""
        reached = threading.Event()
        self._pending.put(reached)
        return reached.wait(timeout_s)

    @property
    def waiting_since(self) -> float | None:
        """Since when reports wait to be written (monotonic seconds); None if none do."""
        return self._waiting_since

    def close(self) -> None:
        """Lets the thread end after what is pending; does not wait for it."""
        self._pending.put(None)

    def join(self, deadline: float) -> bool:
        """Waits for the thread to end after :meth:`close`, but not beyond ``deadline``; whether it has ended."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _submit(self, report: _Report) -> bool:
        if self._pending.qsize() >= MAX_PENDING:
            return False
        self._pending.put(report)
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        return True

    def _run(self) -> None:
        while True:
            try:
                item = self._pending.get(timeout=self._lines.seconds_to_summary())
            except queue.Empty:
                self._attempt("logging violations", self._lines.end_window)
                continue
            if isinstance(item, FoundViolation):
                together, item = self._gather(item)
                self._attempt("reporting violations", partial(self._report_violations, together))
            if item is None:
                self._attempt("logging violations", self._lines.end_window)
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            if isinstance(item, _DrillReport):
                self._attempt("announcing a drill", partial(self._report_drill, item))
            elif isinstance(item, _PassReport):
                self._attempt("reporting a pass of checks", partial(self._report_pass, item))
            if self._pending.empty():
                self._request_export()
                self._waiting_since = None

    def _gather(self, first: FoundViolation) -> tuple[list[FoundViolation], _Report | threading.Event | None]:
        """The violations that come one after the other, and what comes then; the last of them if nothing else does."""
        together = [first]
        deadline = time.monotonic() + GATHER_S
        while len(together) < MAX_PENDING:
            try:
                item = self._pending.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if not isinstance(item, FoundViolation):
                return together, item
            together.append(item)
        return together, together[-1]

    def _attempt(self, part: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:
            self._failures.log(part, error)
            return False
        return True

    def _report_violations(self, reports: Sequence[FoundViolation]) -> None:
        of_pool: defaultdict[str, list[FoundViolation]] = defaultdict(list)
        for report in reports:
            of_pool[report.violation.pool].append(report)
        for pool, together in of_pool.items():
            known = self._burst(pool, together[0])
            for report in together:
                known.add(report)
            if self._incidents is not None:
                self._attempt("recording an incident", partial(self._record, self._incidents, known))
            burst = Burst(known.kept, together[0].facts.parts)
            for report in together:
                self._attempt("reporting a violation", partial(self._report_violation, report, burst))

    def _burst(self, pool: str, found: FoundViolation) -> PoolBurst:
        known = self._bursts.get(pool)
        if known is None or not known.goes_on(found):
            self._num_bursts += 1
            known = self._bursts[pool] = PoolBurst(self._num_bursts, found)
        return known

    def _record(self, incidents: IncidentRecorder, known: PoolBurst) -> None:
        first, kept = known.first, known.kept
        incident = Incident(
            first_ns=first.time_ns,
            last_ns=known.last_ns,
            attributes=first.attributes,
            facts=first.facts,
            kinds={str(kind): count for kind, count in known.kinds.items()},
            violations=tuple(kept),
            diagnosis=diagnose_burst(kept, first.facts.parts),
            step=first.step,
            neighbourhood=first.neighbourhood,
        )
        incidents.update(known.number, incident, first.tally.count_incident)

    def _report_violation(self, report: FoundViolation, burst: Burst) -> None:
        violation = report.violation
        diagnosis = diagnose(violation, burst)
        if len(self._diagnoses) >= MAX_PENDING:
            self._diagnoses.clear()
        self._diagnoses[violation] = diagnosis
        # Before the line: a handler of the host may block or raise.
        exported = self._logs_are_exported() and self._attempt(
            "exporting a violation's log record", partial(self._emit, report, diagnosis)
        )
        self._lines.write(str(report.attributes[semconv.ENGINE]), violation, diagnosis, already_exported=exported)

    def _emit(self, report: FoundViolation, diagnosis: Diagnosis) -> None:
        self._otel_logger.emit(
            timestamp=report.time_ns,
            severity_number=SeverityNumber.ERROR,
            severity_text="ERROR",
            event_name=semconv.VIOLATION_EVENT,
            body=diagnosis.sentence,
            attributes={**report.attributes, **semconv.violation_attributes(report.violation, diagnosis)},
            context=report.trace,
        )

    def _report_drill(self, report: _DrillReport) -> None:
        self._otel_logger.emit(
            timestamp=report.time_ns,
            severity_number=SeverityNumber.WARN,
            severity_text="WARN",
            event_name=semconv.DRILL_EVENT,
            body=report.sentence,
            attributes=report.attributes,
        )
        logging.getLogger(semconv.SCOPE).warning("kvcanary: %s", report.sentence)

    def _report_pass(self, report: _PassReport) -> None:
        # A request may have several violations; its span is linked to once.
        linked = {span.span_id: span for span in (trace.get_current_span(c).get_span_context() for c in report.traces)}
        span = self._tracer.start_span(
            report.name,
            context=report.context,
            attributes=report.attributes,
            links=[trace.Link(context) for context in linked.values() if context.is_valid],
            start_time=report.start_ns,
        )
        for violation in report.violations:
            diagnosis = self._diagnoses.pop(violation, None) or diagnose(violation, Burst(report.violations))
            attributes = semconv.violation_attributes(violation, diagnosis)
            span.add_event(semconv.VIOLATION_EVENT, attributes, timestamp=report.end_ns)
        kinds = sorted({str(violation.kind) for violation in report.violations})
        span.set_status(trace.StatusCode.ERROR, f"{len(report.violations)} violations: {', '.join(kinds)}")
        span.end(report.end_ns)
