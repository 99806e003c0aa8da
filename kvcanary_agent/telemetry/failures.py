"""How the agent says that a part of itself has failed: once, and without ever failing over it."""

from __future__ import annotations

import contextlib
import logging

from kvcanary_agent.telemetry.semconv import SCOPE

_logger = logging.getLogger(SCOPE)


class Failures:
    """Logs the first failure of each part; later ones are silent."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, part: str, error: Exception) -> None:
        """Logs that ``part`` has failed with ``error``; never raises, not even because of the host's log handlers."""
        if part in self._logged:
            return
        self._logged.add(part)
        with contextlib.suppress(Exception):
            _logger.warning(
                "kvcanary: %s failed: %s: %s; the server goes on, later failures are silent",
                part,
                type(error).__name__,
                error,
            )
