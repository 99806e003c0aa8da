"""What the processes of a server say of themselves in their status files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcanary_agent.status_files import PREFIX


def statuses(folder: Path) -> list[dict[str, Any]]:
    """Every status file of a folder, by process id; ``running`` says whether the process still exists."""
    found = []
    for file in sorted(folder.glob(f"{PREFIX}*.json")):
        try:
            status = json.loads(file.read_text(encoding="utf-8"))
            status["running"] = os.path.exists(f"/proc/{int(status['pid'])}")
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append(status)
    return sorted(found, key=lambda status: int(status["pid"]))


def run_with_status(command: Sequence[str], folder: Path, *, quiet: bool) -> int:
    """Run a command with the agent in it, its processes' status files in ``folder``, until it ends or Ctrl-C.

    Args:
        command, folder: See above.
        quiet: Send what it prints to standard error, because standard output is for something else.

    Returns:
        Its exit status; that of a signal is negative.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcanary_agent", "run", "--", *command],
        env={**os.environ, "KVCANARY_STATUS_DIR": str(folder)},
        stdout=sys.stderr if quiet else None,
    )
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal has sent it to the command as well, which may take its time to end.
            continue


def covered(status: dict[str, Any]) -> bool | None:
    """Whether a process's engine is covered: a pool is, or was, watched. None if it has no pool and lacks nothing."""
    pools = [entry for entry in status.get("coverage", ()) if str(entry.get("subject", "")).startswith("pool ")]
    if any(entry.get("covered") for entry in pools):
        return True
    failed = any(patch.get("outcome") == "failed" for patch in status.get("patches", ()))
    return False if pools or failed else None
