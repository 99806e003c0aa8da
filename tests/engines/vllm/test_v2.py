"""The V2 model runner: nothing is reported, everything is checked, every token is the same; faults are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.harness import READ_AT_LEAST, Engine, Watched, checked, passed_slots
from tests.engines.vllm.test_faults import injected, injecting, violations

CHUNKED = {"max_num_batched_tokens": 64}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def watch(engine: Engine, reads: int, **options: Any) -> Watched:
    run = engine.watch(v2=True, **options, environment={"KVCANARY_CONTENT": "full"}, until=checked("content", reads))
    assert "Using V2 Model Runner" in run.output
    return run


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 2048}, id="whole_prefill"),
        pytest.param({**CHUNKED, "num_gpu_blocks_override": 33, "async_scheduling": True}, id="async_preemption"),
    ],
)
def test_healthy_requests_are_checked_and_answered_as_without_the_agent(
    engine: Engine, llama_without_agent: dict[str, Any], options: dict[str, Any]
) -> None:
    run = watch(engine, 2 * READ_AT_LEAST, **options)

    assert run.result == llama_without_agent
    assert run.violations == []
    assert run.receiver.latest("kvcanary.violations") is None
    for check in ("address", "unwritten", "position", "token", "chain"):
        assert passed_slots(run.receiver, check) >= 2 * READ_AT_LEAST, check
    assert run.receiver.latest("kvcanary.coverage", kvcanary_subject="pool kv") == 1
    assert "not covering" not in run.output


def test_the_layers_of_a_draft_model_are_named_as_not_covered(
    engine: Engine, llama_without_agent: dict[str, Any]
) -> None:
    draft_model = {
        "method": "draft_model",
        "model": str(engine.models / "llama_one_kv_head"),
        "num_speculative_tokens": 3,
    }
    # Fewer steps than tokens: drafts are accepted, and all that a step verifies is read in one.
    run = watch(engine, READ_AT_LEAST, speculative_config=draft_model)

    assert run.result == llama_without_agent
    assert run.violations == []
    for layer in (0, 1):
        name = f"draft_model.model.layers.{layer}.self_attn.attn"
        assert run.receiver.latest("kvcanary.coverage", kvcanary_subject=name) == 0
    assert run.output.count("not covering") == 2


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("gemma3_hybrid", {**CHUNKED, "speculative_config": NGRAM}, id="sliding_groups_and_drafts"),
        pytest.param("deepseek_mla", {"block_size": 16}, id="latent_cache"),
    ],
)
def test_other_caches_are_checked_without_a_false_report(engine: Engine, model: str, options: dict[str, Any]) -> None:
    run = watch(engine, READ_AT_LEAST // 2, model=model, **options)

    assert "error" not in run.result
    assert run.violations == []
    assert "not covering" not in run.output


def test_a_flipped_bit_and_a_foreign_block_are_named_at_the_next_step(engine: Engine, tmp_path: Path) -> None:
    faults = [
        {"kind": "flip_bit", "after_step": 4, "layer": -1, "part": "v"},
        {"kind": "foreign_block", "after_step": 8},
    ]
    report = tmp_path / "faults"

    run = engine.watch(v2=True, environment=injecting(faults, report, KVCANARY_CONTENT="full"), until=violations(2))

    flipped, foreign = injected(report)
    found = [violation.attributes for violation in run.violations]
    first = min((v for v in found if v["kvcanary.kind"] == "content"), key=lambda v: v["kvcanary.step"])
    assert (first["kvcanary.layer"], first["kvcanary.part"], first["kvcanary.slot"], first["kvcanary.step"]) == (
        *(flipped["layer"], "v", flipped["slots"][0], 5),
    )
    first = min((v for v in found if v["kvcanary.slot"] in foreign["slots"]), key=lambda v: v["kvcanary.step"])
    assert first["kvcanary.kind"] in {"ownership", "token"}
    assert first["kvcanary.step"] == 9
