"""Every drill, in a real engine: announced, and reported as what it is, at the step that first meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcanary_agent.settings import DRILLS
from tests.engines.vllm.harness import ENGINE, HERE, Engine, Watched
from tests.otlp_receiver import Log

# In the second round's decoding steps the first request runs alone, and the others' blocks are idle.
STEP = 16
EXPECTED = {
    "content": ("content", "stray_write"),
    "idle_block": ("content", "block_overwritten"),
    "nonfinite": ("nonfinite", "nonfinite_in_null_block"),
    "block_table_swap": ("position", "block_table_swapped"),
    "foreign_block": ("ownership", "foreign_block"),
    "slot_mapping": ("address", "slot_mapping_wrong"),
    "lost_write": ("lost_write", "write_dropped"),
}


class Drilled(Engine):
    """Runs `drilled.py`."""

    def _program(self, options: dict[str, Any]) -> list[str | Path]:
        path = self._folder / "drills.json"
        path.write_text(json.dumps({"engine": {**ENGINE, "model": str(self.models / "llama")}, **options}))
        return [HERE / "drilled.py", path]


@pytest.fixture(scope="module")
def drilled(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    # Four requests at once are needed to map a block of another one.
    drills = [f"{kind}@{4 if kind == 'foreign_block' else STEP},seed=3" for kind in DRILLS]
    # The patrol comes past every block within a few steps.
    environment = {"KVCANARY_CONTENT": "full", "KVCANARY_SWEEP_SLOTS_PER_STEP": "100000"}
    return Drilled(models, tmp_path_factory.mktemp("drills")).watch(
        drills=drills,
        environment=environment,
        until=lambda receiver: len(receiver.events("kvcanary.drill")) == len(drills),
    )


def test_every_drill_is_in_the_list() -> None:
    assert EXPECTED.keys() == set(DRILLS)


@pytest.mark.parametrize("kind", DRILLS)
def test_a_drill_is_reported_as_what_it_is_at_the_step_that_meets_it(drilled: Watched, kind: str) -> None:
    drill, found = _drill_and_violations(drilled, kind)

    assert found, f"nothing was reported after {drill.body}"
    first = found[0].attributes
    assert (first["kvcanary.kind"], first["kvcanary.cause"]) == EXPECTED[kind]
    # The patrol compares one of the six parts at each step.
    late = 5 if kind == "idle_block" else 0
    assert 0 <= first["kvcanary.step"] - drill.attributes["kvcanary.step"] <= late


def test_what_is_wrong_with_a_request_is_part_of_the_trace_that_the_request_came_with(drilled: Watched) -> None:
    found = [violation for violation in drilled.violations if "kvcanary.request" in violation.attributes]

    assert found
    for violation in found:
        round_ = int(violation.attributes["kvcanary.request"].partition("-")[0])
        assert int.from_bytes(violation.trace_id, "big") == round_
    linked = {int.from_bytes(trace, "big") for span in drilled.receiver.spans for trace, _ in span.links}
    assert linked == {int(violation.attributes["kvcanary.request"].partition("-")[0]) for violation in found}


def _drill_and_violations(drilled: Watched, kind: str) -> tuple[Log, list[Log]]:
    """A drill's announcement, and the violations up to the next one, in order."""
    drills = sorted(drilled.receiver.events("kvcanary.drill"), key=lambda drill: drill.time_ns)
    (number,) = (i for i, drill in enumerate(drills) if drill.attributes["kvcanary.kind"] == kind)
    end = drills[number + 1].time_ns if number + 1 < len(drills) else 1 << 63
    found = [violation for violation in drilled.violations if drills[number].time_ns <= violation.time_ns < end]
    return drills[number], sorted(found, key=lambda violation: violation.time_ns)
