"""What the agent costs a real engine: python -m tests.engines.vllm.overhead, with the engine's Python.

Engines of the same model take turns in this one process, so that whatever else the machine does hits all of them alike:
one without the agent, one with its default settings, one that compares every byte at every step. Prints how many tokens
each decodes and prefills per second, medians over the rounds, and the median of their ratios to those without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

from tests.engines.make_models import make_model, models_folder
from tests.engines.vllm.harness import offline_environment

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
        max_num_batched_tokens=options.batch * options.context,
        dtype=options.dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=options.pool_mb << 20,
    )


def measure(engine: Any, options: argparse.Namespace, round_: int) -> tuple[float, float]:
    """Prefilled and decoded tokens per second of one batch."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(7 * position + 13 * row + round_) % 500 + 3 for position in range(options.context)]}
        for row in range(options.batch)
    ]
    started = time.perf_counter()
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    prefill = time.perf_counter() - started
    started = time.perf_counter()
    sampling = SamplingParams(temperature=0, max_tokens=1 + options.tokens, ignore_eos=True)
    engine.generate(prompts, sampling, use_tqdm=False)
    # The second run prefills as the first has, then decodes.
    decode = time.perf_counter() - started - prefill
    return options.batch * options.context / prefill, options.batch * options.tokens / decode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama8")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt (default: 1024)")
    parser.add_argument("--batch", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens of each request (default: 32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pool-mb", type=int, default=128)
    parser.add_argument("--kinds", default="off,default,full")
    parser.add_argument("--profile", action="store_true", help="also print where the last engine spends its time")
    options = parser.parse_args()
    os.environ.update(offline_environment(), VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
    os.environ.setdefault("OTEL_METRICS_EXPORTER", "none")
    make_model(options.model, models_folder())

    kinds = options.kinds.split(",")
    engines = {kind: make_engine(kind, options) for kind in kinds}
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for round_ in range(options.rounds + 1):
        for kind in kinds if round_ % 2 else reversed(kinds):
            prefill, decode = measure(engines[kind], options, round_)
            if round_:  # the first one warms up
                figures[kind]["prefill"].append(prefill)
                figures[kind]["decode"].append(decode)
    for kind in kinds:
        for what, values in figures[kind].items():
            pairs = zip(values, figures["off"][what], strict=True)
            ratio = statistics.median(value / other for value, other in pairs)
            bar = BARS.get(kind, {}).get(what)
            verdict = "" if bar is None else f", bar {bar}: {'met' if ratio >= bar else 'missed'}"
            print(f"{kind:8} {what:8} {statistics.median(values):9.1f} tokens/s, {ratio:.3f} of off{verdict}")
    if options.profile:
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            measure(engines[kinds[-1]], options, 0)
        pstats.Stats(profile).sort_stats("cumulative").print_stats("kvcanary", 45)
    return 0


if __name__ == "__main__":
    sys.exit(main())
