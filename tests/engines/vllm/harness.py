"""Start real vLLM engines, with and without the agent, and look at what they answer and export."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.processes import ROOT, Process, checked, passed_slots, start
from tests.otlp_receiver import HttpOtlpReceiver, Log, OtlpReceiver

__all__ = [
    "ENGINE",
    "EXPORTED_WITHIN_S",
    "HERE",
    "MAX_TOKENS",
    "PREFILLED",
    "PROMPTS",
    "READ_AT_LEAST",
    "ROOT",
    "Engine",
    "Process",
    "Watched",
    "checked",
    "offline_environment",
    "passed_slots",
    "start",
]

HERE = Path(__file__).parent
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
    """Runs `generate.py`, or, given ``acts``, `allocator_traffic.py`."""

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
        model, v2, acts = options.pop("model", "llama"), options.pop("v2", False), options.pop("acts", None)
        job: dict[str, Any] = {"engine": {**ENGINE, "model": str(self.models / model), **options}}
        if acts is not None:
            job["acts"] = acts
        else:
            # In the second round every prompt is in the prefix cache.
            job.update(prompts=PROMPTS, max_tokens=MAX_TOKENS, rounds=2, v2=v2)
        self._jobs += 1
        path = self._folder / f"job{self._jobs}.json"
        path.write_text(json.dumps(job))
        return [HERE / ("generate.py" if acts is None else "allocator_traffic.py"), path]

    @staticmethod
    def _environment(extra: dict[str, str] | None) -> dict[str, str]:
        return {**offline_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(extra or {})}


def offline_environment() -> dict[str, str]:
    """Variables that keep an engine on this machine: no usage reports, no hub, sockets on 127.0.0.1."""
    return {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
