"""Offline inference with the agent: nothing is reported, everything is checked, every token is the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.vllm.harness import READ_AT_LEAST, Engine, checked, passed_slots

UNCHUNKED = {"max_num_batched_tokens": 2048}
CHUNKED = {"max_num_batched_tokens": 64}


@pytest.fixture(scope="module", params=[UNCHUNKED, CHUNKED], ids=["whole_prefill", "chunked_prefill"])
def prefill(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(scope="module")
def without_agent(engine: Engine, prefill: dict[str, Any]) -> dict[str, Any]:
    return engine.generate(**prefill)


@pytest.mark.parametrize("multiprocessing", ["0", "1"], ids=["in_process", "multiprocess"])
def test_healthy_requests_are_checked_and_answered_as_without_the_agent(
    engine: Engine, prefill: dict[str, Any], without_agent: dict[str, Any], multiprocessing: str
) -> None:
    run = engine.watch(
        **prefill,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing, "KVCANARY_CONTENT": "full"},
        until=checked("content", 2 * READ_AT_LEAST),
    )

    assert run.result == without_agent
    assert run.violations == []
    assert run.receiver.latest("kvcanary.violations") is None
    for check in ("address", "unwritten", "position", "token", "chain"):
        assert passed_slots(run.receiver, check) >= 2 * READ_AT_LEAST, check
    for subject in ("pool kv", "allocator", "ownership"):
        assert run.receiver.latest("kvcanary.coverage", kvcanary_subject=subject) == 1, subject


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("mistral_sliding", CHUNKED, id="sliding_window"),
        pytest.param("gemma3_hybrid", CHUNKED, id="groups_that_overlay_each_other"),
        pytest.param("llama_one_kv_head", {}, id="one_kv_head"),
        pytest.param("deepseek_mla", {"block_size": 16}, id="latent_cache"),
        pytest.param("llama", {"num_gpu_blocks_override": 33, "dtype": "bfloat16"}, id="preemption"),
    ],
)
def test_other_caches_and_full_pools_are_checked_without_a_false_report(
    engine: Engine, model: str, options: dict[str, Any]
) -> None:
    run = engine.watch(
        model=model, **options, environment={"KVCANARY_CONTENT": "full"}, until=checked("content", READ_AT_LEAST)
    )

    assert "error" not in run.result
    assert run.violations == []
    assert "not covering" not in run.output
