"""Everything of OpenTelemetry that lives as long as this process: built with its first pool, discarded by a fork."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from opentelemetry.metrics import Histogram
from opentelemetry.trace import Tracer

from kvcanary_agent import __version__
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry.flusher import Flusher
from kvcanary_agent.telemetry.incidents import IncidentRecorder
from kvcanary_agent.telemetry.incidents.folder import IncidentFolder
from kvcanary_agent.telemetry.instruments import create_instruments
from kvcanary_agent.telemetry.log_lines import unlock_handlers
from kvcanary_agent.telemetry.providers import Signal, choose_providers, flush, is_proxy
from kvcanary_agent.telemetry.reporter import Reporter
from kvcanary_agent.telemetry.semconv import SCOPE
from kvcanary_agent.telemetry.tallies import Tallies

_SIGNALS: tuple[Signal, ...] = ("logs", "traces", "metrics")


class Exporting:
    """Instruments, tracer, reporter and flushers over the providers chosen for this process.

    Attributes:
        tracer: For spans of passes that found nothing.
        step_duration: ``kvcanary.step.duration``, in seconds.
        reporter: For what was found.

    Args:
        tallies: What the instruments observe.
        resource_attributes: What private providers say of this process.
        settings: Whether and where incidents are written.
    """

    def __init__(self, tallies: Tallies, resource_attributes: Mapping[str, str | int], settings: Settings) -> None:
        self._providers = choose_providers(resource_attributes)
        self.tracer: Tracer = self._providers.traces.get_tracer(SCOPE, __version__)
        meter = self._providers.metrics.get_meter(SCOPE, __version__)
        self.step_duration: Histogram = create_instruments(meter, tallies)
        self._flushers = [self._flusher(signal) for signal in _SIGNALS]
        self._incidents: IncidentRecorder | None = None
        if settings.incident_dir is not None:
            self._incidents = IncidentRecorder(settings, IncidentFolder(Path(settings.incident_dir)))
        self.reporter = Reporter(
            self.tracer,
            self._providers.logs.get_logger(SCOPE, __version__),
            lambda: not is_proxy(self._providers.current("logs")),
            self.request_export,
            self._incidents,
        )

    @property
    def exports_spans(self) -> bool:
        """Whether a span that is started goes anywhere."""
        return not is_proxy(self._providers.current("traces"))

    def request_export(self) -> None:
        """Has everything reported so far exported soon; does not wait."""
        for flusher in self._flushers:
            flusher.request()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything reported so far has been exported; False if that takes longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        reported = self.reporter.drain(timeout_s)
        reported &= self._incidents is None or self._incidents.drain(deadline)
        tickets = [(flusher, flusher.request(urgent=True)) for flusher in self._flushers]
        return all(flusher.wait(ticket, deadline) for flusher, ticket in tickets) and reported

    def wait_for_first_exports(self, timeout_s: float) -> bool:
        """Waits while an exporter's first export runs; False if that takes longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        return all(flusher.wait_for_first(deadline) for flusher in self._flushers)

    def finish(self, timeout_s: float, report_timeout_s: float) -> None:
        """Exports what is left at the end of the process.

        The exporters stay up: a library that one thread tears down while another one exports through it may crash.

        Args:
            timeout_s: For all of it, if nothing that was reported waits for its export.
            report_timeout_s: From the time of the oldest report that waits, if that is longer.
        """
        now = time.monotonic()
        waiting = [
            since for since in (self.reporter.waiting_since, *(f.waiting_since for f in self._flushers)) if since
        ]
        deadline = max(now + timeout_s, min(waiting, default=now) + (report_timeout_s if waiting else 0.0))
        self.flush(deadline - now)
        self.reporter.close()
        if not self.reporter.join(deadline):
            unlock_handlers()

    def close(self, timeout_s: float) -> bool:
        """Exports what is left, ends the threads and shuts the private providers down.

        Returns:
            False if that takes longer than ``timeout_s``; it goes on meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        self.reporter.close()
        reported = self.reporter.join(deadline)
        if self._incidents is not None:
            self._incidents.close()
            reported &= self._incidents.join(deadline)
        for flusher in self._flushers:
            flusher.close()
        return all(flusher.join(deadline) for flusher in self._flushers) and flushed and reported

    def _flusher(self, signal: Signal) -> Flusher:
        interval_s = self._providers.metric_interval_s if signal == "metrics" else None
        private = signal in self._providers.private
        return Flusher(
            signal,
            flush=partial(self._flush, signal),
            shut_down=partial(self._shut_down, signal),
            interval_s=interval_s if private else None,
        )

    def _flush(self, signal: Signal) -> None:
        flush(self._providers.current(signal))

    def _shut_down(self, signal: Signal) -> None:
        if signal in self._providers.private:
            getattr(self._providers, signal).shutdown()
