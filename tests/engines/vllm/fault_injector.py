"""An adapter that breaks vLLM's KV cache on purpose, inside whichever process holds it.

Used as ``KVCANARY_ADAPTERS=vllm,/path/to/this/file``. ``FAULTS`` in the environment is a JSON list of faults:

- ``{"kind": "flip_bit", "after_step": n, "layer": index, "part": "k" or "v"}``: between step n and step n + 1, flip
  one bit of a slot that the first running request has filled.
- ``{"kind": "swap_blocks", "after_step": n}``: swap the first two blocks of the table of the
  running request that has the most.

Steps count from 1. What was done is appended to the file ``FAULT_REPORT``, one JSON object a line, ``slots`` and
``layer`` included. The layout is that of vLLM's CPU attention with its generic kernels, spelled out here independently
of how the agent finds it.
"""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kvcanary_agent.activation.patching import patch_method

targets = ("vllm.v1.worker.gpu_model_runner",)


def patch(module: ModuleType) -> None:
    """Patch the model runner so that faults appear when a step's tokens have been sampled."""
    faults = json.loads(os.environ["FAULTS"])
    report = Path(os.environ["FAULT_REPORT"])
    steps = itertools.count(1)

    def around_sample_tokens(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        step = next(steps)
        for fault in faults:
            if fault["after_step"] == step:
                done = _INJECTIONS[fault["kind"]](runner, fault)
                with report.open("a") as file:
                    file.write(json.dumps({**fault, **done}) + "\n")
        return output

    patch_method(module.GPUModelRunner, "sample_tokens", around_sample_tokens)


def _flip_bit(runner: Any, fault: dict[str, Any]) -> dict[str, Any]:
    layers = runner.kv_cache_config.kv_cache_groups[0].layer_names
    layer = layers[fault["layer"]]
    cache = runner.compilation_config.static_forward_context[layer].kv_cache
    _, heads, block_size, width = cache.shape
    position = 3
    block = int(runner.input_batch.block_table[0].block_table.np[0, 0])
    # Within a head's page: all K as [head_dim, block_size], then all V as [block_size, head_dim].
    pages = cache.view(-1, heads, 2, block_size * width // 2)
    if fault["part"] == "k":
        values = pages[block, heads - 1, 0].view(width // 2, block_size)[:, position]
    else:
        values = pages[block, heads - 1, 1].view(block_size, width // 2)[position]
    bits = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
    bits[1] ^= 1
    return {"layer": layer, "slots": [block * block_size + position]}


def _swap_blocks(runner: Any, fault: dict[str, Any]) -> dict[str, Any]:
    table = runner.input_batch.block_table[0]
    row = table.block_table.np[table.num_blocks_per_row.argmax()]
    row[[0, 1]] = row[[1, 0]]
    size = table.block_size
    return {"slots": [int(block) * size + offset for block in row[:2] for offset in range(size)]}


_INJECTIONS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "flip_bit": _flip_bit,
    "swap_blocks": _swap_blocks,
}
