"""An adapter that breaks vLLM's KV cache on purpose, inside whichever process holds it.

Used as ``KVCANARY_ADAPTERS=vllm,/path/to/this/file``. ``FAULTS`` in the environment is a JSON list of faults:

- ``{"kind": "flip_bit", "after_step": n, "layer": index, "part": "k" or "v"}``: between step n and step n + 1, flip
  one bit of a slot that the first running request has filled.
- ``{"kind": "swap_blocks", "after_step": n}``: swap the first two blocks of the table of the
  running request that has the most.
- ``{"kind": "spoil_first_block", "after_step": n}``: overwrite, in every layer, the block that the first request of all
  began with, whether or not it still runs.
- ``{"kind": "foreign_block", "after_step": n}``: the first block of the third running request becomes the first block
  of the fifth one, too.

Steps count from 1. What was done is appended to the file ``FAULT_REPORT``, one JSON object a line, ``slots`` and
``layer`` included. Both generations of model runners are broken alike. The layout is that of vLLM's CPU attention with
its generic kernels, spelled out here independently of how the agent finds it.
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

targets = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


def patch(module: ModuleType) -> None:
    """Patch the model runner so that faults appear when a step's tokens have been sampled."""
    faults = json.loads(os.environ["FAULTS"])
    report = Path(os.environ["FAULT_REPORT"])
    steps = itertools.count(1)

    def around_sample_tokens(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        step = next(steps)
        if step == 1:
            _first_blocks.append(int(_block_tables(runner)[0][0][0]))
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
    rows, _ = _block_tables(runner)
    block = int(rows[0][0])
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
    rows, counts = _block_tables(runner)
    row = rows[counts.index(max(counts))]
    row[[0, 1]] = row[[1, 0]]
    return {"slots": _slots(runner, row[:2])}


def _foreign_block(runner: Any, fault: dict[str, Any]) -> dict[str, Any]:
    rows, _ = _block_tables(runner)
    rows[4][0] = rows[2][0]
    return {"slots": _slots(runner, rows[4][:1])}


_first_blocks: list[int] = []


def _spoil_first_block(runner: Any, fault: dict[str, Any]) -> dict[str, Any]:
    (block,) = _first_blocks
    for layer in runner.kv_cache_config.kv_cache_groups[0].layer_names:
        runner.compilation_config.static_forward_context[layer].kv_cache[block] = 4.0
    return {"block": block}


def _block_tables(runner: Any) -> tuple[list[Any], list[int]]:
    """A view of the first table of each running request, ``[blocks]``, and how many of its blocks are in use.

    In the order in which the requests came: their ids begin with a number.
    """
    if hasattr(runner, "req_states"):
        row_of = runner.req_states.req_id_to_index
        table, counts = runner.block_tables.block_tables[0].gpu.numpy(), runner.block_tables.num_blocks.np[0]
    else:
        row_of = runner.input_batch.req_id_to_index
        table = runner.input_batch.block_table[0].block_table.np
        counts = runner.input_batch.block_table[0].num_blocks_per_row
    running = [row_of[request] for request in sorted(row_of, key=lambda name: int(name.partition("-")[0]))]
    return [table[row] for row in running], [int(counts[row]) for row in running]


def _slots(runner: Any, blocks: Any) -> list[int]:
    size = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return [int(block) * size + offset for block in blocks for offset in range(size)]


_INJECTIONS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "flip_bit": _flip_bit,
    "swap_blocks": _swap_blocks,
    "spoil_first_block": _spoil_first_block,
    "foreign_block": _foreign_block,
}
