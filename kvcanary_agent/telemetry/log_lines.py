"""The one line in the server's log that every operator sees, bounded however bad it gets."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from kvcanary_agent.canary.violation import Violation
from kvcanary_agent.telemetry.diagnosis import Diagnosis
from kvcanary_agent.telemetry.semconv import SCOPE

_logger = logging.getLogger(SCOPE)

WINDOW_S = 60.0
LINES_PER_PLACE = 3
"""Lines in a window for the same kind, pool, group and block."""
LINES = 100
"""Lines in a window in all."""


class ViolationLines:
    """Writes violations to ``logging``, a bounded number in each window of :data:`WINDOW_S` seconds.

    What is left out is counted, and the count is a line of its own when the window ends.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_ends = -math.inf
        self._lines: dict[tuple[str, str, str, int], int] = {}
        self._written = 0
        self._suppressed = 0

    def write(self, engine: str, violation: Violation, diagnosis: Diagnosis, *, already_exported: bool) -> None:
        """Writes one line at ERROR, or counts it as left out.

        Args:
            engine: The engine's name.
            violation, diagnosis: What to say.
            already_exported: Whether the violation is an OpenTelemetry log record already: then the line is kept from
                handlers that would export it a second time.
        """
        now = self._clock()
        if now >= self._window_ends:
            self.end_window()
            self._window_ends = now + WINDOW_S
        place = (str(violation.kind), violation.pool, violation.group, violation.block)
        lines = self._lines.get(place, 0)
        if lines >= LINES_PER_PLACE or self._written >= LINES:
            self._suppressed += 1
            return
        self._lines[place] = lines + 1
        self._written += 1
        message = (
            f"kvcanary: {violation.kind} violation in {engine} pool {violation.pool}: {diagnosis.sentence} "
            f"[{diagnosis.cause}]"
        )
        if self._written == LINES or lines + 1 == LINES_PER_PLACE:
            message += f" (more like it are counted, not logged, for up to {WINDOW_S:.0f} s)"
        if already_exported:
            _log_except_to_opentelemetry(message)
        else:
            _logger.error("%s", message)

    def end_window(self) -> None:
        """Ends the window, saying how many violations were left out of it; the next violation starts another one."""
        suppressed = self._suppressed
        self._lines.clear()
        self._written = 0
        self._suppressed = 0
        self._window_ends = -math.inf
        if suppressed:
            _logger.error("kvcanary: %d more violations were not logged one by one", suppressed)

    def seconds_to_summary(self) -> float | None:
        """Seconds until a count of left-out violations is due; None if nothing was left out."""
        return max(0.0, self._window_ends - self._clock()) if self._suppressed else None


def _log_except_to_opentelemetry(message: str) -> None:
    """``Logger.error``, but for the handlers that turn log lines into OpenTelemetry log records."""
    if not _logger.isEnabledFor(logging.ERROR):
        return
    record = _logger.makeRecord(_logger.name, logging.ERROR, __file__, 0, message, (), None)
    if not _logger.filter(record):
        return
    handlers = list(_handlers(_logger))
    if not handlers and logging.lastResort is not None:
        handlers.append(logging.lastResort)
    for handler in handlers:
        if record.levelno >= handler.level and not _exports_to_opentelemetry(handler):
            handler.handle(record)


def unlock_handlers() -> None:
    """At the end of the process: give each handler that is still busy with a line of ours a lock that is free.

    ``logging`` waits for every handler's lock at exit. A handler that blocks, on a pipe that nobody reads or a host
    that does not answer, would hold the process up for ever, and with a line that the host has not written itself.
    """
    for handler in _handlers(_logger):
        lock = handler.lock
        if lock is not None and not lock.acquire(blocking=False):
            handler.createLock()
        elif lock is not None:
            lock.release()


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    handlers: list[logging.Handler] = []
    current: logging.Logger | None = logger
    while current is not None:
        handlers.extend(current.handlers)
        current = current.parent if current.propagate else None
    return handlers


def _exports_to_opentelemetry(handler: logging.Handler) -> bool:
    return any(
        cls.__name__ == "LoggingHandler" and cls.__module__.startswith("opentelemetry.")
        for cls in type(handler).__mro__
    )
