"""The doors of an installed package: OpenTelemetry's auto-instrumentation, and the plugins of vLLM and SGLang."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.activation.processes import ROOT, Processes

STEP = "import stand_in_engine; print(stand_in_engine.Runner().step(1))"
HOOKED_OR_HEAVY = (
    "print([type(finder).__name__ for finder in sys.meta_path if type(finder).__name__ == 'TargetFinder'],"
    " 'torch' in sys.modules, 'opentelemetry' in sys.modules)"
)
PLUGIN_GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")
needs_instrumentation = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.instrumentation") is None,
    reason="opentelemetry-instrumentation is not installed: pip install 'kvcanary-agent[instrumentation]'",
)


@pytest.fixture
def installed(stand_in: Processes) -> Processes:
    """A folder with the engine in which this checkout counts as installed, with the entry points of pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'\[project\.entry-points\."?([\w.]+)"?\]\n((?:\w+ = "[^"]+"\n)+)', project)
    assert {group for group, _ in found} == {"opentelemetry_instrumentor", *PLUGIN_GROUPS}
    stand_in.write(
        "kvcanary_agent-0.1.0.dist-info/entry_points.txt",
        "\n".join(f"[{group}]\n" + points.replace('"', "") for group, points in found),
    )
    stand_in.write(
        "kvcanary_agent-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kvcanary-agent\nVersion: 0.1.0\n"
    )
    return stand_in


def through_plugin(processes: Processes, group: str, then: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """What an engine does with its plugins, in a Python that does not look at PYTHONPATH, as Ray's workers may be."""
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(processes.folder)!r}]\n"
        "from importlib.metadata import entry_points\n"
        f"points = entry_points(group={group!r}, name='kvcanary'); assert points\n"
        f"for point in points: point.load()()\n{then}\n"
    )
    return processes.run([sys.executable, "-I", "-c", program], **environ)


@pytest.mark.parametrize("group", PLUGIN_GROUPS)
def test_a_plugin_lets_the_agent_in_where_it_is_enabled(installed: Processes, group: str) -> None:
    environ = {"KVCANARY_ENABLED": "1", "KVCANARY_ADAPTERS": "./adapter.py"}
    result = through_plugin(installed, group, STEP, **environ)
    assert (result.stdout.split("\n"), result.stderr) == (["patched", "around", "2", ""], "")


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_an_installed_package_alone_switches_nothing_on_and_loads_nothing_heavy(
    installed: Processes, value: str | None
) -> None:
    environ = {} if value is None else {"KVCANARY_ENABLED": value}
    result = through_plugin(installed, "vllm.general_plugins", f"{STEP}\n{HOOKED_OR_HEAVY}", **environ)
    assert (result.stdout, result.stderr) == ("2\n[] False False\n", "")


def test_a_value_that_is_neither_is_one_line_and_the_engine_goes_on(installed: Processes) -> None:
    result = through_plugin(installed, "vllm.general_plugins", STEP, KVCANARY_ENABLED="maybe")
    assert result.stdout == "2\n"
    assert result.stderr.count("\n") == 1
    assert "KVCANARY_ENABLED='maybe'" in result.stderr


def test_a_plugin_that_comes_after_another_door_changes_nothing(installed: Processes) -> None:
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from importlib.metadata import entry_points\n"
        "import stand_in_engine\n"
        "for point in entry_points(group='vllm.general_plugins', name='kvcanary'): point.load()()\n"
        f"{STEP}\n"
    )
    result = installed.launch("run", "-c", program, KVCANARY_ADAPTERS="./adapter.py")
    assert result.stdout.split("\n") == ["patched", "around", "2", ""]


def auto_instrumented(processes: Processes, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
    assert shutil.which(sys.executable)
    path = os.pathsep.join([str(ROOT), str(processes.folder)])
    exporters = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
    return processes.run([sys.executable, "-c", program, *command], **{"PYTHONPATH": path, **exporters, **environ})


@needs_instrumentation
def test_opentelemetry_instrument_picks_the_agent_up(installed: Processes) -> None:
    result = auto_instrumented(installed, sys.executable, "serve.py", KVCANARY_ADAPTERS="./adapter.py")
    assert result.stdout.split("\n") == ["patched", "around", "2", ""], result.stderr


@needs_instrumentation
@pytest.mark.parametrize(
    "environ",
    [{"KVCANARY_ENABLED": "0"}, {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "kvcanary"}],
    ids=lambda e: next(iter(e)),
)
def test_opentelemetry_instrument_leaves_it_out_where_it_is_told_to(
    installed: Processes, environ: dict[str, str]
) -> None:
    result = auto_instrumented(installed, sys.executable, "serve.py", KVCANARY_ADAPTERS="./adapter.py", **environ)
    assert result.stdout == "2\n", result.stderr


@needs_instrumentation
def test_an_instrumentor_reports_through_the_providers_that_it_is_given(tmp_path: Path) -> None:
    program = """
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from kvcanary_agent.instrumentor import KVCanaryInstrumentor
from tests.telemetry.samples import open_pool, violation
reader, records = InMemoryMetricReader(), InMemoryLogRecordExporter()
logs = LoggerProvider()
logs.add_log_record_processor(SimpleLogRecordProcessor(records))
instrumentor = KVCanaryInstrumentor()
instrumentor.instrument(meter_provider=MeterProvider([reader]), logger_provider=logs)
telemetry, pool = open_pool()
pool.violation(violation())
assert telemetry.flush(10)
assert "kvcanary.violations" in reader.get_metrics_data().to_json()
assert len(records.get_finished_logs()) == 1
instrumentor.uninstrument()
import sys
assert not any(type(finder).__name__ == "TargetFinder" for finder in sys.meta_path)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
