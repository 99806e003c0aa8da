"""Engines of different shapes, covered by a table alone or by a short adapter: silent while healthy, and every fault
that the shape allows is seen before its step is used."""

from __future__ import annotations

import pytest

from tests.adapters.conftest import STAND_INS, StandIns, answers

ADAPTERS = ["nano.toml", "layered.toml", "contiguous.toml", "tokenpool.toml", "hybrid_adapter.py"]

KINDS = {
    "content": "content",
    "lost_write": "lost_write",
    "nonfinite": "nonfinite",
    "unwritten": "unwritten",
    "position": "position",
    "token": "token",
    "chain": "chain",
    "address": "address",
    "ownership": "ownership",
    "double_free": "ownership",
}


def engine_of(adapter: str) -> str:
    return adapter.partition(".")[0].removesuffix("_adapter")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_healthy_engine_answers_as_without_the_agent_and_nothing_is_reported(
    stand_ins: StandIns, adapter: str
) -> None:
    engine = engine_of(adapter)
    alone = answers(stand_ins.serve(engine))
    raising = {"KVCANARY_MODE": "raise", "KVCANARY_CONTENT": "full"}
    watched = stand_ins.serve(engine, adapter=STAND_INS / adapter, **raising)
    assert answers(watched) == alone
    said = [line for line in watched.stderr.splitlines() if "not covering ownership of contiguous" not in line]
    assert len(said) == 1, watched.stderr
    assert said[0].startswith(f"kvcanary: watching pool kv of {engine}: ")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_fault_that_the_shape_allows_is_reported(stand_ins: StandIns, adapter: str) -> None:
    result = stand_ins.serve(
        engine_of(adapter), "faults", adapter=STAND_INS / adapter, KVCANARY_MODE="raise", KVCANARY_CONTENT="full"
    )
    found = answers(result)
    assert len(found) >= 5
    missed = {fault: kinds for fault, kinds in found.items() if KINDS[fault] not in kinds}
    assert not missed, result.stderr


def test_an_adapter_with_two_groups_of_layers_takes_at_most_sixty_lines() -> None:
    assert len((STAND_INS / "hybrid_adapter.py").read_text().splitlines()) <= 60


POOL_ONLY = """
import layered, torch
engine = layered.Engine()
request = engine.add("a", [1, 2, 3, 4, 5], 12)
for _ in range(3):
    engine.step()
idle = engine.cache.take(1)
engine.model.cache.write(0, torch.tensor([idle[0] * 4]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
engine.model.cache.write(1, torch.tensor([idle[0] * 4]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
{act}
try:
    for _ in range(6):
        engine.step()
    print("served")
except RuntimeError as error:
    print(*sorted(f"{{v.kind}} {{v.slot}} {{v.writer}}" for v in error.violations), "of", idle[0] * 4, sep=", ")
"""


def pool_only(stand_ins: StandIns, act: str) -> tuple[str, str]:
    environ = {"KVCANARY_MODE": "raise", "KVCANARY_SWEEP_SLOTS_PER_STEP": "1000"}
    result = stand_ins.script(POOL_ONLY.format(act=act), STAND_INS / "layered_pool_only.toml", **environ)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr


def test_where_the_pool_alone_is_known_its_writes_are_recorded_and_patrolled(stand_ins: StandIns) -> None:
    said, log = pool_only(stand_ins, "engine.cache.values[1][idle[0], 1, 0, 3] += 1")
    found, slot = said.split(", of, ")
    assert found == f"content {slot} write"
    assert "not covering reads of layered: its adapter knows the pool's writes alone" in log


def test_where_the_pool_alone_is_known_what_is_freed_may_change(stand_ins: StandIns) -> None:
    assert pool_only(stand_ins, "")[0] == "served"
    freed = "engine.cache.give_back(idle); engine.cache.unused.reverse(); engine.cache.values[1][idle[0], 1, 0, 3] += 1"
    assert pool_only(stand_ins, freed)[0] == "served"


def test_where_the_pool_alone_is_known_a_write_of_what_is_there_is_no_lost_one(stand_ins: StandIns) -> None:
    write = "engine.cache.write({}, torch.tensor([29, 29]), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))"
    both = "; ".join(write.format(layer) for layer in (0, 1))
    assert pool_only(stand_ins, f"{both}; {both}")[0] == "served"
