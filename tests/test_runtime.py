"""What fails in the agent stays in the agent, is said once, and is seen in coverage."""

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcanary_agent import runtime
from kvcanary_agent.activation.patching import restore_all
from kvcanary_agent.canary import Canary, Kind, KVCanaryError, KVGroup, KVLayout, KVPart, Violation
from kvcanary_agent.runtime import FailOpen
from kvcanary_agent.settings import Settings
from tests.canary.toy import RecordingSink


class Coverage:
    """In the place of the process's telemetry."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.patches: list[tuple[str, str, str]] = []
        self.refuses: Exception | None = None

    def open_pool(self, **_: Any) -> RecordingSink:
        if self.refuses:
            raise self.refuses
        return RecordingSink()

    def coverage(self, *said: Any) -> None:
        self.said.append(said)

    def patched(self, *said: str) -> None:
        self.patches.append(said)  # type: ignore[arg-type]


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coverage]:
    coverage = Coverage()
    monkeypatch.setattr(runtime, "_telemetry", coverage)
    monkeypatch.setattr(runtime, "_settings", Settings())
    monkeypatch.setattr(runtime, "_already_said", set())
    monkeypatch.setattr(runtime, "_switched_off", set())
    monkeypatch.setattr(runtime, "_open", weakref.WeakValueDictionary())
    yield coverage
    restore_all()


def layout(**more: Any) -> KVLayout:
    part = KVPart(layer="0", part="k", view=torch.zeros(4, 2, 8))
    return KVLayout(engine="e", groups=(KVGroup(name="g", block_size=2, parts=(part,), null_block=0),), **more)


def test_a_part_that_fails_is_off_and_said_once(telemetry: Coverage, caplog: pytest.LogCaptureFixture) -> None:
    part = FailOpen("e", "steps")
    for _ in range(2):
        with part:
            raise ValueError("broken")
    assert not part.on
    assert caplog.messages == ["kvcanary: not covering steps of e: switched off after ValueError: broken"]
    assert telemetry.said == [("e", "steps", False, "switched off after ValueError: broken")]


FOUND = Violation(kind=Kind.CONTENT, pool="kv", group="g", slot=2, block=1, offset=0, step=1)


@pytest.mark.parametrize("error", [KVCanaryError([FOUND]), KeyboardInterrupt(), SystemExit(3)])
def test_a_violation_and_the_end_that_a_signal_handler_asks_for_pass(telemetry: Coverage, error: BaseException) -> None:
    part = FailOpen("e", "steps")
    with pytest.raises(type(error)), part:
        raise error
    assert part.on
    assert not telemetry.said


@pytest.mark.parametrize("logger_raises", [True, False])
def test_a_report_that_fails_is_swallowed_too(
    telemetry: Coverage, monkeypatch: pytest.MonkeyPatch, logger_raises: bool
) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("disk full")

    if logger_raises:
        monkeypatch.setattr(runtime.log, "handlers", [Broken()])
    with FailOpen("e", "steps"):
        raise ValueError("x") if logger_raises else Unspeakable


def test_a_pool_that_cannot_be_watched_is_none_and_said(telemetry: Coverage) -> None:
    telemetry.refuses = OSError("no")
    assert runtime.open_canary(layout()) is None
    assert telemetry.said == [("e", "pool kv", False, "OSError: no")]


def test_what_the_layout_leaves_out_is_said(telemetry: Coverage) -> None:
    assert isinstance(runtime.open_canary(layout(not_covered={"layers.7": "Mamba"})), Canary)
    assert ("e", "layers.7", False, "Mamba") in telemetry.said


def test_a_class_is_patched_wholly_or_not_at_all(telemetry: Coverage) -> None:
    class Engine:
        def step(self) -> int:
            return 1

    before = Engine.__dict__["step"]

    def around(call: Any, self: Any, /) -> int:
        return int(call()) + 1

    assert not runtime.patch_class("e", Engine, {"step": around, "gone": around})
    assert [outcome for *_, outcome in telemetry.patches] == ["failed"]
    assert telemetry.said
    assert Engine.__dict__["step"] is before


def test_two_pools_of_one_process_have_two_names(telemetry: Coverage) -> None:
    first, second = runtime.open_canary(layout()), runtime.open_canary(layout())
    assert first is not None
    assert second is not None
    assert (first.layout.pool, second.layout.pool) == ("kv", "kv-2")


def test_a_dropped_pool_is_closed_and_its_name_free_again(telemetry: Coverage) -> None:
    assert runtime.open_canary(layout()) is not None
    gc.collect()
    again = runtime.open_canary(layout())
    assert again is not None
    assert again.layout.pool == "kv"


def test_a_server_without_log_handlers_sees_on_stderr_that_its_pool_is_watched(
    telemetry: Coverage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime.log, "hasHandlers", lambda: False)
    assert runtime.open_canary(layout()) is not None
    assert capsys.readouterr().err == "kvcanary: watching pool kv of e: 1 layers, 8 slots, mode log, content scrub\n"


def test_a_server_that_logs_errors_alone_sees_on_stderr_what_is_watched_and_what_is_not(
    telemetry: Coverage, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert runtime.open_canary(layout(not_covered={"layer 7": "of another kind"})) is not None
    assert [line.partition(":")[2].split(" of ")[0] for line in capsys.readouterr().err.splitlines()] == [
        " watching pool kv",
        " not covering layer 7",
    ]
    assert caplog.messages == []


class Stepping:
    """An engine whose every step counts."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> str:
        self.steps += 1
        if self.steps == 3:
            raise LookupError("the engine's own")
        return f"step {self.steps}"

    def free(self) -> str:
        return "free"


def before(call: Any, self: Any, /) -> Any:
    raise ValueError("broken")


def after(call: Any, self: Any, /) -> Any:
    call()
    raise RuntimeError("broken")


def another_result(call: Any, self: Any, /) -> Any:
    call()
    return "garbage"


def no_call(call: Any, self: Any, /) -> Any:
    return "garbage"


def swallowing(call: Any, self: Any, /) -> Any:
    with contextlib.suppress(LookupError):
        return call()


@pytest.mark.parametrize("around", [before, after, another_result, no_call, swallowing])
def test_whatever_an_around_does_the_engine_gets_its_own_methods_outcome_once(telemetry: Coverage, around: Any) -> None:
    class Engine(Stepping):
        step = Stepping.step

    assert runtime.patch_class("e", Engine, {"step": around})
    engine = Engine()
    assert [engine.step(), engine.step()] == ["step 1", "step 2"]
    with pytest.raises(LookupError, match="the engine's own"):
        engine.step()
    assert engine.steps == 3


def test_the_first_around_that_fails_is_the_last_that_runs_for_this_engine_until_it_is_installed_anew(
    telemetry: Coverage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noted(call: Any, self: Any, /) -> Any:
        seen.append("free")
        return call()

    class Engine(Stepping):
        step = Stepping.step
        free = Stepping.free

    assert runtime.patch_class("e", Engine, {"step": before, "free": noted})
    engine = Engine()
    for _ in range(2):
        engine.free()
        engine.step()
    assert seen == ["free"]
    name = f"{Engine.__module__}.{Engine.__qualname__}.step"
    assert caplog.messages == [
        f"kvcanary: not covering {name} of e: the agent is switched off after ValueError: broken"
    ]
    assert [said[2] for said in telemetry.said] == [False]
    monkeypatch.setattr(runtime, "_telemetry", None)
    runtime.shut_down()
    engine.free()
    assert seen == ["free", "free"]


def test_an_exception_of_the_engine_s_own_leaves_the_agent_on(telemetry: Coverage) -> None:
    seen: list[str] = []

    def noted(call: Any, self: Any, /) -> Any:
        seen.append("step")
        return call()

    class Engine(Stepping):
        step = Stepping.step

    assert runtime.patch_class("e", Engine, {"step": noted})
    engine = Engine()
    for _ in range(3):
        with contextlib.suppress(LookupError):
            engine.step()
    assert engine.step() == "step 4"
    assert len(seen) == 4
    assert telemetry.said == []


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()])
def test_an_end_that_a_signal_handler_asks_for_within_an_around_reaches_the_host(
    telemetry: Coverage, end: BaseException
) -> None:
    def interrupted(call: Any, self: Any, /) -> Any:
        raise end

    class Engine(Stepping):
        step = Stepping.step

    assert runtime.patch_class("e", Engine, {"step": interrupted})
    with pytest.raises(type(end)):
        Engine().step()
    assert telemetry.said == []


def test_a_violation_in_raise_mode_is_the_one_thing_that_an_around_raises(telemetry: Coverage) -> None:
    def found(call: Any, self: Any, /) -> Any:
        raise KVCanaryError([FOUND])

    class Engine(Stepping):
        step = Stepping.step

    assert runtime.patch_class("e", Engine, {"step": found})
    for _ in range(2):
        with pytest.raises(KVCanaryError):
            Engine().step()
