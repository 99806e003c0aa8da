"""The status file of a process, which ``kvcanary-agent doctor --status`` reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvcanary_agent.canary import Kind, Violation
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry import Telemetry


def pools(folder: Path) -> list[dict[str, Any]]:
    return [pool for file in folder.glob("*.json") for pool in json.loads(file.read_text())["pools"]]


def test_a_violation_is_in_the_file_without_waiting_for_its_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcanary_agent.telemetry.status._REFRESH_S", 3600)
    telemetry = Telemetry(Settings(status_dir=str(tmp_path)))
    pool = telemetry.open_pool(engine="toy", engine_version="", pool="kv", rank=0, world_size=1)
    pool.violation(Violation(kind=Kind.CONTENT, pool="kv", group="full", slot=5, block=1, offset=1, step=1))

    until = time.monotonic() + 30
    while [each["violations"] for each in pools(tmp_path)] != [1] and time.monotonic() < until:
        time.sleep(0.02)

    assert [each["violations"] for each in pools(tmp_path)] == [1]
    telemetry.shutdown(1)
