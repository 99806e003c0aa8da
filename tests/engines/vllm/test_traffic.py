"""Healthy traffic of many kinds: nothing is reported, every token is the same as without the agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.harness import ENGINE, HERE, Engine, checked

# Each engine but the first starts fast in a process that has vLLM loaded. N-grams load numba, after which vLLM cannot
# start another engine in the process.
PROCESSES = [["no_prefix_cache", "draft_model"], ["asynchronous"], ["n_gram"]]


class Traffic(Engine):
    """Runs `traffic.py`."""

    def _program(self, options: dict[str, Any]) -> list[str | Path]:
        self._jobs += 1
        path = self._folder / f"traffic{self._jobs}.json"
        path.write_text(json.dumps({"models": str(self.models), "engine": ENGINE, **options}))
        return [HERE / "traffic.py", path]


@pytest.fixture(scope="module")
def traffic(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    return Traffic(models, tmp_path_factory.mktemp("jobs"))


@pytest.mark.parametrize("scenarios", PROCESSES, ids=" ".join)
def test_nothing_is_reported_and_every_token_is_the_same(traffic: Traffic, scenarios: list[str]) -> None:
    expected = traffic.generate(scenarios=scenarios)

    run = traffic.watch(scenarios=scenarios, environment={"KVCANARY_CONTENT": "full"}, until=checked("content", 1))

    assert expected.keys() == {"tokens"}, expected
    assert run.result == expected
    assert run.violations == []
    assert run.receiver.latest("kvcanary.violations") is None
    left_out = {line.partition("not covering ")[2] for line in run.output.splitlines() if "not covering" in line}
    assert all("layer of a draft model" in line for line in left_out)


def test_adapters_that_share_prompts_are_told_apart(traffic: Traffic) -> None:
    # vLLM's CPU build answers differently from run to run here, with or without the agent: only reports are judged.
    run = traffic.watch(scenarios=["adapters"], environment={"KVCANARY_CONTENT": "full"}, until=checked("content", 1))

    assert "tokens" in run.result
    assert run.violations == []
    assert "not covering" not in run.output


def test_both_ranks_of_a_tensor_parallel_engine_are_checked(traffic: Traffic) -> None:
    # One CPU for each rank; they would not start on what vLLM takes for too few.
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    expected = traffic.generate(scenarios=["tensor_parallel"], environment=binding)

    run = traffic.watch(
        scenarios=["tensor_parallel"],
        environment={**binding, "KVCANARY_CONTENT": "full"},
        until=lambda receiver: (
            {point.attributes["kvcanary.rank"] for point in receiver.points_of("kvcanary.checks")} == {0, 1}
        ),
    )

    assert run.result == expected
    assert run.violations == []
    assert run.output.count("kvcanary: watching pool") == 2
