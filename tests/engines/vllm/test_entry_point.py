"""The plugin entry point alone brings the agent into vLLM's worker processes: no launcher, no PYTHONPATH."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.installed import python_with_entry_points
from tests.engines.processes import start
from tests.engines.vllm.harness import ENGINE, EXPORTED_WITHIN_S, HERE, checked, offline_environment
from tests.otlp_receiver import HttpOtlpReceiver, OtlpReceiver

PROMPT = [3 + 7 * at % 400 for at in range(150)]


def test_the_worker_of_an_installed_agent_is_watched_where_it_is_enabled(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    job = tmp_path / "job.json"
    job.write_text(
        json.dumps(
            {
                "engine": {**ENGINE, "model": str(models / "llama")},
                "prompts": [PROMPT],
                "max_tokens": 8,
                "v2": False,
            }
        )
    )
    command = [python_with_entry_points(tmp_path / "environment"), HERE / "one_by_one.py", job]

    def both_processes(receiver: OtlpReceiver) -> bool:
        subjects = ("allocator", "ownership")
        follows = all(receiver.latest("kvcanary.coverage", kvcanary_subject=subject) == 1 for subject in subjects)
        return follows and checked("chain", len(PROMPT))(receiver)

    with HttpOtlpReceiver() as receiver:
        environment = {
            **receiver.environment(),
            **offline_environment(),
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "KVCANARY_ENABLED": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        with start(command, environment) as process:
            process.wait_for("RESULT ")
            arrived = receiver.wait_for(both_processes, EXPORTED_WITHIN_S)
            output = process.finish()
            assert arrived, output
        of_pool = {point.resource["process.pid"] for point in receiver.points_of("kvcanary.records.memory")}
    assert process.popen.pid not in of_pool
    assert receiver.events("kvcanary.violation") == []
