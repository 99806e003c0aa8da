"""An SGLang that the adapter does not know runs on, and the agent says that it does not cover it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.stand_ins import run_with_stand_in, the_only_warning

MODULE = "sglang.srt.model_executor.model_runner"
KNOWN_METHODS = """
    def _init_post_memory_pool_components(self): pass
    def forward(self, forward_batch, **kwargs): return "output"
"""


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
    output = run_with_stand_in(tmp_path, MODULE, source + "\ndef serve(): return 'served'\n")

    assert reason in the_only_warning(output)
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

    output = run_with_stand_in(tmp_path, MODULE, source)

    assert "not covering" in the_only_warning(output)
    assert output.endswith("output\n")
