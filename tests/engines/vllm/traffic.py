"""A program that runs several vLLM engines one after another, each on traffic of its own: traffic.py JOB.

``JOB`` is a file of JSON: ``models`` (the folder of the tiny models), ``engine`` (keyword arguments that every engine
gets) and ``scenarios``, names of the functions below. Prints one line, ``RESULT`` and JSON: the tokens of every request
by scenario; or an ``error``.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tokens = list[list[int]]


class Scenarios:
    """Makes engines and asks them."""

    def __init__(self, models: Path, options: dict[str, Any]) -> None:
        self.models, self._options = models, options

    def engine(self, **options: Any) -> Any:
        from vllm import LLM

        gc.collect()  # the engine before, and its pool
        return LLM(**{"model": str(self.models / "llama"), **self._options, **options})

    def no_prefix_cache(self) -> Tokens:
        engine = self.engine(enable_prefix_caching=False)
        return ask(engine, prompts()) + ask(engine, prompts())

    def n_gram(self) -> Tokens:
        """Draft tokens out of the prompt, many of them rejected."""
        speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        engine = self.engine(speculative_config=speculation)
        return ask(engine, prompts()) + ask(engine, prompts())

    def draft_model(self) -> Tokens:
        """Draft tokens from a model with layers of its own; another model than the target, so that many are wrong."""
        draft = {"method": "draft_model", "model": str(self.models / "llama_one_kv_head"), "num_speculative_tokens": 2}
        engine = self.engine(speculative_config=draft)
        return ask(engine, prompts()) + ask(engine, prompts())

    def asynchronous(self) -> Tokens:
        """Steps are scheduled before the tokens of the last one are known."""
        from vllm.platforms.cpu import CpuPlatform

        original = CpuPlatform.__dict__["check_and_update_config"]

        def check_and_update_config(cls: type, vllm_config: Any) -> None:
            original.__func__(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
        try:
            engine = self.engine(async_scheduling=True, num_gpu_blocks_override=33)
        finally:
            CpuPlatform.check_and_update_config = original
        assert engine.llm_engine.vllm_config.scheduler_config.async_scheduling
        return ask(engine, prompts()) + ask(engine, prompts())

    def adapters(self) -> Tokens:
        """Two LoRA adapters and the base model, in one batch, for the same prompts."""
        from vllm.lora.request import LoRARequest

        engine = self.engine(enable_lora=True, max_loras=2, max_lora_rank=8)
        adapters = [LoRARequest(name, i + 1, str(self.models / name)) for i, name in enumerate(("lora_a", "lora_b"))]
        both = [prompt for prompt in prompts()[:4] for _ in range(3)]
        chosen = [None, *adapters] * 4
        return ask(engine, both, chosen) + ask(engine, both, chosen)

    def compiled(self) -> Tokens:
        engine = self.engine(enforce_eager=False)
        return ask(engine, prompts()) + ask(engine, prompts())

    def tensor_parallel(self) -> Tokens:
        """Two ranks, each a process with half of the heads."""
        engine = self.engine(tensor_parallel_size=2)
        return ask(engine, prompts()) + ask(engine, prompts())


def prompts() -> Tokens:
    """Eight requests; odd ones share a prefix of three blocks, and all repeat themselves."""
    return [list(range(3, 103 if i % 2 else 23)) + [5 + i, 9, 5 + i] * (7 * i + 3) for i in range(8)]


def ask(engine: Any, prompts: Tokens, adapters: Any = None) -> Tokens:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(given, sampling, use_tqdm=False, lora_request=adapters)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    scenarios = Scenarios(Path(job["models"]), job["engine"])
    result: dict[str, object]
    try:
        answers: dict[str, Callable[[], Tokens]] = {name: getattr(scenarios, name) for name in job["scenarios"]}
        result = {"tokens": {name: answer() for name, answer in answers.items()}}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    # One write, so that no other process's output gets in between.
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
