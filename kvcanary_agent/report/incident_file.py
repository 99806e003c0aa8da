"""Reading an incident file that may have been written by another version, or by anybody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcanary_agent.incident_files import PREFIX, SCHEMA, VERSION


class IncidentError(ValueError):
    """A file that cannot be shown. The message names it, says what is wrong, and what to do."""


class Fields:
    """A JSON object whose fields may be missing or of any type: what is asked for is given, or a value like nothing."""

    def __init__(self, value: object) -> None:
        self._value = value if isinstance(value, dict) else {}

    def text(self, name: str, default: str = "") -> str:
        """The value as text; lists and objects as JSON."""
        value = self._value.get(name)
        if value is None:
            return default
        return _printable(value)

    def number(self, name: str, default: float = 0) -> float:
        value = self._value.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def texts(self, name: str) -> list[str]:
        """A list's items as text; a missing one is empty."""
        value = self._value.get(name)
        if not isinstance(value, list):
            return []
        return [_printable(item) for item in value]

    def object(self, name: str) -> Fields:
        return Fields(self._value.get(name))

    def objects(self, name: str) -> list[Fields]:
        value = self._value.get(name)
        return [Fields(item) for item in value] if isinstance(value, list) else []

    def items(self) -> Iterator[tuple[str, str]]:
        """Names and values as text."""
        for name in self._value:
            yield name, self.text(name)

    def __bool__(self) -> bool:
        return bool(self._value)


def _printable(value: object) -> str:
    """As text without control characters: names come from clients, and a terminal obeys what it is sent."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def newest_in(folder: Path) -> tuple[Path, int]:
    """The incident file of a folder that was written last, and how many others there are.

    Raises:
        IncidentError: There is none.
    """
    files = sorted(folder.glob(f"{PREFIX}*.json"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise IncidentError(
            f"{folder} holds no incident file ({PREFIX}*.json); is KVCANARY_INCIDENT_DIR another folder?"
        )
    return files[-1], len(files) - 1


def read_incident(path: Path) -> Fields:
    """The content of an incident file.

    Raises:
        IncidentError: It cannot be read, or is no incident of a version that is known here.
    """
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise IncidentError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise IncidentError(f"{path}: is no JSON ({error}); an incident file ends in .json") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise IncidentError(f"{path}: is no incident file: its schema is not {SCHEMA!r}")
    if value.get("version") != VERSION:
        raise IncidentError(
            f"{path}: is of version {value.get('version')!r}, and version {VERSION} is known here; show it with the "
            "kvcanary-agent that wrote it"
        )
    return Fields(value)
