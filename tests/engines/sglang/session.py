"""A program that keeps an SGLang engine for the suite to command, with and without the agent: session.py OPTIONS.

``OPTIONS`` is JSON, keyword arguments of ``sglang.Engine``. When the engine is up it prints ``READY``. Each line of its
standard input is a command in JSON, answered by one line, ``RESULT`` and JSON:

- ``{"do": "generate", "prompts": [[token ids]], "max_tokens": n}``: all prompts at once; optional ``salts`` and
  ``adapters``, names of LoRA adapters, one for each. Answers the lists of new tokens.
- ``{"do": "abort", "prompts": [[token ids]], "max_tokens": n}``: the same, but every second request is aborted when its
  first token arrives. Answers the new tokens of the others.
- ``{"do": "count_verifications", "prompts": [[token ids]], "max_tokens": n}``: the same as ``generate``. Answers how
  many steps verified drafts, for each prompt.
- ``{"do": "flush"}``: empties the prefix cache. Answers whether it did.
- ``{"do": "update_weights", "model": path, "flush": bool}``: loads the weights anew. Answers whether it did.

Closing the standard input ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def main() -> None:
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    _say("READY")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = _ACTIONS[command["do"]](engine, command)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        _say(f"RESULT {json.dumps(answer)}")
    engine.shutdown()


def _sampling(command: dict[str, Any]) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": command["max_tokens"], "ignore_eos": True}


def _generate(engine: Any, command: dict[str, Any]) -> list[list[int]]:
    outputs = engine.generate(
        input_ids=command["prompts"],
        sampling_params=_sampling(command),
        cache_salt=command.get("salts"),
        lora_path=command.get("adapters"),
    )
    return [list(output["output_ids"]) for output in outputs]


def _count_verifications(engine: Any, command: dict[str, Any]) -> list[int]:
    outputs = engine.generate(input_ids=command["prompts"], sampling_params=_sampling(command))
    return [output["meta_info"]["spec_verify_ct"] for output in outputs]


def _abort(engine: Any, command: dict[str, Any]) -> list[list[int]]:
    async def one(index: int, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        stream = await engine.async_generate(
            input_ids=prompt, sampling_params=_sampling(command), rid=f"request-{index}", stream=True
        )
        async for chunk in stream:
            tokens = list(chunk["output_ids"])
            if index % 2:
                engine.tokenizer_manager.abort_request(f"request-{index}")
        return [] if index % 2 else tokens

    async def all_of_them() -> list[list[int]]:
        return list(await asyncio.gather(*(one(*numbered) for numbered in enumerate(command["prompts"]))))

    return [tokens for tokens in engine.loop.run_until_complete(all_of_them()) if tokens]


def _flush(engine: Any, command: dict[str, Any]) -> bool:
    # When a request has been answered, the scheduler may not be done with it yet.
    flushed = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60.0))
    return bool(flushed.success)


def _update_weights(engine: Any, command: dict[str, Any]) -> bool:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=command["model"], flush_cache=command["flush"])
    return bool(engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_disk(request, None))[0])


_ACTIONS = {
    "generate": _generate,
    "count_verifications": _count_verifications,
    "abort": _abort,
    "flush": _flush,
    "update_weights": _update_weights,
}


def _say(line: str) -> None:
    # One write, so that no other process's output gets in between.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
