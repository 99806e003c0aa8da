"""Exports a signal soon after it is asked to, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcanary_agent.telemetry.failures import Failures

SETTLE_S = 0.02
"""A request waits this long for what belongs with it: a violation's span ends just after its log record."""

MIN_GAP_S = 0.5
"""Least time between the starts of two exports on request; a burst of requests costs one export each half second."""


class Flusher:
    """Runs ``flush`` when requested, one run at a time; who requests never waits.

    One thread for each signal: an exporter that hangs holds up its own signal only. The thread is a daemon, so a hung
    exporter does not hold up the end of the process either.

    Args:
        signal: ``"traces"``, ``"metrics"`` or ``"logs"``, for messages.
        flush: Exports what is pending and returns when it is out. It may hang or raise.
        shut_down: Called by the thread as its last act; it may hang or raise, too.
        interval_s: Run ``flush`` at least this often without a request; None for only on request.
    """

    def __init__(
        self, signal: str, flush: Callable[[], object], shut_down: Callable[[], object], interval_s: float | None = None
    ) -> None:
        self._signal = signal
        self._flush = flush
        self._shut_down = shut_down
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._requested = 0
        self._urgent = 0
        self._done = 0
        self._waiting_since: float | None = None
        self._in_first_flush = False
        self._closing = False
        self._failures = Failures()
        self._thread = threading.Thread(target=self._run, name=f"kvcanary-{signal}", daemon=True)
        self._thread.start()

    def request(self, *, urgent: bool = False) -> int:
        """Asks for an export of everything recorded so far.

        Args:
            urgent: Start at once, whatever :data:`SETTLE_S` and :data:`MIN_GAP_S` say.

        Returns:
            A ticket for :meth:`wait`.
        """
        with self._changed:
            self._requested += 1
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
            if urgent:
                self._urgent = self._requested
            self._changed.notify_all()
            return self._requested

    def wait(self, ticket: int, deadline: float) -> bool:
        """Waits until the export that ``ticket`` asked for has ended, but not beyond ``deadline`` (monotonic seconds).

        Returns:
            Whether it has ended.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= ticket, max(0.0, deadline - time.monotonic()))

    def wait_for_first(self, deadline: float) -> bool:
        """Waits while the first export runs, but not beyond ``deadline``; whether none runs any more."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_first_flush, max(0.0, deadline - time.monotonic()))

    @property
    def waiting_since(self) -> float | None:
        """Since when, at the latest, something waits to be exported (monotonic seconds); None if nothing does."""
        return self._waiting_since

    def close(self) -> None:
        """Lets the thread end once the exports that are requested have ended; does not wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        """Waits for the thread to end after :meth:`close`, but not beyond ``deadline``; whether it has ended."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        earliest = time.monotonic()
        first = True
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._requested > self._done or self._closing, self._interval_s):
                    delay = max(SETTLE_S, earliest - time.monotonic())
                    self._changed.wait_for(lambda: self._urgent > self._done or self._closing, delay)
                target = self._requested
                if self._closing and target == self._done:
                    break
                self._in_first_flush = first
            first = False
            started = time.monotonic()
            earliest = started + MIN_GAP_S
            self._attempt(self._flush)
            with self._changed:
                self._done = target
                self._in_first_flush = False
                self._waiting_since = None if target == self._requested else started
                self._changed.notify_all()
        self._attempt(self._shut_down)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._failures.log(f"exporting {self._signal}", error)
