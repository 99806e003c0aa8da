"""The folder of incident files: private, bounded, and never half-written."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from kvcanary_agent.incident_files import PREFIX

MAX_FILES = 100
"""Incident files in a folder, of all processes together; beyond this none is added until somebody removes some."""

MAX_FOLDER_BYTES = 16 * 1024 * 1024

_LAST_REPEATS = 16


class FolderFullError(OSError):
    """There are as many incident files, or bytes, as there may be."""


class IncidentFolder:
    """Writes and rewrites incident files; each method may raise OSError.

    Args:
        path: The folder; it is made, for the user alone, when the first file is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0

    def new_path(self, started_ns: int) -> Path:
        """A path that no file of this folder has."""
        self._number += 1
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started_ns // 10**9))
        return self.path / f"{PREFIX}{started}-{os.getpid()}-{self._number}.json"

    def write(self, path: Path, text: str) -> None:
        """Write a file in one move: whoever reads ``path`` finds the old text or the new one.

        Raises:
            FolderFullError: It would be a new file in a full folder.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            self._refuse_if_full(len(text))
        # Not an incident's name: a scratch file that is left behind by a crash is no half incident.
        scratch = self.path / f".{path.name}.{os.getpid()}.part"
        try:
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise

    def note_repeat(self, path: Path, repeat: dict[str, Any]) -> bool:
        """Count a repeat in an incident's file; False if the file is gone."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            repeats = content["repeats"]
            repeats["number"] += 1
            repeats["last"] = [*repeats["last"], repeat][-_LAST_REPEATS:]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False
        self.write(path, json.dumps(content, indent=1))
        return True

    def _refuse_if_full(self, size: int) -> None:
        files = [entry for entry in os.scandir(self.path) if entry.name.startswith(PREFIX)]
        taken = sum(entry.stat().st_size for entry in files)
        if len(files) >= MAX_FILES or taken + size > MAX_FOLDER_BYTES:
            raise FolderFullError(
                f"{self.path} holds {len(files)} incident files of {taken} bytes, of which {MAX_FILES} files and "
                f"{MAX_FOLDER_BYTES} bytes are the most; remove those that you have read"
            )
