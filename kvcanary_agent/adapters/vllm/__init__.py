"""vLLM: both generations of model runners, in whichever process holds the KV pool.

The worker's process owns the pool and is told by every `SchedulerOutput` which blocks were handed out, so the canary
lives there alone. `model_runner` (V1) and `v2_model_runner` patch a runner and describe its steps, `attached_runner` is
what they share, `pool` describes a runner's pool, and `slot_probe` finds out where a layer keeps the bytes of a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.attached_runner import pool_contents_lost
from kvcanary_agent.adapters.vllm.model_runner import patch_model_runner
from kvcanary_agent.adapters.vllm.v2_model_runner import patch_v2_model_runner


def patch(module: ModuleType) -> None:
    """Patch an engine module that has just been imported; those of `adapters.targets.BUILTIN` that name this one."""
    name, class_name, patch_class = _PATCHES[module.__name__]
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        runtime.not_covered("vllm", name, f"{module.__name__} has no class {class_name}")
        return
    patch_class(cls)


def _patch_worker(cls: type) -> None:
    if hasattr(cls, "wake_up"):
        runtime.patch_class("vllm", cls, {"wake_up": _around_wake_up})


def _around_wake_up(call: Callable[..., Any], worker: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    with runtime.FailOpen("vllm", "wake-up of the worker"):
        pool_contents_lost(worker.model_runner)
    return result


_PATCHES: dict[str, tuple[str, str, Callable[[type], None]]] = {
    "vllm.v1.worker.gpu_model_runner": ("V1 model runner", "GPUModelRunner", patch_model_runner),
    "vllm.v1.worker.gpu.model_runner": ("V2 model runner", "GPUModelRunner", patch_v2_model_runner),
    "vllm.v1.worker.gpu_worker": ("worker", "Worker", _patch_worker),
}
