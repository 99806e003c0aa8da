"""An SGLang that the adapter does not know runs on, and the agent says that it does not cover it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.processes import ROOT

KNOWN_METHODS = """
    def _init_post_memory_pool_components(self): pass
    def forward(self, forward_batch, **kwargs): return "output"
"""


def run_with_stand_in(folder: Path, source: str) -> str:
    """What a program prints that imports a stand-in for SGLang's model runner and uses it, with the agent."""
    package = folder / "sglang" / "srt" / "model_executor"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "model_runner.py").write_text(source)
    program = folder / "program.py"
    program.write_text(
        "import logging; logging.basicConfig()\n"
        "from sglang.srt.model_executor import model_runner\n"
        "print(model_runner.serve())\n"
    )
    finished = subprocess.run(
        [sys.executable, "-m", "kvcanary_agent", "run", program],
        cwd=ROOT,
        env={**os.environ, "OTEL_SDK_DISABLED": "true"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return finished.stdout


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("", "has no such class", id="class"),
        pytest.param(
            "class ModelRunner:" + KNOWN_METHODS.replace("def forward", "def step"),
            "ModelRunner has no method forward",
            id="method",
        ),
        pytest.param(
            "class ModelRunner:" + KNOWN_METHODS.replace("forward_batch", "batch"),
            "ModelRunner.forward takes (batch, kwargs), wanted (forward_batch, ...)",
            id="parameters",
        ),
    ],
)
def test_what_is_missing_is_one_warning_and_the_program_goes_on(tmp_path: Path, source: str, reason: str) -> None:
    output = run_with_stand_in(tmp_path, source + "\ndef serve(): return 'served'\n")

    warnings = [line for line in output.splitlines() if "kvcanary" in line]
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert output.endswith("served\n")


def test_a_runner_whose_pool_cannot_be_described_serves_without_the_agent(tmp_path: Path) -> None:
    source = (
        "class ModelRunner:"
        + KNOWN_METHODS
        + (
            "\ndef serve():\n"
            "    runner = ModelRunner()\n"
            "    runner._init_post_memory_pool_components()\n"
            "    return runner.forward(None)\n"
        )
    )

    output = run_with_stand_in(tmp_path, source)

    warnings = [line for line in output.splitlines() if "kvcanary" in line]
    assert len(warnings) == 1
    assert "not covering" in warnings[0]
    assert output.endswith("output\n")
