"""The status file of a process: what the agent has patched and covers in it, for ``kvcanary-agent doctor``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvcanary_agent import __version__
from kvcanary_agent.status_files import PREFIX
from kvcanary_agent.telemetry.failures import Failures
from kvcanary_agent.telemetry.tallies import Tallies

_SETTLE_S = 0.1
_REFRESH_S = 5.0


class StatusFile:
    """Keeps ``kvcanary-status-PID.json`` in a folder up to date, on a thread of its own.

    The file stays when the process ends. A folder that cannot be written to is one warning.

    Args:
        folder: Made if it is not there.
        tallies: What is written.
    """

    def __init__(self, folder: Path, tallies: Tallies) -> None:
        self._folder = folder
        self._tallies = tallies
        self._failures = Failures()
        self._changed = threading.Event()
        self._pid = 0

    def changed(self) -> None:
        """Has the file written soon; never waits. A forked child gets a thread, and a file, of its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._changed = threading.Event()
            threading.Thread(target=self._run, args=(self._pid,), name="kvcanary-status", daemon=True).start()
        self._changed.set()

    def write(self) -> None:
        """Write it now, in one move; never raises."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / f"{PREFIX}{os.getpid()}.json"
            scratch = path.with_name(f".{path.name}.part")
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(self._content(), file, indent=1)
            os.replace(scratch, path)
        except OSError as error:
            self._failures.log("writing the status file", error)

    def _run(self, pid: int) -> None:
        while self._pid == pid:
            if self._changed.wait(_REFRESH_S):
                time.sleep(_SETTLE_S)
                self._changed.clear()
            with contextlib.suppress(RuntimeError):  # a mapping that grew while it was walked: the next time
                self.write()

    def _content(self) -> dict[str, Any]:
        tallies = self._tallies
        return {
            "pid": os.getpid(),
            "program": os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else "",
            "agent": __version__,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "patches": [
                {"engine": engine, "class": name, "outcome": outcome}
                for (engine, name), outcome in sorted(tallies.patches.items())
            ],
            "coverage": [
                {"engine": engine, "pool": pool, "subject": subject, "covered": covered, "reason": reason}
                for (engine, pool, subject), (covered, reason) in sorted(tallies.coverage.items())
            ],
            "pools": [
                {
                    "engine": key.engine,
                    "pool": key.pool,
                    "rank": key.rank,
                    "open": tally.records_bytes is not None,
                    "checks": sum(passed + failed for passed, failed in tally.checks.values()),
                    "violations": sum(tally.violations.values()),
                }
                for key, tally in list(tallies.pools.items())
            ],
        }
