"""A program that uses vLLM offline, for the suite to run with and without the agent: generate.py JOB.

``JOB`` is a file of JSON: ``engine`` (keyword arguments of ``LLM``), ``prompts`` (lists of token ids), ``max_tokens``,
``rounds``, ``v2`` (whether to run the V2 model runner, see `gpu_features_on_cpu`). Prints one line, ``RESULT`` and
JSON: ``tokens`` and ``texts`` of every request of every round, or an ``error``. Then it waits until its standard input
is closed, so that the engine's processes live for as long as the suite looks at what they export.
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
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    result: dict[str, object]
    try:
        outputs = [
            request.outputs[0]
            for _ in range(job["rounds"])
            for request in engine.generate(prompts, sampling, use_tqdm=False)
        ]
        result = {"tokens": [list(out.token_ids) for out in outputs], "texts": [out.text for out in outputs]}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    # One write, so that no other process's output gets in between.
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
