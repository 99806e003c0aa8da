"""``kvcanary-agent doctor``: what it says of engines, ways in and processes, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SERVER = """
import sys
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.engine import Engine
engine = Engine(EngineConfig())
engine.add_request([1, 2, 3], max_tokens=4, n=1, request_id="a")
while not engine.is_idle:
    engine.step()
print("served", flush=True)
if "wait" in sys.argv:
    sys.stdin.readline()
"""


def environment(**changes: str) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY_", "PYTHON", "OTEL_"))
    }
    return {**inherited, "PYTHONPATH": str(ROOT), **changes}


def doctor(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvcanary_agent", "doctor", *map(str, arguments)],
        env=environment(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


def engine_package(folder: Path, runner: str) -> Path:
    """A package called as vLLM is, with this model runner."""
    worker = folder / "vllm" / "v1" / "worker"
    worker.mkdir(parents=True)
    for package in (folder / "vllm", folder / "vllm" / "v1", worker):
        (package / "__init__.py").write_text("")
    (worker / "gpu_model_runner.py").write_text(runner)
    return folder


def report(result: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(result.stdout)


def test_an_engine_of_another_shape_is_named_as_not_covered_with_the_reason(tmp_path: Path) -> None:
    folder = engine_package(tmp_path, "class SomethingElse: pass\n")
    result = doctor("--json", PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
    assert result.returncode == 1, result.stderr
    (engine,) = [engine for engine in report(result)["engines"] if engine["name"] == "vllm"]
    assert engine["targets"]["vllm.v1.worker.gpu_model_runner"]
    assert not engine["targets"]["vllm.v1.worker.gpu_worker"]
    assert not engine["covered"]
    assert any("has no class GPUModelRunner" in problem for problem in engine["problems"])


def test_an_engine_that_cannot_be_imported_is_named_with_its_own_words(tmp_path: Path) -> None:
    folder = engine_package(tmp_path, "raise OSError('libcuda.so.1: cannot open')\n")
    result = doctor(PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
    assert result.returncode == 1
    assert "OSError: libcuda.so.1: cannot open" in " ".join(result.stdout.split())


def test_ways_in_exporters_and_wrong_settings_are_told() -> None:
    result = doctor("--json", KVCANARY_MODE="loud", OTEL_TRACES_EXPORTER="carrier_pigeon", OTEL_METRICS_EXPORTER="otlp")
    found = report(result)
    assert found["doors"]["kvcanary-agent run"] == ""
    assert found["doors"]["enable --site"] == "closed; kvcanary-agent enable --site opens it"
    assert "'carrier_pigeon' is not installed" in found["exporters"]["traces"]
    assert found["exporters"]["metrics"] == "otlp_proto_grpc"
    assert found["exporters"]["logs"].startswith("nothing: neither OTEL_LOGS_EXPORTER")
    assert found["settings"] == ["KVCANARY_MODE='loud': accepted are log, raise"]


def test_a_command_whose_pool_is_watched_is_covered(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    result = doctor("--json", "--", server)
    assert result.returncode == 0, result.stderr
    assert "served" in result.stderr, "what the command prints does not get into the JSON"
    (process,) = report(result)["processes"]
    assert process["covered"]
    assert process["pools"][0]["checks"] > 0
    assert {patch["outcome"] for patch in process["patches"]} == {"patched"}


def test_a_command_without_an_engine_or_without_its_pool_is_not(tmp_path: Path) -> None:
    result = doctor("--", "-c", "print('nothing to see')")
    assert result.returncode == 1
    assert "no process has imported an engine" in result.stdout
    failing = tmp_path / "adapter.py"
    failing.write_text(
        "from kvcanary_agent import runtime\n"
        "targets = ['kvcanary_agent.demo.engine']\n"
        "def patch(module):\n"
        "    runtime.patch_class('demo', module.Engine, {'no_such_method': lambda call, self: call()})\n"
    )
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    result = doctor("--", server, KVCANARY_ADAPTERS=str(failing))
    assert result.returncode == 1
    assert "no_such_method does not exist" in " ".join(result.stdout.split())


def test_a_running_server_tells_through_its_status_files(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    status = tmp_path / "status"
    with subprocess.Popen(
        [sys.executable, "-m", "kvcanary_agent", "run", str(server), "wait"],
        env=environment(KVCANARY_STATUS_DIR="status"),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "served\n"
        while not list(status.glob("*.json")):
            time.sleep(0.02)
        result = doctor("--json", "--status", status)
        (found,) = report(result)["processes"]
        assert (found["pid"], found["running"], found["covered"]) == (process.pid, True, True)
        assert result.returncode == 0
        process.communicate("\n")
    assert not report(doctor("--json", "--status", status))["processes"][0]["running"]


def test_wrong_usage_is_an_error() -> None:
    assert doctor("--").returncode == 2
    assert doctor("--status", "x", "--", "true").returncode == 2


@pytest.mark.parametrize(("change", "healthy"), [("", True), ("Model.forwards", False)])
def test_an_adapter_of_the_users_own_is_listed_with_what_it_finds(tmp_path: Path, change: str, healthy: bool) -> None:
    stand_ins = ROOT / "tests" / "adapters" / "stand_ins"
    table = tmp_path / "mine.toml"
    table.write_text((stand_ins / "layered.toml").read_text().replace("Model.forward", change or "Model.forward"))
    result = doctor("--json", PYTHONPATH=f"{ROOT}{os.pathsep}{stand_ins}", KVCANARY_ADAPTERS=str(table))
    (own,) = [engine for engine in report(result)["engines"] if engine["name"] == str(table)]
    assert own["covered"] == healthy
    assert own["targets"] == {"layered": True}
    assert healthy or any("Model.forwards, but there is no such method" in problem for problem in own["problems"])


def test_an_adapter_that_cannot_be_loaded_is_listed_with_the_reason(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text("engine = 3\n")
    result = doctor("--json", KVCANARY_ADAPTERS=str(table))
    assert result.returncode == 1
    (own,) = [engine for engine in report(result)["engines"] if engine["name"] == str(table)]
    (problem,) = own["problems"]
    assert problem.startswith("it cannot be loaded: DeclarationError: engine = 3; it is the name of the engine")
