"""Turns violations into log lines, log records and spans, away from the thread that runs the model's steps."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from opentelemetry import trace
from opentelemetry._logs import Logger, SeverityNumber
from opentelemetry.context import Context, get_current

from kvcanary_agent.canary.violation import Violation
from kvcanary_agent.telemetry import semconv
from kvcanary_agent.telemetry.diagnosis import Diagnosis, diagnose
from kvcanary_agent.telemetry.failures import Failures
from kvcanary_agent.telemetry.log_lines import ViolationLines

MAX_PENDING = 4096
"""Reports that wait to be written; beyond this their details are dropped."""

RECENT = 256
"""Violations of a pool that a diagnosis looks back at."""

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ViolationReport:
    violation: Violation
    attributes: Attributes
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassReport:
    name: str
    attributes: Attributes
    start_ns: int
    end_ns: int
    violations: tuple[Violation, ...]
    context: Context


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrillReport:
    sentence: str
    attributes: Attributes
    time_ns: int


_Report = _ViolationReport | _PassReport | _DrillReport


class Reporter:
    """A queue of what was found, and the thread that empties it.

    Args:
        tracer, logger: Where spans and log records go.
        logs_are_exported: Whether log records given to ``logger`` go anywhere.
        request_export: Called, on the reporter's thread, when all that was pending has been reported.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        logger: Logger,
        logs_are_exported: Callable[[], bool],
        request_export: Callable[[], None],
    ) -> None:
        self._tracer = tracer
        self._otel_logger = logger
        self._logs_are_exported = logs_are_exported
        self._request_export = request_export
        self._pending: queue.SimpleQueue[_Report | threading.Event | None] = queue.SimpleQueue()
        self._lines = ViolationLines()
        self._recent: defaultdict[str, deque[Violation]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._diagnoses: dict[Violation, Diagnosis] = {}
        self._failures = Failures()
        self._thread = threading.Thread(target=self._run, name="kvcanary-reports", daemon=True)
        self._thread.start()

    def violation(self, violation: Violation, attributes: Attributes) -> bool:
        """Has a violation logged; never waits.

        Args:
            attributes: Of the pool.

        Returns:
            False if too many reports are pending and this one was dropped.
        """
        return self._submit(_ViolationReport(violation=violation, attributes=attributes, time_ns=time.time_ns()))

    def failed_pass(
        self, name: str, attributes: Attributes, start_ns: int, end_ns: int, violations: tuple[Violation, ...]
    ) -> bool:
        """Has the span of a pass that found ``violations`` written; never waits.

        It becomes a child of the calling thread's current span.

        Args:
            name: The span's name.
            attributes: The span's attributes.
            start_ns, end_ns: The span's times, nanoseconds since the epoch.

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
        return True

    def _run(self) -> None:
        while True:
            try:
                item = self._pending.get(timeout=self._lines.seconds_to_summary())
            except queue.Empty:
                self._attempt("logging violations", self._lines.end_window)
                continue
            if item is None:
                self._attempt("logging violations", self._lines.end_window)
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            if isinstance(item, _ViolationReport):
                self._attempt("reporting a violation", partial(self._report_violation, item))
            elif isinstance(item, _DrillReport):
                self._attempt("announcing a drill", partial(self._report_drill, item))
            else:
                self._attempt("reporting a pass of checks", partial(self._report_pass, item))
            if self._pending.empty():
                self._request_export()

    def _attempt(self, part: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:
            self._failures.log(part, error)
            return False
        return True

    def _report_violation(self, report: _ViolationReport) -> None:
        violation = report.violation
        recent = self._recent[violation.pool]
        diagnosis = diagnose(violation, recent)
        recent.append(violation)
        if len(self._diagnoses) >= MAX_PENDING:
            self._diagnoses.clear()
        self._diagnoses[violation] = diagnosis
        # Before the line: a handler of the host may block or raise.
        exported = self._logs_are_exported() and self._attempt(
            "exporting a violation's log record", partial(self._emit, report, diagnosis)
        )
        self._lines.write(str(report.attributes[semconv.ENGINE]), violation, diagnosis, already_exported=exported)

    def _emit(self, report: _ViolationReport, diagnosis: Diagnosis) -> None:
        self._otel_logger.emit(
            timestamp=report.time_ns,
            severity_number=SeverityNumber.ERROR,
            severity_text="ERROR",
            event_name=semconv.VIOLATION_EVENT,
            body=diagnosis.sentence,
            attributes={**report.attributes, **semconv.violation_attributes(report.violation, diagnosis)},
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
        span = self._tracer.start_span(
            report.name, context=report.context, attributes=report.attributes, start_time=report.start_ns
        )
        for violation in report.violations:
            diagnosis = self._diagnoses.pop(violation, None) or diagnose(violation, self._recent[violation.pool])
            attributes = semconv.violation_attributes(violation, diagnosis)
            span.add_event(semconv.VIOLATION_EVENT, attributes, timestamp=report.end_ns)
        kinds = sorted({str(violation.kind) for violation in report.violations})
        span.set_status(trace.StatusCode.ERROR, f"{len(report.violations)} violations: {', '.join(kinds)}")
        span.end(report.end_ns)
