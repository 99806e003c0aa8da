"""The plugin entry point alone brings the agent into SGLang's scheduler process: no launcher, no PYTHONPATH."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.installed import python_with_entry_points
from tests.engines.processes import checked, start
from tests.engines.sglang.harness import ENGINE, EXPORTED_WITHIN_S, HERE, PROMPTS, Session, engine_environment
from tests.otlp_receiver import HttpOtlpReceiver


def test_the_scheduler_of_an_installed_agent_is_watched_where_it_is_enabled(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    arguments = json.dumps({**ENGINE, "model_path": str(models / "llama")})
    command: list[str | Path] = [python_with_entry_points(tmp_path / "environment"), HERE / "session.py", arguments]
    with HttpOtlpReceiver() as receiver:
        environment = {
            **receiver.environment(),
            **engine_environment(),
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "KVCANARY_ENABLED": "1",
        }
        with start(command, environment) as process:
            process.wait_for("READY")
            Session(process, receiver).generate(PROMPTS, max_tokens=4)
            arrived = receiver.wait_for(checked("chain", sum(map(len, PROMPTS))), EXPORTED_WITHIN_S)
            assert arrived, process.tail()
        of_pool = {point.resource["process.pid"] for point in receiver.points_of("kvcanary.records.memory")}
    assert process.popen.pid not in of_pool
    assert receiver.events("kvcanary.violation") == []
