"""A part of the agent that fails is switched off: the engine answers as without it, and coverage says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.vllm.harness import HERE, Engine
from tests.otlp_receiver import OtlpReceiver


@pytest.fixture(scope="module")
def without_agent(engine: Engine) -> dict[str, Any]:
    return engine.generate()


def something_is_not_covered(receiver: OtlpReceiver) -> bool:
    return any(point.value == 0 for point in receiver.points_of("kvcanary.coverage"))


@pytest.mark.parametrize(
    "function",
    [
        "kvcanary_agent.adapters.vllm.model_runner:_around_model_forward",
        "kvcanary_agent.adapters.vllm.attached_runner:AttachedRunner.hand_out_blocks",
        "kvcanary_agent.adapters.vllm.pool:describe_pool",
        "kvcanary_agent.canary.canary:Canary.before_forward",
    ],
)
def test_a_function_of_the_agent_that_raises_costs_coverage_and_nothing_else(
    engine: Engine, without_agent: dict[str, Any], function: str
) -> None:
    run = engine.watch(
        environment={
            "KVCANARY_ADAPTERS": f"{HERE / 'agent_breaker.py'},vllm",
            "BREAK": function,
            "KVCANARY_MODE": "raise",
        },
        until=something_is_not_covered,
    )

    assert run.result == without_agent
    assert run.violations == []
    assert run.output.count("kvcanary: not covering") == 1
    assert "broken on purpose" in run.output
