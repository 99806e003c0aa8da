"""Beside another agent that is put in from outside, in either order, the program runs as ever, and both are in.

With one exception: opentelemetry-instrument hides every other sitecustomize, so it has to stand in front of `run`.
"""

from __future__ import annotations

import pathlib
import sys

import pytest

from tests.activation.processes import ROOT, Processes

PROGRAM = """\
import sys
import stand_in_engine
from kvcanary_agent.activation.patching import is_wrapped
hooks = sum(type(finder).__name__ == "TargetFinder" for finder in sys.meta_path)
print("ours", hooks, is_wrapped(stand_in_engine.Base, "step"))
print("theirs", {module!r} in sys.modules)
print(stand_in_engine.Runner().step(1), sys.argv[1:])
"""

# Each with the words before the command, and a module that it loads.
NEIGHBOURS = {
    "opentelemetry-instrument": (["opentelemetry-instrument"], "opentelemetry.instrumentation.auto_instrumentation"),
    "ddtrace-run": (["ddtrace-run"], "ddtrace.bootstrap.preload"),
    "newrelic-admin": (["newrelic-admin", "run-program"], "newrelic.api.import_hook"),
}
SETTINGS = {
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
    "DD_TRACE_ENABLED": "false",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "NEW_RELIC_DEVELOPER_MODE": "true",
    "NEW_RELIC_LICENSE_KEY": "0" * 40,
    "NEW_RELIC_APP_NAME": "test",
    "NEW_RELIC_LOG_LEVEL": "critical",
}
OURS = [sys.executable, "-m", "kvcanary_agent", "run"]


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("order", ["ours in theirs", "theirs in ours"])
def test_each_agent_is_in_the_program(stand_in: Processes, neighbour: str, order: str) -> None:
    words, module = NEIGHBOURS[neighbour]
    theirs = [str(pathlib.Path(sys.executable).with_name(words[0])), *words[1:]]
    script = stand_in.write("serve.py", PROGRAM.format(module=module))
    program = [sys.executable, str(script), "an argument"]
    command = [*theirs, *OURS, *program] if order == "ours in theirs" else [*OURS, *theirs, *program]
    result = stand_in.run(
        command, PYTHONPATH=str(ROOT), KVCANARY_ADAPTERS=str(stand_in.folder / "adapter.py"), **SETTINGS
    )
    assert result.returncode == 0, result.stderr
    hidden = (neighbour, order) == ("opentelemetry-instrument", "theirs in ours")
    ours = "ours 0 False" if hidden else "ours 1 True"
    assert result.stdout.splitlines() == [ours, "theirs True", "2 ['an argument']"], result.stderr
