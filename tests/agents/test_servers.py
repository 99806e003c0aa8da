"""Web servers that start workers of their own: the agent is in each worker, once, before and after a reload."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from tests.activation.processes import ROOT, TEMPLATE, Processes

TIMEOUT_S = 60.0

# Answers, as ASGI or WSGI, who it is and how often the agent is around a step.
APP = """\
import json, os
import stand_in_engine
from kvcanary_agent.activation.patching import is_wrapped
import sys

VERSION = 1

def answer():
    hooks = sum(type(finder).__name__ == "TargetFinder" for finder in sys.meta_path)
    watched = is_wrapped(stand_in_engine.Base, "step")
    return json.dumps([os.getpid(), VERSION, hooks, watched, stand_in_engine.Runner().step(1)]).encode()

async def asgi(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": answer()})

def wsgi(environ, start_response):
    start_response("200 OK", [("Connection", "close")])
    return [answer()]
"""

Answer = tuple[int, int, int, bool, int]


def _program(name: str) -> str:
    return str(pathlib.Path(sys.executable).with_name(name))


@contextlib.contextmanager
def serving(stand_in: Processes, door: str, command: list[str], listening: str) -> Iterator[Callable[[], Answer]]:
    """Run a web server, and yield a function that asks it once, with a connection of its own."""
    environ = {"KVCANARY_ADAPTERS": str(stand_in.folder / "adapter.py")}
    if door == "run":
        command = [sys.executable, "-m", "kvcanary_agent", "run", *command]
        environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{stand_in.folder}"
    else:
        environ |= {"PYTHONPATH": f"{TEMPLATE}{os.pathsep}{stand_in.folder}", "KVCANARY_ENABLED": "1"}
    process = subprocess.Popen(
        command,
        cwd=stand_in.folder,
        env=stand_in.environment(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    output: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            found = re.search(listening + r" http://127\.0\.0\.1:(\d+)", line)
            if found:
                break
        else:
            raise AssertionError(f"the server did not start:\n{''.join(output)}")
        reader = threading.Thread(target=lambda: output.extend(process.stdout or ()), daemon=True)
        reader.start()
        port = int(found[1])

        def ask() -> Answer:
            deadline = time.monotonic() + TIMEOUT_S
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=TIMEOUT_S) as response:
                        pid, version, hooks, watched, stepped = json.load(response)
                        return pid, version, hooks, watched, stepped
                except OSError:
                    assert time.monotonic() < deadline, "".join(output)
                    time.sleep(0.05)

        yield ask
    finally:
        watchdog.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(TIMEOUT_S)


def all_of(ask: Callable[[], Answer], workers: int) -> dict[int, Answer]:
    """The answer of each worker."""
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(answers) < workers:
        assert time.monotonic() < deadline, f"{len(answers)} of {workers} workers have answered"
        answer = ask()
        answers[answer[0]] = answer
    return answers


@pytest.fixture(params=["run", "environment"])
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_worker_of_uvicorn_is_watched(stand_in: Processes, door: str) -> None:
    stand_in.write("app.py", APP)
    command = [_program("uvicorn"), "app:asgi", "--port", "0", "--workers", "2"]
    with serving(stand_in, door, command, "running on") as ask:
        assert {answer[1:] for answer in all_of(ask, 2).values()} == {(1, 1, True, 2)}


def test_what_uvicorn_reloads_is_watched_again(stand_in: Processes, door: str) -> None:
    app = stand_in.write("app.py", APP)
    command = [_program("uvicorn"), "app:asgi", "--port", "0", "--reload", "--reload-dir", str(stand_in.folder)]
    with serving(stand_in, door, command, "running on") as ask:
        assert ask()[1:] == (1, 1, True, 2)
        # A change that is there before the reloader first looks is none to it: the file is changed until it is seen.
        start = time.monotonic()
        changes = 0
        while (answer := ask())[1] == 1 and time.monotonic() < start + TIMEOUT_S / 2:
            if time.monotonic() >= start + 5 * changes:
                app.write_text(APP.replace("VERSION = 1", "VERSION = 2"))
                changes += 1
            time.sleep(0.05)
        assert answer[1:] == (2, 1, True, 2)


@pytest.mark.parametrize("preload", [[], ["--preload"]], ids=["", "preload"])
def test_each_worker_of_gunicorn_is_watched(stand_in: Processes, door: str, preload: list[str]) -> None:
    stand_in.write("app.py", APP)
    command = [_program("gunicorn"), "app:wsgi", "--bind", "127.0.0.1:0", "--workers", "2", *preload]
    with serving(stand_in, door, command, "Listening at:") as ask:
        assert {answer[1:] for answer in all_of(ask, 2).values()} == {(1, 1, True, 2)}
