"""The demo engine with its adapter, in this process: healthy traffic is silent, whatever happens around it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import kvcanary_agent
from kvcanary_agent import runtime
from kvcanary_agent.canary import Canary
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.engine import Engine
from kvcanary_agent.settings import Settings
from tests.canary.toy import RecordingSink


class Telemetry:
    """In the place of the process's telemetry: one sink, and what was said about coverage."""

    def __init__(self) -> None:
        self.sink = RecordingSink()
        self.uncovered: dict[str, str] = {}

    def open_pool(self, **_: Any) -> RecordingSink:
        return self.sink

    def coverage(self, engine: str, subject: str, covered: bool, reason: str = "") -> None:
        if not covered:
            self.uncovered[subject] = reason

    def patched(self, *_: Any) -> None:
        pass

    def shutdown(self, timeout_s: float) -> None:
        pass


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Telemetry]:
    telemetry = Telemetry()
    monkeypatch.setattr(runtime, "_telemetry", telemetry)
    kvcanary_agent.install()
    yield telemetry
    kvcanary_agent.uninstall()


def use(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    monkeypatch.setattr(runtime, "_settings", Settings.from_environ(environ))


def serve(engine: Engine, random: Random, requests: int = 12) -> None:
    """Prompts with common beginnings, some of them with several continuations."""
    common = [random.randrange(512) for _ in range(24)]
    for _ in range(requests):
        own = [random.randrange(512) for _ in range(random.randrange(1, 20))]
        engine.add_request(
            common[: random.randrange(25)] + own, max_tokens=random.randrange(1, 16), n=random.choice((1, 1, 3))
        )
    while not engine.is_idle:
        engine.step()


@pytest.mark.parametrize("content", ["off", "scrub", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_healthy_traffic_passes_in_raise_mode(
    content: str, seed: int, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, KVCANARY_MODE="raise", KVCANARY_CONTENT=content, KVCANARY_SCRUB_PERIOD="8")
    engine = Engine(EngineConfig(num_blocks=14, max_model_len=64, max_batched_tokens=16))
    serve(engine, Random(seed))
    assert engine.scheduler.num_preemptions > 0
    assert telemetry.sink.violations == []
    assert telemetry.uncovered == {}
    checked = {
        check for _, _, counts, _ in telemetry.sink.passes for check, (slots, _) in counts.slots.items() if slots
    }
    assert {"token", "position", "chain", "ownership"} <= checked
    assert ("content" in checked) == (content != "off")


def test_what_is_served_after_a_failed_forward_is_healthy(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, KVCANARY_MODE="raise")
    engine = Engine(EngineConfig(num_blocks=14, max_model_len=64, max_batched_tokens=16))
    random = Random(5)
    one, other = ([random.randrange(512) for _ in range(20)] for _ in range(2))
    original = engine.runner.model.forward
    for _ in range(4):
        engine.generate([one], max_tokens=4)
        engine.add_request(other, max_tokens=4)
        with monkeypatch.context() as broken:
            broken.setattr(engine.runner.model, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
            with pytest.raises(RuntimeError, match="no memory"):
                engine.step()
        assert engine.runner.model.forward == original
        engine.abort_all()
    assert telemetry.sink.violations == []


def test_an_event_that_fails_ends_the_checks_of_its_pool_and_nothing_else(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, KVCANARY_MODE="raise")
    engine = Engine(EngineConfig(num_blocks=32, max_model_len=64))
    serve(engine, Random(1), requests=2)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the agent is broken")

    monkeypatch.setattr(Canary, "shared", fail)
    serve(engine, Random(2))
    assert telemetry.sink.violations == []
    assert telemetry.uncovered == {"pool kv": "switched off after OSError: the agent is broken"}


def test_a_pool_opened_after_an_uninstall_starts_with_nothing_known(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, KVCANARY_MODE="raise")
    engine = Engine(EngineConfig(num_blocks=32, max_model_len=64))
    serve(engine, Random(1))
    kvcanary_agent.uninstall()
    serve(engine, Random(2))
    kvcanary_agent.install()
    serve(engine, Random(3))
    assert telemetry.sink.violations == []
