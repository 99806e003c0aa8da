"""Start real vLLM engines, with and without the agent, and look at what they answer and export."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.otlp_receiver import HttpOtlpReceiver, Log, OtlpReceiver

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT_S = 180.0
EXPORTED_WITHIN_S = 30.0

# Small blocks and a pool that is small beside the machine, but large beside the requests.
ENGINE = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
}
MAX_TOKENS = 24


def _prompts() -> list[list[int]]:
    """Eight requests of mixed lengths; odd ones share a prefix of three blocks, even ones less than a block."""
    long_prefix, short_prefix = list(range(3, 103)), list(range(200, 220))
    return [(long_prefix if i % 2 else short_prefix) + [5 + i] * (17 * i + 3) for i in range(8)]


PROMPTS = _prompts()
PREFILLED = sum(len(prompt) for prompt in PROMPTS)
# The decode steps of a request read its whole prompt and all but the newest of its tokens, each time.
READ_AT_LEAST = sum(sum(range(len(prompt), len(prompt) + MAX_TOKENS - 1)) for prompt in PROMPTS)


@dataclass(slots=True)
class Process:
    """A running program, and its output so far."""

    popen: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)

    def wait_for(self, text: str) -> str:
        """What follows ``text`` in the first line that has it. Fails the test if there is none in time."""
        assert self.popen.stdout is not None
        watchdog = threading.Timer(TIMEOUT_S, self.popen.kill)
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
        self.popen.stdin.close()
        watchdog = threading.Timer(TIMEOUT_S, self.popen.kill)
        watchdog.start()
        self.output.extend(self.popen.stdout)
        self.popen.wait()
        watchdog.cancel()
        return "".join(self.output)

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
    )
    process = Process(popen)
    try:
        yield process
    finally:
        if popen.poll() is None:
            popen.terminate()
        process.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a run with the agent has shown.

    Attributes:
        result: What `generate.py` printed: ``tokens`` and ``texts``, or ``error``.
        receiver: What the engine's processes exported.
        output: Everything that they printed.
    """

    result: dict[str, Any]
    receiver: OtlpReceiver
    output: str

    @property
    def violations(self) -> list[Log]:
        return self.receiver.events("kvcanary.violation")


class Engine:
    """Runs `generate.py`."""

    def __init__(self, models: Path, folder: Path) -> None:
        self.models = models
        self._folder = folder
        self._jobs = 0

    def generate(self, *, environment: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
        """The result of a run without the agent."""
        with start([sys.executable, *self._program(options)], self._environment(environment)) as process:
            return dict(json.loads(process.wait_for("RESULT ")))

    def watch(
        self,
        *,
        until: Callable[[OtlpReceiver], bool],
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Watched:
        """A run with the agent, which lives until the condition on the receiver holds."""
        command = [sys.executable, "-m", "kvcanary_agent", "run", *self._program(options)]
        with HttpOtlpReceiver() as receiver:
            exporting = {**receiver.environment(), "OTEL_METRIC_EXPORT_INTERVAL": "200"}
            with start(command, self._environment({**exporting, **(environment or {})})) as process:
                result = json.loads(process.wait_for("RESULT "))
                arrived = receiver.wait_for(until, EXPORTED_WITHIN_S)
                output = process.finish()
            assert arrived, f"not received in time: {receiver.points[-20:]}\n{output[-6000:]}"
        return Watched(result=result, receiver=receiver, output=output)

    def _program(self, options: dict[str, Any]) -> list[str | Path]:
        model, v2 = options.pop("model", "llama"), options.pop("v2", False)
        job = {
            "engine": {**ENGINE, "model": str(self.models / model), **options},
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
            # In the second round every prompt is in the prefix cache.
            "rounds": 2,
            "v2": v2,
        }
        self._jobs += 1
        path = self._folder / f"job{self._jobs}.json"
        path.write_text(json.dumps(job))
        return [HERE / "generate.py", path]

    @staticmethod
    def _environment(extra: dict[str, str] | None) -> dict[str, str]:
        return {**offline_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(extra or {})}


def offline_environment() -> dict[str, str]:
    """Variables that keep an engine on this machine: no usage reports, no hub, sockets on 127.0.0.1."""
    return {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}


def passed_slots(receiver: OtlpReceiver, check: str) -> float:
    """How many slots have passed a check."""
    points = receiver.points_of("kvcanary.checks", kvcanary_check=check)
    return max((point.value for point in points if "error.type" not in point.attributes), default=0)


def checked(check: str, slots: int) -> Callable[[OtlpReceiver], bool]:
    """The condition that at least so many slots have passed a check."""
    return lambda receiver: passed_slots(receiver, check) >= slots
