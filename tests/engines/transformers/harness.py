"""Start programs around transformers, with and without the agent, and look at what they answer and export."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.processes import Process, start
from tests.otlp_receiver import HttpOtlpReceiver, Log, OtlpReceiver

HERE = Path(__file__).parent
EXPORTED_WITHIN_S = 30.0
MAX_TOKENS = 24
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


def prompts() -> list[list[int]]:
    """Eight requests of mixed lengths; odd ones share a prefix of 100 tokens, even ones of 20."""
    long_prefix, short_prefix = list(range(3, 103)), list(range(200, 220))
    return [(long_prefix if i % 2 else short_prefix) + [5 + i] * (17 * i + 3) for i in range(8)]


PROMPTS = prompts()


@dataclass(slots=True)
class Session:
    """A running program, see `session.py`; the receiver hears of it only if the agent is in it."""

    process: Process
    receiver: OtlpReceiver

    def do(self, command: dict[str, Any]) -> Any:
        """The answer to a command."""
        assert self.process.popen.stdin is not None
        self.process.popen.stdin.write(json.dumps(command) + "\n")
        self.process.popen.stdin.flush()
        return json.loads(self.process.wait_for("RESULT "))

    @property
    def violations(self) -> list[Log]:
        return self.receiver.events("kvcanary.violation")

    def wait_for(self, condition: Callable[[OtlpReceiver], object]) -> None:
        """Wait for telemetry that meets a condition; the test fails if it does not come."""
        arrived = self.receiver.wait_for(condition, EXPORTED_WITHIN_S)
        assert arrived, f"not received in time: {self.receiver.points[-20:]}\n{self.process.tail()}"

    def checked(self, check: str, pool: str) -> float:
        """How many slots of a pool have passed a check."""
        points = self.receiver.points_of("kvcanary.checks", kvcanary_check=check, kvcanary_pool=pool)
        return max((point.value for point in points if "error.type" not in point.attributes), default=0)


class Engine:
    """Starts sessions."""

    def __init__(self, models: Path) -> None:
        self.models = models

    @contextlib.contextmanager
    def session(self, *, agent: bool, environment: dict[str, str] | None = None) -> Iterator[Session]:
        """A program, for as long as the context lasts."""
        agent_command = ["-m", "kvcanary_agent", "run"] if agent else []
        command: list[str | Path] = [sys.executable, *agent_command, HERE / "session.py", self.models]
        with HttpOtlpReceiver() as receiver:
            exporting = {**receiver.environment(), "OTEL_METRIC_EXPORT_INTERVAL": "200"} if agent else {}
            with start(command, {**ENVIRONMENT, **exporting, **(environment or {})}) as process:
                process.wait_for("READY")
                yield Session(process, receiver)
