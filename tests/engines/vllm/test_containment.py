"""With KVCANARY_ON_VIOLATION=evict no later request is served from a block that was found corrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.harness import ENGINE, HERE, Engine, Watched
from tests.engines.vllm.test_faults import injecting
from tests.otlp_receiver import OtlpReceiver

MAX_TOKENS = 40
ASKED = [3 + 7 * at % 400 for at in range(150)]
OTHER = [5 + 11 * at % 400 for at in range(70)]
# While the second prompt is answered, the blocks of the first one are idle.
IDLE, RUNNING = MAX_TOKENS + 4, 6


class OneByOne(Engine):
    """Runs `one_by_one.py`: the same question before and after another one."""

    def _program(self, options: dict[str, Any]) -> list[str | Path]:
        job = {
            "engine": {**ENGINE, "model": str(self.models / "llama"), **options.pop("engine", {})},
            "prompts": [ASKED, OTHER, ASKED],
            "max_tokens": MAX_TOKENS,
            "v2": options.pop("v2", False),
        }
        self._jobs += 1
        path = self._folder / f"job{self._jobs}.json"
        path.write_text(json.dumps(job))
        return [HERE / "one_by_one.py", path]


@pytest.fixture(scope="module")
def one_by_one(models: Path, tmp_path_factory: pytest.TempPathFactory) -> OneByOne:
    return OneByOne(models, tmp_path_factory.mktemp("containment"))


@pytest.fixture(scope="module")
def right(one_by_one: OneByOne) -> list[list[int]]:
    tokens: list[list[int]] = one_by_one.generate()["tokens"]
    assert tokens[0] == tokens[2]
    return tokens


def spoiled(one_by_one: OneByOne, folder: Path, after_step: int, on_violation: str, **how: Any) -> Watched:
    """A run in which the first block of the first prompt is overwritten."""
    faults = [{"kind": "spoil_first_block", "after_step": after_step}]
    # The patrol comes past every block within a few steps.
    environment = injecting(
        faults,
        folder / "report",
        KVCANARY_CONTENT="full",
        KVCANARY_SWEEP_SLOTS_PER_STEP="100000",
        KVCANARY_ON_VIOLATION=on_violation,
        **how.pop("environment", {}),
    )
    until = evictions if on_violation == "evict" else violations
    return one_by_one.watch(environment=environment, until=until, **how)


def violations(receiver: OtlpReceiver) -> bool:
    return bool(receiver.events("kvcanary.violation"))


def evictions(receiver: OtlpReceiver) -> bool:
    return receiver.latest("kvcanary.evictions") is not None


def counted(run: Watched) -> dict[str, float]:
    points = run.receiver.points_of("kvcanary.evictions")
    return {str(point.attributes["kvcanary.outcome"]): point.value for point in points}


WAYS: dict[str, dict[str, Any]] = {
    "in_process": {},
    "multiprocess": {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
    "asynchronous": {"engine": {"async_scheduling": True}},
    "v2": {"v2": True},
}


@pytest.mark.parametrize("how", [pytest.param(dict(how), id=name) for name, how in WAYS.items()])
def test_a_corrupt_idle_block_is_computed_anew_for_the_next_request(
    one_by_one: OneByOne, right: list[list[int]], tmp_path: Path, how: dict[str, Any]
) -> None:
    run = spoiled(one_by_one, tmp_path, IDLE, "evict", **how)

    assert run.result["tokens"] == right
    assert counted(run) == {"evicted": 1}
    block = json.loads((tmp_path / "report").read_text())["block"]
    assert f"out of the prefix cache of vllm: block {block} (1 evicted)" in run.output


def test_without_the_setting_the_next_request_is_served_from_it(
    one_by_one: OneByOne, right: list[list[int]], tmp_path: Path
) -> None:
    run = spoiled(one_by_one, tmp_path, IDLE, "report")

    assert run.result["tokens"][:2] == right[:2]
    assert run.result["tokens"][2] != right[2]
    assert counted(run) == {}


def test_a_block_in_use_stays_with_its_request_and_leaves_the_index_with_all_that_follows_from_it(
    one_by_one: OneByOne, right: list[list[int]], tmp_path: Path
) -> None:
    run = spoiled(one_by_one, tmp_path, RUNNING, "evict")

    assert run.result["tokens"][0] != right[0], "the running request goes on with what it has"
    assert run.result["tokens"][1:] == right[1:]
    assert counted(run)["held"] == 1
    # Its prompt fills four whole blocks.
    assert counted(run)["following"] == 3


def test_a_healthy_engine_evicts_nothing(one_by_one: OneByOne, right: list[list[int]]) -> None:
    def passed(receiver: OtlpReceiver) -> bool:
        return receiver.latest("kvcanary.coverage", kvcanary_subject="ownership") == 1

    run = one_by_one.watch(environment={"KVCANARY_ON_VIOLATION": "evict", "KVCANARY_CONTENT": "full"}, until=passed)

    assert run.result["tokens"] == right
    assert counted(run) == {}
    assert run.violations == []
