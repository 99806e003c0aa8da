"""Programs that the suites of real engines run and wait for, and what they ask of the telemetry that arrives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.otlp_receiver import OtlpReceiver

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Process:
    """A running program, and its output so far."""

    popen: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)

    def wait_for(self, text: str) -> str:
        """What follows ``text`` in the first line that has it. Fails the test if there is none in time."""
        assert self.popen.stdout is not None
        watchdog = threading.Timer(TIMEOUT_S, self._kill)
        watchdog.start()
        try:
            for line in self.popen.stdout:
                self.output.append(line)
                if text in line:
                    return line.partition(text)[2]
        finally:
            watchdog.cancel()
        raise AssertionError(f"no line with {text!r} within {TIMEOUT_S} s or before the end:\n{self.tail()}")

    def finish(self) -> str:
        """Close the program's standard input, wait until it and its children have ended: everything it printed."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        # What was not read by a program that has died does not matter any more.
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        watchdog = threading.Timer(TIMEOUT_S, self._kill)
        watchdog.start()
        self.output.extend(self.popen.stdout)
        self.popen.wait()
        watchdog.cancel()
        return "".join(self.output)

    def _kill(self) -> None:
        """End the program and all that it has started; a child left behind would keep its output open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def tail(self) -> str:
        return "".join(self.output[-60:])


@contextlib.contextmanager
def start(command: Sequence[str | Path], environment: dict[str, str]) -> Iterator[Process]:
    """Run ``command`` from the root of the checkout; ended at the latest when the context is left."""
    popen = subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    process = Process(popen)
    try:
        yield process
    finally:
        if popen.poll() is None:
            popen.terminate()
        process.finish()


def passed_slots(receiver: OtlpReceiver, check: str) -> float:
    """How many slots have passed a check."""
    points = receiver.points_of("kvcanary.checks", kvcanary_check=check)
    return max((point.value for point in points if "error.type" not in point.attributes), default=0)


def checked(check: str, slots: int) -> Callable[[OtlpReceiver], bool]:
    """The condition that at least so many slots have passed a check."""
    return lambda receiver: passed_slots(receiver, check) >= slots
