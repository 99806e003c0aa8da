"""When incidents are written: on a thread of their own, for a disk may be slow, full or hung."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry.failures import Failures
from kvcanary_agent.telemetry.incidents.document import Incident, document, timestamp
from kvcanary_agent.telemetry.incidents.folder import IncidentFolder
from kvcanary_agent.telemetry.semconv import SCOPE

MIN_GAP_S = 0.5
"""Least time between two writes: a burst that goes on costs two files a second, however many violations it brings."""

MAX_WAITING = 32
"""Bursts whose latest state waits to be written; what comes beyond is counted as dropped."""

MAX_SIGNATURES = 256

_logger = logging.getLogger(SCOPE)

Count = Callable[[str], None]


class IncidentRecorder:
    """Writes each burst of violations to a file, and again as it grows; counts repeats of the same trouble in its file.

    Of each burst only the latest state waits, so that what waits is bounded. A folder that cannot be written to is one
    warning; the next incident tries again.

    Args:
        settings: ``incident_dir`` names the folder; all of them go into the files.
        folder: Where files go.
    """

    def __init__(self, settings: Settings, folder: IncidentFolder) -> None:
        self._settings = settings
        self._folder = folder
        self._waiting: dict[int, tuple[Incident, Count]] = {}
        self._paths: dict[int, Path | None] = {}
        self._path_of_signature: dict[tuple[str, ...], Path] = {}
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._failures = Failures()
        self._thread = threading.Thread(target=self._run, name="kvcanary-incidents", daemon=True)
        self._thread.start()

    def update(self, burst: int, incident: Incident, count: Count) -> None:
        """Has the state of a burst written; never waits.

        Args:
            burst: Number of the burst.
            incident: All that is known about it.
            count: Told once what became of it: ``"written"``, ``"repeated"`` or ``"dropped"``.
        """
        with self._changed:
            if burst not in self._waiting and len(self._waiting) >= MAX_WAITING:
                count("dropped")
                return
            self._waiting[burst] = (incident, count)
            self._changed.notify_all()

    def drain(self, deadline: float) -> bool:
        """Waits until everything is written, but not beyond ``deadline`` (monotonic seconds); whether it is."""
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._waiting and not self._busy, max(0.0, deadline - time.monotonic())
            )

    def close(self) -> None:
        """Lets the thread end once what waits is written; does not wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        """Waits for the thread to end after :meth:`close`, but not beyond ``deadline``; whether it has ended."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                burst = next(iter(self._waiting))
                incident, count = self._waiting.pop(burst)
                self._busy = True
            try:
                self._write(burst, incident, count)
            except Exception as error:
                if burst not in self._paths:
                    self._remember(burst, None)
                    count("dropped")
                self._failures.log("writing incidents", error)
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                # A burst's first state is on disk at once; what it grows to may wait.
                self._changed.wait_for(self._new_burst_waits, MIN_GAP_S)

    def _new_burst_waits(self) -> bool:
        return self._closing or any(burst not in self._paths for burst in self._waiting)

    def _write(self, burst: int, incident: Incident, count: Count) -> None:
        if burst in self._paths:
            path = self._paths[burst]
            if path is not None and path.exists():
                self._folder.write(path, document(incident, path.stem, self._settings))
                self._path_of_signature[incident.signature] = path
            return
        known = self._path_of_signature.get(incident.signature)
        if known is not None and self._folder.note_repeat(known, _repeat(incident)):
            self._remember(burst, None)
            count("repeated")
            return
        path = self._folder.new_path(incident.first_ns)
        self._folder.write(path, document(incident, path.stem, self._settings))
        self._remember(burst, path)
        if len(self._path_of_signature) >= MAX_SIGNATURES:
            self._path_of_signature.clear()
        self._path_of_signature[incident.signature] = path
        count("written")
        _logger.warning("kvcanary: incident written to %s; kvcanary-agent report shows it", path)

    def _remember(self, burst: int, path: Path | None) -> None:
        """``path`` is None for a burst that has no file of its own."""
        if len(self._paths) >= MAX_SIGNATURES:
            self._paths.pop(next(iter(self._paths)))
        self._paths[burst] = path


def _repeat(incident: Incident) -> dict[str, object]:
    first = incident.violations[0]
    return {
        "started": timestamp(incident.first_ns),
        "violations": sum(incident.kinds.values()),
        "step": first.step,
        "group": first.group,
        "block": first.block,
        "slot": first.slot,
        "request": first.request,
    }
