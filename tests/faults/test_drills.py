"""Drills in the demo engine: a fault that is asked for is announced, strikes once, and is reported as what it is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import kvcanary_agent
from kvcanary_agent import runtime
from kvcanary_agent.canary import Kind, KVCanaryError
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.engine import Engine
from kvcanary_agent.faults import drills
from kvcanary_agent.settings import DRILLS, Drill, Settings, SettingsError
from tests.canary.toy import RecordingSink

STEP = 8
REPORTED_AS = {
    "content": {Kind.CONTENT},
    "idle_block": {Kind.CONTENT},
    "nonfinite": {Kind.NONFINITE},
    "block_table_swap": {Kind.POSITION},
    "foreign_block": {Kind.OWNERSHIP},
    "slot_mapping": {Kind.ADDRESS, Kind.UNWRITTEN, Kind.OWNERSHIP},
    "lost_write": {Kind.LOST_WRITE},
}


class DrillSink(RecordingSink):
    """Keeps the drills that were announced, each with the number of violations found before."""

    def __init__(self) -> None:
        super().__init__()
        self.drills: list[tuple[str, int, int]] = []
        self.descriptions: list[str] = []

    def drill(self, kind: str, step: int, description: str) -> None:
        assert description
        self.descriptions.append(description)
        self.drills.append((kind, step, len(self.violations)))


class OneSink:
    """In the place of the process's telemetry."""

    def __init__(self) -> None:
        self.sink = DrillSink()

    def open_pool(self, **_: Any) -> DrillSink:
        return self.sink

    def coverage(self, *_: Any) -> None:
        pass

    def patched(self, *_: Any) -> None:
        pass

    def shutdown(self, timeout_s: float) -> None:
        pass


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[DrillSink]:
    telemetry = OneSink()
    monkeypatch.setattr(runtime, "_telemetry", telemetry)
    kvcanary_agent.install()
    yield telemetry.sink
    kvcanary_agent.uninstall()


def serve(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    monkeypatch.setattr(runtime, "_settings", Settings.from_environ({"KVCANARY_CONTENT": "full", **environ}))
    engine = Engine(EngineConfig(num_blocks=64, max_model_len=256))
    random = Random(3)
    prompts = [[random.randrange(512) for _ in range(length)] for length in (30, 45, 20)]
    # The first request ends early and leaves blocks behind that nobody reads.
    engine.generate(prompts[:1], max_tokens=2)
    engine.generate(prompts[1:], max_tokens=60)


def test_every_kind_of_drill_has_an_expected_report() -> None:
    assert set(REPORTED_AS) == set(DRILLS)


@pytest.mark.parametrize("kind", DRILLS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_drill_strikes_once_and_is_reported_as_what_it_is(
    kind: str, seed: int, sink: DrillSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, KVCANARY_DRILL=f"{kind}@{STEP},seed={seed}", KVCANARY_SWEEP_SLOTS_PER_STEP="512")
    ((announced, step, found_before),) = sink.drills
    assert (announced, found_before) == (kind, 0)
    assert step >= STEP
    assert sink.violations
    assert sink.violations[0].kind in REPORTED_AS[kind]
    assert min(violation.step for violation in sink.violations) >= step


def test_without_a_drill_nothing_strikes(sink: DrillSink, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    assert not sink.drills
    assert not sink.violations


@pytest.mark.parametrize(
    ("drill", "said"),
    [
        ("nonfinite@8", "nonfinite@8 has not struck in {} steps, and still waits; it needs a null block"),
        ("content@5000", "content@5000 has not struck before the end: there was no step 5000"),
    ],
)
def test_a_drill_that_finds_no_occasion_says_so(
    sink: DrillSink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, drill: str, said: str
) -> None:
    monkeypatch.setattr(drills, "PATIENCE", 10)
    monkeypatch.setitem(drills._INJECTIONS, "nonfinite", lambda canary, step: None)
    serve(monkeypatch, KVCANARY_DRILL=drill)
    gc.collect()
    assert not sink.drills
    (line,) = [record.getMessage() for record in caplog.records if "has not struck" in record.getMessage()]
    assert said.format(10) in line


def test_a_drill_that_waits_when_the_process_ends_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcanary_agent", "run", "-c", PROGRAM.replace(", list(range(100, 120))", "")],
        env={**os.environ, "KVCANARY_DRILL": "foreign_block@5"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if "has not struck" in line]
    assert "it needs two requests" in line


def test_a_confirmed_drill_fails_a_step_in_raise_mode(sink: DrillSink, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVCanaryError, match="content"):
        serve(monkeypatch, KVCANARY_DRILL=f"content@{STEP},confirm", KVCANARY_MODE="raise")
    assert len(sink.drills) == 1


def test_a_drill_in_raise_mode_has_to_be_confirmed() -> None:
    environ = {"KVCANARY_DRILL": "content@200", "KVCANARY_MODE": "raise"}
    with pytest.raises(SettingsError, match="confirm"):
        Settings.from_environ(environ)
    settings, (message,) = Settings.tolerant(environ)
    assert settings.drill is None
    assert "KVCANARY_DRILL" in message


@pytest.mark.parametrize(
    "text", ["content", "content@", "content@0", "flood@7", "content@7,seed", "content@7,seed=x", "content@7 seed=1"]
)
def test_a_malformed_drill_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(SettingsError, match="KVCANARY_DRILL"):
        Settings.from_environ({"KVCANARY_DRILL": text})


def test_a_drill_is_read_with_all_its_options() -> None:
    settings = Settings.from_environ({"KVCANARY_DRILL": "lost_write@50,seed=7,confirm"})
    assert settings.drill == Drill(kind="lost_write", step=50, seed=7, confirmed=True)


PROGRAM = """
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.engine import Engine

Engine(EngineConfig()).generate([list(range(40)), list(range(100, 120))], max_tokens=30)
"""


def test_a_server_under_a_drill_says_so_in_its_log_before_the_alarm() -> None:
    environment = {**os.environ, "KVCANARY_DRILL": "content@5", "KVCANARY_CONTENT": "full"}
    done = subprocess.run(
        [sys.executable, "-m", "kvcanary_agent", "run", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = [line for line in done.stderr.splitlines() if "kvcanary" in line]
    assert "DRILL" in told[0]
    assert "asks for a content fault from step 5" in told[0]
    assert "watching pool kv of kvcanary-demo" in told[1]
    assert "DRILL: content injected at step 5" in told[2]
    assert "content violation" in told[3]


def test_the_seed_chooses_where_a_drill_strikes(sink: DrillSink, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 0, 1, 2, 3):
        serve(monkeypatch, KVCANARY_DRILL=f"content@{STEP},seed={seed}")
    first, again, *others = sink.descriptions
    assert first == again
    assert len({first, *others}) > 2
