"""What the agent costs a real engine: python -m tests.engines.vllm.overhead, with the engine's Python.

Engines of the same model take turns in this one process, step by step, so that whatever else the machine does hits all
of them alike: one without the agent, one with its default settings, one that compares every byte at every step. Prints
how many tokens each prefills and decodes per second, medians over the steps, and the medians of the ratios to the same
step without the agent, and the medians of what the canary itself takes of a step, by phase.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

from tests.engines.make_models import make_model, models_folder
from tests.engines.vllm.harness import offline_environment

# Tokens of each prefill step: as many as one of vLLM's.
PREFILL_TOKENS = 2048
BARS = {"default": {"decode": 0.97, "prefill": 0.97}, "full": {"decode": 0.85, "prefill": 0.90}}


def make_engine(kind: str, options: argparse.Namespace) -> Any:
    """An engine without the agent (``off``), with its ``default`` settings or with ``full`` content checks."""
    import kvcanary_agent
    from kvcanary_agent import runtime

    if kind != "off":
        os.environ["KVCANARY_CONTENT"] = "full" if kind == "full" else "scrub"
        # Settings are read once for each process; each engine here is to have its own.
        runtime._settings = None
        kvcanary_agent.install()
    from vllm import LLM

    return LLM(
        model=str(models_folder() / options.model),
        block_size=32,
        max_model_len=options.context + options.tokens + 32,
        max_num_seqs=options.batch,
        max_num_batched_tokens=PREFILL_TOKENS,
        dtype=options.dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=options.pool_mb << 20,
    )


def add_batch(engine: Any, options: argparse.Namespace, round_: int) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    for row in range(options.batch):
        prompt = [(7 * position + 13 * row + round_) % 500 + 3 for position in range(options.context)]
        engine.llm_engine.add_request(f"{round_}-{row}", {"prompt_token_ids": prompt}, sampling)


def step(engine: Any) -> float:
    """Seconds of one step."""
    started = time.perf_counter()
    engine.llm_engine.step()
    return time.perf_counter() - started


class Passes:
    """Hears how long each pass of the canaries' checks takes."""

    def __init__(self) -> None:
        self._ended: list[tuple[str, float]] = []

    def listen(self) -> None:
        from kvcanary_agent.telemetry import pool as of_pools

        listened_to: Any = of_pools.PoolTelemetry
        original = listened_to.pass_finished

        def pass_finished(pool: Any, phase: str, step: int, start_ns: int, end_ns: int, *rest: Any) -> None:
            self._ended.append((phase, 1e-9 * (end_ns - start_ns)))
            original(pool, phase, step, start_ns, end_ns, *rest)

        listened_to.pass_finished = pass_finished

    def take(self) -> list[tuple[str, float]]:
        """Phase and seconds of each pass since the last call."""
        ended, self._ended = self._ended, []
        return ended


def phase_of(engine: Any) -> str:
    """What the coming step is mostly about."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    prefilling = any(request.num_computed_tokens < request.num_prompt_tokens for request in scheduler.running)
    return "prefill" if scheduler.waiting or prefilling else "decode"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama8")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt (default: 1024)")
    parser.add_argument("--batch", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--tokens", type=int, default=48, help="decoded tokens of each request (default: 48)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pool-mb", type=int, default=256)
    parser.add_argument("--kinds", default="off,default,full", help="which engines; off has to be one of them")
    parser.add_argument("--profile", action="store_true", help="also print where the last kind spends its time")
    options = parser.parse_args()
    os.environ.update(offline_environment(), VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("OTEL_METRICS_EXPORTER", "none")
    make_model(options.model, models_folder())

    kinds = options.kinds.split(",")
    engines = {kind: make_engine(kind, options) for kind in kinds}
    times: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
    passes = Passes()
    passes.listen()
    profile = cProfile.Profile()
    for round_ in range(options.rounds + 1):
        for engine in engines.values():
            add_batch(engine, options, round_)
        number = 0
        while engines["off"].llm_engine.has_unfinished_requests():
            phase, number = phase_of(engines["off"]), number + 1
            for kind in kinds if number % 2 else reversed(kinds):
                if options.profile and kind == kinds[-1] and phase == "decode":
                    profile.enable()
                seconds = step(engines[kind])
                profile.disable()
                ended = passes.take()
                if round_:  # the first round warms up
                    times[kind][phase].append(seconds)
                    for name, taken in ended:
                        times[kind][f"{phase}: {name}"].append(taken)
    for kind in kinds:
        for phase, tokens in (("prefill", PREFILL_TOKENS), ("decode", options.batch)):
            own, off = times[kind][phase], times["off"][phase]
            ratio = statistics.median(other / seconds for seconds, other in zip(own, off, strict=True))
            bar = BARS.get(kind, {}).get(phase)
            verdict = "" if bar is None else f" (bar {bar}: {'met' if ratio >= bar else 'missed'})"
            median = statistics.median(own)
            print(f"{kind:8} {phase:8} {tokens / median:9.1f} tokens/s, {1e3 * median:8.2f} ms a step,", end=" ")
            print(f"{ratio:.3f} of off{verdict}")
            for name in ("verify", "record", "sweep"):
                if durations := times[kind].get(f"{phase}: {name}"):
                    print(f"{'':17} {name} {1e3 * statistics.median(durations):.2f} ms")
    if options.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats("kvcanary|built-in", 60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
