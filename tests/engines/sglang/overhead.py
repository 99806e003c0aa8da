"""What the agent costs in decode throughput, on a machine that does nothing else: overhead.py [ROUNDS]

Three engines, without the agent, with its defaults and with ``KVCANARY_CONTENT=full``, decode the same batches in turn:
8 requests with 960 tokens of context each, on one thread. Prints the median of tokens per second of each, and the
median over rounds of its ratio to the engine without the agent. Run it from the root of the checkout with the Python
that ``environment.sh sglang`` makes, ``-m tests.engines.sglang.overhead``.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack

from tests.engines.models import made
from tests.engines.sglang.harness import Engine, Session

REQUESTS, CONTEXT, NEW_TOKENS = 8, 960, 48
SETTINGS: dict[str, dict[str, str] | None] = {"off": None, "default": {}, "full": {"KVCANARY_CONTENT": "full"}}


def decode_rate(session: Session) -> float:
    """Decoded tokens per second, the prompts being in the prefix cache."""
    prompts = [[3 + request, *range(10, CONTEXT // 2), *range(10, CONTEXT // 2 + 9)] for request in range(REQUESTS)]
    session.generate(prompts, max_tokens=1)
    start = time.perf_counter()
    session.generate(prompts, max_tokens=1)
    prefilled = time.perf_counter()
    session.generate(prompts, max_tokens=1 + NEW_TOKENS)
    return REQUESTS * NEW_TOKENS / (time.perf_counter() - prefilled - (prefilled - start))


def main(rounds: int) -> None:
    engine = Engine(made("llama8"))
    rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(
                engine.session(
                    agent=environment is not None,
                    model="llama8",
                    environment=environment,
                    max_total_tokens=16384,
                    sleep_on_idle=True,
                )
            )
            for name, environment in SETTINGS.items()
        }
        for _ in range(rounds):
            for name, session in sessions.items():
                rates[name].append(decode_rate(session))
        reported = sum(len(session.violations) for session in sessions.values())
    for name, measured in rates.items():
        ratios = [with_agent / without for with_agent, without in zip(measured, rates["off"], strict=True)]
        print(f"{name:8} {statistics.median(measured):7.1f} tokens/s   {statistics.median(ratios):.3f}")
    print(f"violations reported: {reported}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
