"""The agent's own functions are broken one at a time, and the demo engine must answer as it does without the agent."""

from __future__ import annotations

import contextlib
import inspect
import logging
import pathlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvcanary_agent
from kvcanary_agent import runtime
from kvcanary_agent.demo.config import EngineConfig, ModelConfig
from kvcanary_agent.demo.engine import Engine
from kvcanary_agent.telemetry import Telemetry

PACKAGE = pathlib.Path(kvcanary_agent.__file__).parent
CONFIG = EngineConfig(
    model=ModelConfig(vocab_size=64, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_size=8),
    num_blocks=12,
    block_size=4,
    max_model_len=32,
    max_batched_tokens=8,
    max_num_seqs=4,
)
# What the test itself calls, and the one function that stands before all else in a wrapper: torch.compile traces it, so
# nothing can be around it.
OUTERMOST = {"kvcanary_agent.install", "kvcanary_agent.uninstall", "kvcanary_agent.activation.patching._is_compiling"}


def serve() -> list[Any]:
    """A prefill in chunks, a shared prefix, a copy on write, and a second batch: what it answers."""
    answers: list[Any] = []
    engine = Engine(CONFIG)
    prefix = list(range(1, 10))
    answers.append(engine.generate([[*prefix, 20], [*prefix, 21]], max_tokens=3, n=2))
    answers.append(engine.generate([prefix, [5], [*prefix, 21, 22]], max_tokens=3))
    return answers


def serve_with_agent() -> tuple[list[Any], Telemetry | None]:
    """What the engine answers, and what the agent has counted."""
    kvcanary_agent.install()
    try:
        answers = serve()
        telemetry = runtime._telemetry
    finally:
        with contextlib.suppress(Exception):
            kvcanary_agent.uninstall()
    return answers, telemetry


def slots_checked(telemetry: Telemetry | None) -> int:
    pools = telemetry.tallies.pools.values() if telemetry is not None else ()
    return sum(passed for tally in pools for passed, _ in tally.checks.values())


def covers_all(telemetry: Telemetry | None) -> bool:
    return telemetry is not None and all(covered for covered, _ in telemetry.tallies.coverage.values())


def functions() -> dict[str, types.FunctionType]:
    """Every function and method of the loaded modules of the agent, by name; not those of the demo engine."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "kvcanary_agent" or name.startswith("kvcanary_agent.demo"):
            continue
        for owner in [module, *(value for value in vars(module).values() if isinstance(value, type))]:
            if getattr(owner, "__module__", name) != name:
                continue
            for value in vars(owner).values():
                function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", None) or value))
                if isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(str(PACKAGE)):
                    found[f"{function.__module__}.{function.__qualname__}"] = function
    return found


@contextlib.contextmanager
def profiled(on_call: Callable[[types.CodeType], None]) -> Iterator[None]:
    """Have `on_call` called at the start of each Python function, in every thread that starts from now on."""

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            on_call(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What the engine answers without the agent."""
    return serve()


@pytest.fixture(scope="module")
def reached(expected: list[Any]) -> dict[str, types.FunctionType]:
    """The functions of the agent that run when the engine is created, serves and ends; and nothing is wrong."""
    serve_with_agent()  # imports what it needs
    called: set[types.CodeType] = set()
    with profiled(called.add):
        answers, telemetry = serve_with_agent()
    assert answers == expected
    assert slots_checked(telemetry) > 0
    return {name: function for name, function in functions().items() if function.__code__ in called}


def raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


def returns_garbage(*args: Any, **kwargs: Any) -> Any:
    return object()


def broken(function: types.FunctionType, fault: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Give a function, wherever it is referred to, the code of another one."""

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        original = function.__code__
        function.__code__ = fault.__code__.replace(co_freevars=original.co_freevars)
        try:
            yield
        finally:
            function.__code__ = original

    return replaced()


# A check that is told nonsense may find a violation, so that in raise mode it would be right to raise.
@pytest.mark.parametrize(("fault", "mode"), [(raises, "raise"), (returns_garbage, "log")])
def test_no_function_of_the_agent_can_fail_the_engine(
    reached: dict[str, types.FunctionType],
    expected: list[Any],
    fault: Callable[..., Any],
    mode: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCANARY_MODE", mode)
    # The end of a thread that is broken itself is announced by Python.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(runtime, "_SHUT_DOWN_TIMEOUT_S", 0.05)
    healthy = slots_checked(serve_with_agent()[1])
    wrong: dict[str, str] = {}
    for name, function in reached.items():
        if name in OUTERMOST:
            continue
        caplog.clear()
        capsys.readouterr()
        try:
            with broken(function, fault):
                answers, telemetry = serve_with_agent()
            lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            lines += capsys.readouterr().err.splitlines()
            if answers != expected:
                wrong[name] = "other answers"
            elif fault is returns_garbage:
                pass  # a function that has silently done nothing cannot say so
            elif slots_checked(telemetry) < healthy and not lines:
                wrong[name] = f"{slots_checked(telemetry)} of {healthy} slots checked, and nothing said"
            elif any("not covering" in line for line in lines) and covers_all(telemetry) and "overage" not in name:
                wrong[name] = f"coverage does not fall: {lines}"
        except BaseException as error:
            wrong[name] = f"{type(error).__name__}: {error}"
        finally:
            runtime._telemetry = None
            with contextlib.suppress(Exception):
                kvcanary_agent.uninstall()
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


def test_an_agent_that_is_slow_slows_the_engine_and_nothing_else(
    reached: dict[str, types.FunctionType], expected: list[Any]
) -> None:
    slow = {function.__code__ for function in reached.values()}
    with profiled(lambda code: time.sleep(2e-4) if code in slow else None):
        answers, telemetry = serve_with_agent()
    assert answers == expected
    assert slots_checked(telemetry) > 0
