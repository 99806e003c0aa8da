"""Faults put into a running engine are named at the step that would use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.harness import HERE, Engine
from tests.otlp_receiver import OtlpReceiver


def injecting(faults: list[dict[str, Any]], report: Path, **environment: str) -> dict[str, str]:
    """The environment that has `fault_injector.py` put these faults in, and write down where."""
    return {
        "KVCANARY_ADAPTERS": f"vllm,{HERE / 'fault_injector.py'}",
        "FAULTS": json.dumps(faults),
        "FAULT_REPORT": str(report),
        **environment,
    }


def injected(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()]


def violations(count: int) -> Callable[[OtlpReceiver], bool]:
    return lambda receiver: len(receiver.events("kvcanary.violation")) >= count


def test_a_flipped_bit_is_named_by_slot_layer_and_part_at_the_next_step(engine: Engine, tmp_path: Path) -> None:
    places = [(0, "k"), (0, "v"), (-1, "k"), (-1, "v")]
    faults = [
        {"kind": "flip_bit", "after_step": 4 + 2 * i, "layer": layer, "part": part}
        for i, (layer, part) in enumerate(places)
    ]
    report = tmp_path / "faults"

    run = engine.watch(environment=injecting(faults, report, KVCANARY_CONTENT="full"), until=violations(4))

    first_seen: dict[tuple[str, str, int], int] = {}
    for violation in run.violations:
        found = violation.attributes
        assert found["kvcanary.kind"] == "content"
        place = (found["kvcanary.layer"], found["kvcanary.part"], found["kvcanary.slot"])
        first_seen[place] = min(found["kvcanary.step"], first_seen.get(place, 1 << 30))
    assert first_seen == {
        (fault["layer"], fault["part"], fault["slots"][0]): fault["after_step"] + 1 for fault in injected(report)
    }


def test_scrubbing_finds_a_flipped_bit_within_its_period(engine: Engine, tmp_path: Path) -> None:
    period = 12
    faults = [{"kind": "flip_bit", "after_step": 4, "layer": -1, "part": "v"}]
    report = tmp_path / "faults"
    environment = {"KVCANARY_SCRUB_PERIOD": str(period), "KVCANARY_SWEEP_SLOTS_PER_STEP": "0"}

    run = engine.watch(environment=injecting(faults, report, **environment), until=violations(1))

    (fault,) = injected(report)
    first = min(run.violations, key=lambda violation: violation.attributes["kvcanary.step"]).attributes
    assert first["kvcanary.kind"] == "content"
    assert (first["kvcanary.layer"], first["kvcanary.part"]) == (fault["layer"], "v")
    assert first["kvcanary.slot"] == fault["slots"][0]
    assert 4 < first["kvcanary.step"] <= 4 + period


def test_swapped_block_table_entries_are_seen_at_the_next_step(engine: Engine, tmp_path: Path) -> None:
    faults = [{"kind": "swap_blocks", "after_step": 4}]
    report = tmp_path / "faults"

    run = engine.watch(environment=injecting(faults, report), until=violations(1))

    (fault,) = injected(report)
    first = min(run.violations, key=lambda violation: violation.attributes["kvcanary.step"]).attributes
    assert first["kvcanary.kind"] in {"token", "position", "chain"}
    assert first["kvcanary.step"] == 5
    assert first["kvcanary.slot"] in fault["slots"]


@pytest.mark.parametrize(
    ("multiprocessing", "error"),
    [pytest.param("0", "KVCanaryError", id="in_process"), pytest.param("1", "EngineDeadError", id="multiprocess")],
)
def test_in_raise_mode_the_client_gets_the_engines_error_and_no_tokens(
    engine: Engine, tmp_path: Path, multiprocessing: str, error: str
) -> None:
    faults = [{"kind": "flip_bit", "after_step": 4, "layer": 0, "part": "k"}]
    report = tmp_path / "faults"
    environment = {
        "KVCANARY_MODE": "raise",
        "KVCANARY_CONTENT": "full",
        "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
    }

    run = engine.watch(environment=injecting(faults, report, **environment), until=violations(1))

    assert run.result["error"].startswith(error)
    assert "tokens" not in run.result
    assert {violation.attributes["kvcanary.step"] for violation in run.violations} == {5}
