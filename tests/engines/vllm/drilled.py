"""A program that runs a drill of each kind in an in-process vLLM engine of its own: drilled.py JOB.

``JOB`` is a file of JSON: ``engine`` (keyword arguments of ``LLM``) and ``drills``, values of ``KVCANARY_DRILL``.
Requests are called round-row, and belong to the trace whose number is that of the round. Prints one line, ``RESULT``
and JSON, when all drills are over.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import kvcanary_agent


def prompts() -> list[list[int]]:
    """Requests whose blocks are full and, between the rounds, idle in the prefix cache."""
    return [[3 + (31 * row + 7 * i) % 400 for i in range(100 + 40 * row)] for row in range(4)]


def ask(engine: Any, round_: int, prompts: list[list[int]]) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    for row, prompt in enumerate(prompts):
        trace = {"traceparent": f"00-{round_:032x}-{row + 1:016x}-01"}
        engine.add_request(f"{round_}-{row}", {"prompt_token_ids": prompt}, sampling, trace_headers=trace)
    while engine.has_unfinished_requests():
        engine.step()


def main() -> None:
    from vllm import LLM

    job = json.loads(Path(sys.argv[1]).read_text())
    for drill in job["drills"]:
        # Settings are read when the agent is installed.
        kvcanary_agent.uninstall()
        os.environ["KVCANARY_DRILL"] = drill
        kvcanary_agent.install()
        engine = LLM(**job["engine"])
        for round_, batch in enumerate((prompts(), prompts()[:1], prompts()), start=1):
            ask(engine.llm_engine, round_, batch)
        del engine
        gc.collect()
    # One write, so that no other process's output gets in between.
    sys.stdout.write("RESULT {}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
