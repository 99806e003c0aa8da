"""The allocator, the prefix index, salts and weights of a running engine: quiet while healthy, named when broken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.vllm.harness import Engine, Watched, checked
from tests.otlp_receiver import OtlpReceiver

# The least that vLLM takes for this length: most of a crowd is preempted.
SMALL_POOL: dict[str, Any] = {"num_gpu_blocks_override": 33}
HEALTHY = ["healthy", "crowded"]
FAULTS = ["stale_weights", "forgotten_salt", "wrong_hit", "double_free", "double_allocation", "missing_touch"]


def follows(receiver: OtlpReceiver) -> bool:
    """Both the scheduler's process and the worker's say that they know who holds what."""
    subjects = ("allocator", "ownership")
    return all(receiver.latest("kvcanary.coverage", kvcanary_subject=subject) == 1 for subject in subjects)


def quiet(receiver: OtlpReceiver) -> bool:
    return follows(receiver) and checked("chain", 1)(receiver)


def test_conversations_aborts_salts_resets_and_new_weights_are_answered_as_without_the_agent(engine: Engine) -> None:
    run = engine.watch(acts=HEALTHY, **SMALL_POOL, until=quiet)

    assert run.result == engine.generate(acts=HEALTHY, **SMALL_POOL)
    assert "tokens" in run.result
    assert run.violations == []


@pytest.mark.parametrize(
    ("acts", "options"),
    [
        pytest.param(["crowded"], {"enable_prefix_caching": False, **SMALL_POOL}, id="no_prefix_cache"),
        pytest.param(HEALTHY, {"model": "gemma3_hybrid", "num_gpu_blocks_override": 129}, id="sliding_windows"),
    ],
)
def test_other_allocators_are_followed_without_a_false_report(
    engine: Engine, acts: list[str], options: dict[str, Any]
) -> None:
    run = engine.watch(acts=acts, **options, environment={"KVCANARY_CONTENT": "full"}, until=quiet)

    assert "tokens" in run.result
    assert run.violations == []
    assert "not covering" not in run.output


@pytest.fixture(scope="module")
def broken(engine: Engine) -> Watched:
    """A run in which one thing after the other is broken."""

    def all_named(receiver: OtlpReceiver) -> bool:
        named = {event.attributes.get("kvcanary.request", "") for event in receiver.events("kvcanary.violation")}
        return all(any(name.startswith(fault) for name in named) for fault in FAULTS if fault != "double_free")

    return engine.watch(acts=FAULTS, **SMALL_POOL, until=all_named)


@pytest.mark.parametrize(
    ("fault", "pool", "kind", "cause"),
    [
        ("stale_weights", "kv", "epoch", "cache_survived_weight_update"),
        ("forgotten_salt", "kv", "namespace", "prefix_shared_across_namespaces"),
        ("wrong_hit", "allocator", "index", "prefix_index_wrong"),
        ("wrong_hit", "kv", "token", "wrong_prefix_hit"),
        ("double_allocation", "allocator", "ownership", "double_allocation"),
        ("double_allocation", "kv", "ownership", "double_allocation"),
        ("missing_touch", "allocator", "ownership", "allocator_misuse"),
        # Free or another's: which of the two is nothing that a missing reference tells.
        ("missing_touch", "kv", "ownership", None),
    ],
)
def test_what_is_broken_is_named_first_by_the_process_that_knows(
    broken: Watched, fault: str, pool: str, kind: str, cause: str | None
) -> None:
    assert "tokens" in broken.result
    found = [
        event.attributes
        for event in broken.violations
        if event.attributes["kvcanary.pool"] == pool
        and event.attributes.get("kvcanary.request", "").startswith(f"{fault}-")
    ]

    first = min(found, key=lambda attributes: attributes["kvcanary.step"])
    assert first["kvcanary.kind"] == kind
    assert cause in (None, first["kvcanary.cause"])


def test_a_double_free_names_the_request_that_still_holds_the_block(broken: Watched) -> None:
    (found,) = (
        event.attributes
        for event in broken.violations
        if event.attributes["kvcanary.cause"] == "double_free" and "kvcanary.request" not in event.attributes
    )

    assert found["kvcanary.writer"].startswith("double_free-")
    assert [name.split("-")[0] for name in found["kvcanary.block_history"]][-2:] == ["freed_once", "double_free"]


def test_in_raise_mode_the_scheduler_fails_the_step_before_it_runs(engine: Engine) -> None:
    run = engine.watch(
        acts=["double_free"],
        **SMALL_POOL,
        environment={"KVCANARY_MODE": "raise"},
        until=lambda receiver: bool(receiver.events("kvcanary.violation")),
    )

    assert run.result["error"].startswith("KVCanaryError: KV cache violation: ownership")
    assert {event.attributes["kvcanary.pool"] for event in run.violations} == {"allocator"}
