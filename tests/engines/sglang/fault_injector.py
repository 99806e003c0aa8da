"""An adapter that breaks SGLang's KV cache on purpose, inside the scheduler's process.

Used as ``KVCANARY_ADAPTERS=sglang,/path/to/this/file``. After each decode step it looks for the file
``FAULT_REQUEST``, JSON, and does what it says as soon as a batch has what that takes:

- ``{"kind": "flip_bit", "layer": index, "part": "k" or "v"}``: one bit of a slot that the first request has filled.
- ``{"kind": "copy_slot"}``: all bytes of one slot of the second request over one of the first.
- ``{"kind": "swap_entries"}``: the newest two entries of the first request's row of the token table.
- ``{"kind": "swap_rows"}``: as many entries of the rows of two requests as both have filled.
- ``{"kind": "free_in_use"}``: the allocator is given back a page of the longest request.
- ``{"kind": "free_twice"}``: the allocator is given back a page that is free.
- ``{"kind": "hand_out_twice"}``: a page of the longest request is put at the head of the allocator's free list.
- ``{"kind": "wrong_write"}``: the next token of the first request goes to a slot of the second.
- ``{"kind": "idle_bit", "layer": index}``: one bit of a slot of the prefix cache that no running request uses.
- ``{"kind": "spoil_cached"}``: every layer of a page of the prefix cache that no running request uses.
- ``{"kind": "wrong_hit"}``: the next request that hits the prefix cache is given the slots of others.
- ``{"kind": "wrong_namespace_hit"}``: the same, where the others have the same prompt under another extra key.
- ``{"kind": "free_cached"}``: the allocator is given back a page that the prefix cache holds and no request uses.
- ``{"kind": "lose_write", "layer": index, "part": "k" or "v"}``: what a step writes for the first request does not
  land in that layer, where something else was before.
- ``{"kind": "host_bits", "layer": index}``: one bit of every copy of a slot in the hierarchical cache's host memory.
- ``{"kind": "drill", "drill": kind}``: the agent's own drill of that kind, at the next step; the process needs to have
  been started with ``KVCANARY_DRILL``, of any kind and a step that never comes.

What was done goes to the file ``FAULT_REPORT``, JSON; then ``FAULT_REQUEST`` is removed. The layout is that of the
engine's plain pool, spelled out here independently of how the agent finds it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kvcanary_agent import runtime
from kvcanary_agent.activation.patching import patch_method
from kvcanary_agent.settings import Drill

targets = (
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.managers.scheduler",
)

Done = dict[str, Any]


def patch(module: ModuleType) -> None:
    """Patch what a step ends and begins with."""
    if module.__name__.endswith("model_runner"):
        patch_method(module.ModelRunner, "sample", _around_sample)
        patch_method(module.ModelRunner, "_forward_raw", _around_forward_raw)
    else:
        patch_method(module.Scheduler, "run_batch", _around_run_batch)


def _requested() -> dict[str, Any] | None:
    try:
        return dict(json.loads(Path(os.environ["FAULT_REQUEST"]).read_text()))
    except FileNotFoundError:
        return None


def _report(fault: dict[str, Any], done: Done) -> None:
    unfinished = Path(os.environ["FAULT_REPORT"] + ".unfinished")
    unfinished.write_text(json.dumps({**fault, **done}))
    unfinished.rename(os.environ["FAULT_REPORT"])
    Path(os.environ["FAULT_REQUEST"]).unlink()


def _around_sample(call: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    sampled = call(*args, **kwargs)
    batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[1]
    fault = _requested()
    if fault is not None and fault["kind"] in _AFTER_A_STEP and batch.forward_mode.is_decode() and batch.batch_size > 1:
        with torch.inference_mode():
            done = _AFTER_A_STEP[fault["kind"]](runner, batch, fault)
        if done is not None:
            _report(fault, done)
    return sampled


def _around_run_batch(call: Callable[..., Any], scheduler: Any, /, batch: Any, *args: Any, **kwargs: Any) -> Any:
    fault = _requested()
    if fault is not None and fault["kind"] in _BEFORE_A_STEP and len(batch.reqs) > 1:
        with torch.inference_mode():
            done = _BEFORE_A_STEP[fault["kind"]](scheduler, batch, fault)
        if done is not None:
            _report(fault, done)
    return call(batch, *args, **kwargs)


def _around_forward_raw(call: Callable[..., Any], runner: Any, /, batch: Any, *args: Any, **kwargs: Any) -> Any:
    fault = _requested()
    if fault is None or fault["kind"] != "lose_write" or not batch.forward_mode.is_decode():
        return call(batch, *args, **kwargs)
    pool, slot = runner.token_to_kv_pool, int(batch.out_cache_loc[0])
    payload = (pool.k_buffer if fault["part"] == "k" else pool.v_buffer)[fault["layer"]][slot]
    before = payload.clone()
    result = call(batch, *args, **kwargs)
    if torch.equal(payload, before) or not before.any():
        return result
    with torch.inference_mode():
        payload.copy_(before)
    _report(fault, {"slots": [slot], "layer": f"layers.{fault['layer'] % len(pool.k_buffer)}"})
    return result


def _slots(runner: Any, batch: Any, row: int) -> list[int]:
    """The slots of a row's tokens that are computed."""
    table = runner.req_to_token_pool.req_to_token
    return list(table[batch.req_pool_indices[row], : int(batch.seq_lens[row])].tolist())


def _flip(buffer: torch.Tensor, slot: int) -> None:
    bits = buffer[slot, -1].view({2: torch.int16, 4: torch.int32}[buffer.element_size()])
    bits[1] ^= 1


def _flip_bit(runner: Any, batch: Any, fault: dict[str, Any]) -> Done:
    pool = runner.token_to_kv_pool
    slot = _slots(runner, batch, 0)[3]
    _flip((pool.k_buffer if fault["part"] == "k" else pool.v_buffer)[fault["layer"]], slot)
    return {"slots": [slot], "layer": f"layers.{fault['layer'] % len(pool.k_buffer)}"}


def _copy_slot(runner: Any, batch: Any, fault: dict[str, Any]) -> Done:
    source, target = _slots(runner, batch, 1)[-2], _slots(runner, batch, 0)[3]
    for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
        buffer[target] = buffer[source]
    return {"slots": [target]}


def _swap_entries(runner: Any, batch: Any, fault: dict[str, Any]) -> Done:
    row = runner.req_to_token_pool.req_to_token[batch.req_pool_indices[0]]
    newest = int(batch.seq_lens[0]) - 1
    row[[newest - 1, newest]] = row[[newest, newest - 1]]
    return {"slots": row[[newest - 1, newest]].tolist()}


def _swap_rows(runner: Any, batch: Any, fault: dict[str, Any]) -> Done | None:
    table, lengths = runner.req_to_token_pool.req_to_token, batch.seq_lens.tolist()
    first, second = batch.req_pool_indices[:2].tolist()
    both = min(lengths[:2]) // runner.page_size * runner.page_size
    table[[first, second], :both] = table[[second, first], :both]
    return {"slots": table[[first, second], :both].flatten().tolist()}


def _free_in_use(runner: Any, batch: Any, fault: dict[str, Any]) -> Done:
    slots = _own_page(runner, batch)
    runner.token_to_kv_pool_allocator.free(torch.tensor(slots))
    return {"slots": slots}


def _free_twice(runner: Any, batch: Any, fault: dict[str, Any]) -> Done:
    allocator = runner.token_to_kv_pool_allocator
    page = int(allocator.free_pages[-1])
    slots = list(range(page * allocator.page_size, (page + 1) * allocator.page_size))
    allocator.free(torch.tensor(slots))
    return {"slots": slots}


def _hand_out_twice(runner: Any, batch: Any, fault: dict[str, Any]) -> Done:
    allocator = runner.token_to_kv_pool_allocator
    slots = _own_page(runner, batch)
    page = torch.tensor([slots[0] // allocator.page_size])
    allocator.free_pages = torch.cat((page, allocator.free_pages))
    return {"slots": slots}


def _own_page(runner: Any, batch: Any) -> list[int]:
    """The slots of a whole page that the longest request has filled."""
    size = runner.page_size
    first = _slots(runner, batch, int(batch.seq_lens.argmax()))[128] // size * size
    return list(range(first, first + size))


def _idle_bit(runner: Any, batch: Any, fault: dict[str, Any]) -> Done | None:
    slots = _cached_page(runner, batch)
    if slots is None:
        return None
    pool = runner.token_to_kv_pool
    _flip(pool.v_buffer[fault["layer"]], slots[0])
    return {"slots": slots[:1], "layer": f"layers.{fault['layer'] % len(pool.k_buffer)}"}


def _spoil_cached(runner: Any, batch: Any, fault: dict[str, Any]) -> Done | None:
    slots = _cached_page(runner, batch)
    if slots is None:
        return None
    for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
        buffer[slots] = 4.0
    return {"slots": slots}


def _free_cached(runner: Any, batch: Any, fault: dict[str, Any]) -> Done | None:
    slots = _cached_page(runner, batch)
    if slots is None:
        return None
    runner.token_to_kv_pool_allocator.free(torch.tensor(slots))
    return {"slots": slots}


def _cached_page(runner: Any, batch: Any) -> list[int] | None:
    """The slots of a page that is neither free nor used by a request: the prefix cache holds it."""
    allocator, size = runner.token_to_kv_pool_allocator, runner.page_size
    used = {slot // size for row in range(batch.batch_size) for slot in _slots(runner, batch, row)}
    free = set(allocator.free_pages.tolist())
    idle = [page for page in range(1, allocator.size // size) if page not in used | free]
    if not idle:
        return None
    # Not the first: a request may still be given the cached page of its own last token in exchange for its own.
    page = idle[len(idle) // 2]
    return list(range(page * size, (page + 1) * size))


def _wrong_write(scheduler: Any, batch: Any, fault: dict[str, Any]) -> Done | None:
    runner = scheduler.tp_worker.model_runner
    if not batch.forward_mode.is_decode():
        return None
    slot = _slots(runner, batch, 1)[1]
    batch.out_cache_loc[0] = slot
    return {"slots": [slot]}


def _wrong_hit(scheduler: Any, batch: Any, fault: dict[str, Any]) -> Done | None:
    runner = scheduler.tp_worker.model_runner
    if not batch.forward_mode.is_extend() or min(batch.prefix_lens[:2]) < 32:
        return None
    table, size = runner.req_to_token_pool.req_to_token, 32
    first, second = batch.req_pool_indices[:2].tolist()
    table[first, :size] = table[second, :size]
    return {"slots": table[first, :size].tolist()}


def _host_bits(scheduler: Any, batch: Any, fault: dict[str, Any]) -> Done | None:
    host_pool = scheduler.tree_cache.cache_controller.mem_pool_host.anchor_entry.host_pool
    copies = host_pool.slot_used.nonzero().flatten().tolist()
    if not copies:
        return None
    for slot in copies:
        _flip(host_pool.v_buffer[fault["layer"]], slot)
    return {"layer": f"layers.{fault['layer'] % host_pool.layer_num}"}


def _drill(scheduler: Any, batch: Any, fault: dict[str, Any]) -> Done | None:
    if not batch.forward_mode.is_decode():
        return None
    (canary,) = runtime._open.values()
    armed: Any = canary
    armed._drill, armed._wait.over = Drill(kind=fault["drill"], step=0), False
    return {}


_AFTER_A_STEP: dict[str, Callable[[Any, Any, dict[str, Any]], Done | None]] = {
    "flip_bit": _flip_bit,
    "copy_slot": _copy_slot,
    "swap_entries": _swap_entries,
    "swap_rows": _swap_rows,
    "free_in_use": _free_in_use,
    "free_twice": _free_twice,
    "hand_out_twice": _hand_out_twice,
    "idle_bit": _idle_bit,
    "spoil_cached": _spoil_cached,
    "free_cached": _free_cached,
}
_BEFORE_A_STEP: dict[str, Callable[[Any, Any, dict[str, Any]], Done | None]] = {
    "wrong_write": _wrong_write,
    "wrong_hit": _wrong_hit,
    "wrong_namespace_hit": _wrong_hit,
    "host_bits": _host_bits,
    "drill": _drill,
}
