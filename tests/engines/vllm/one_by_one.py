"""A program that asks vLLM one thing after the other: one_by_one.py JOB.

``JOB`` is a file of JSON: ``engine`` (keyword arguments of ``LLM``), ``prompts`` (lists of token ids), ``max_tokens``,
``v2`` (whether to run the V2 model runner, see `gpu_features_on_cpu`). Prints one line, ``RESULT`` and JSON: ``tokens``
of every request. Then it waits until its standard input is closed.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.engines.vllm import gpu_features_on_cpu

    if job["v2"]:
        gpu_features_on_cpu.run_v2_model_runner()
    if job["engine"].get("async_scheduling"):
        gpu_features_on_cpu.keep_asynchronous_scheduling()

    from vllm import LLM, SamplingParams

    engine = LLM(**job["engine"])
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    tokens = []
    for prompt in job["prompts"]:
        (answer,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens.append(list(answer.outputs[0].token_ids))
    # One write, so that no other process's output gets in between.
    sys.stdout.write(f"RESULT {json.dumps({'tokens': tokens})}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
