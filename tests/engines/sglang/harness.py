"""Start real SGLang engines, with and without the agent, and look at what they answer and export."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.processes import Process, start
from tests.otlp_receiver import HttpOtlpReceiver, Log, OtlpReceiver

HERE = Path(__file__).parent
EXPORTED_WITHIN_S = 30.0

# A pool that is small beside the machine, but large beside the requests.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 4096,
    "skip_server_warmup": True,
    "log_level": "warning",
    "host": "127.0.0.1",
}
# Those of the models that the suite serves.
MODEL_MODULES = {"gemma3_causal", "llama", "olmo2"}
MAX_TOKENS = 24


def prompts() -> list[list[int]]:
    """Eight requests of mixed lengths; odd ones share a prefix of 100 tokens, even ones of 20."""
    long_prefix, short_prefix = list(range(3, 103)), list(range(200, 220))
    return [(long_prefix if i % 2 else short_prefix) + [5 + i] * (17 * i + 3) for i in range(8)]


PROMPTS = prompts()
# The decode steps of a request read its whole prompt and all but the newest of its tokens, each time.
READ_AT_LEAST = sum(sum(range(len(prompt), len(prompt) + MAX_TOKENS - 1)) for prompt in PROMPTS)


@dataclass(slots=True)
class Session:
    """A running engine, see `session.py`; the receiver hears of it only if the agent is in it."""

    process: Process
    receiver: OtlpReceiver

    def generate(
        self, prompts: list[list[int]], *, max_tokens: int = MAX_TOKENS, salts: list[str] | None = None
    ) -> list[list[int]]:
        """The new tokens of each prompt."""
        command = {"do": "generate", "prompts": prompts, "max_tokens": max_tokens}
        answer: list[list[int]] = self.do({**command, "salts": salts} if salts else command)
        return answer

    def do(self, command: dict[str, Any]) -> Any:
        """The answer to a command."""
        assert self.process.popen.stdin is not None
        self.process.popen.stdin.write(json.dumps(command) + "\n")
        self.process.popen.stdin.flush()
        return json.loads(self.process.wait_for("RESULT "))

    @property
    def retractions(self) -> int:
        """How many requests the scheduler has taken back from decoding so far, as it says in its log."""
        return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", "".join(self.process.output))))

    @property
    def violations(self) -> list[Log]:
        return self.receiver.events("kvcanary.violation")

    def wait_for(self, condition: Callable[[OtlpReceiver], object]) -> None:
        """Wait for telemetry that meets a condition; the test fails if it does not come."""
        arrived = self.receiver.wait_for(condition, EXPORTED_WITHIN_S)
        assert arrived, f"not received in time: {self.receiver.points[-20:]}\n{self.process.tail()}"


class Engine:
    """Starts sessions."""

    def __init__(self, models: Path) -> None:
        self.models = models

    @contextlib.contextmanager
    def session(
        self, *, agent: bool, model: str = "llama", environment: dict[str, str] | None = None, **options: Any
    ) -> Iterator[Session]:
        """An engine, for as long as the context lasts.

        Args:
            agent: Whether it runs with the agent.
            model: One of those that `make_models.py` makes.
            environment: Variables for its processes.
            options: Arguments of ``sglang.Engine`` beside those of `ENGINE`.
        """
        arguments = json.dumps({**ENGINE, "model_path": str(self.models / model), **options})
        agent_command = ["-m", "kvcanary_agent", "run"] if agent else []
        command: list[str | Path] = [sys.executable, *agent_command, HERE / "session.py", arguments]
        with HttpOtlpReceiver() as receiver:
            exporting = {**receiver.environment(), "OTEL_METRIC_EXPORT_INTERVAL": "200"} if agent else {}
            with start(command, {**engine_environment(), **exporting, **(environment or {})}) as process:
                process.wait_for("READY")
                yield Session(process, receiver)


def engine_environment() -> dict[str, str]:
    """Variables that an engine on a CPU needs, that keep it on this machine, and with which it starts sooner."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(_model_modules() - MODEL_MODULES)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _model_modules() -> set[str]:
    """The engine's own modules of models, all of which it imports when it starts."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    models = Path(package.submodule_search_locations[0], "srt", "models")
    return {path.stem for path in models.glob("*.py") if path.stem != "__init__"}


def injecting(folder: Path, *adapters: Path, **environment: str) -> dict[str, str]:
    """The environment in which `fault_injector.py` takes requests in a folder, with more adapters if need be."""
    return {
        "KVCANARY_ADAPTERS": ",".join(map(str, ("sglang", *adapters, HERE / "fault_injector.py"))),
        "KVCANARY_CONTENT": "full",
        "KVCANARY_SWEEP_SLOTS_PER_STEP": "4096",
        # The engine's own check of its books, which ends the scheduler when a page is missing.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
        "FAULT_REQUEST": str(folder / "request"),
        "FAULT_REPORT": str(folder / "report"),
        **environment,
    }
