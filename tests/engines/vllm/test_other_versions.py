"""A vLLM that the adapter does not know runs on, and the agent says that it does not cover it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.stand_ins import run_with_stand_in, the_only_warning
from tests.engines.vllm.harness import HERE, Engine

MODULE = "vllm.v1.worker.gpu_model_runner"
KNOWN_METHODS = """
    def initialize_kv_cache(self, kv_cache_config, is_profiling=False): pass
    def _update_states(self, scheduler_output): pass
    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens): pass
    def _model_forward(self, input_ids=None, positions=None, **kwargs): return "output"
    def shutdown(self): pass
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("", "has no class GPUModelRunner", id="class"),
        pytest.param(
            "class GPUModelRunner:" + KNOWN_METHODS.replace("_model_forward", "_run_model"),
            "GPUModelRunner has no method _model_forward",
            id="method",
        ),
        pytest.param(
            "class GPUModelRunner:" + KNOWN_METHODS.replace("scheduler_output)", "output)"),
            "GPUModelRunner._update_states takes (output), wanted (scheduler_output, ...)",
            id="parameters",
        ),
    ],
)
def test_what_is_missing_is_one_warning_and_the_program_goes_on(tmp_path: Path, source: str, reason: str) -> None:
    serve = """
def serve():
    if "GPUModelRunner" in globals():
        GPUModelRunner().initialize_kv_cache(None)
    return "served"
"""
    output = run_with_stand_in(tmp_path, MODULE, source + serve)

    assert reason in the_only_warning(output)
    assert output.endswith("served\n")


def test_a_runner_whose_pool_cannot_be_described_serves_without_the_agent(tmp_path: Path) -> None:
    source = (
        "class GPUModelRunner:"
        + KNOWN_METHODS
        + (
            "\ndef serve():\n"
            "    runner = GPUModelRunner()\n"
            "    runner.initialize_kv_cache(None)\n"
            "    runner._update_states(None)\n"
            "    return runner._model_forward()\n"
        )
    )

    output = run_with_stand_in(tmp_path, MODULE, source)

    assert "not covering" in the_only_warning(output)
    assert output.endswith("output\n")


def test_a_real_engine_with_an_unknown_method_serves_with_coverage_0(engine: Engine) -> None:
    adapters = f"{HERE / 'other_version.py'},vllm"

    run = engine.watch(
        environment={"KVCANARY_ADAPTERS": adapters},
        until=lambda receiver: receiver.latest("kvcanary.coverage", kvcanary_subject="V1 model runner") is not None,
    )

    assert "error" not in run.result
    assert run.receiver.latest("kvcanary.coverage", kvcanary_subject="V1 model runner") == 0
    assert run.output.count("not covering V1 model runner of vllm") == 1
    assert run.receiver.points_of("kvcanary.checks") == []
