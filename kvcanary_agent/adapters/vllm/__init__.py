"""vLLM: the scheduler's process, and both generations of model runners in whichever process holds the KV pool.

The scheduler's process owns the allocator: `scheduler` checks its acts there, and has `events` travel on every
`SchedulerOutput` to the workers, where a `follower` tells them to the canary of the pool. `model_runner` (V1) and
`v2_model_runner` patch a runner and describe its steps, `attached_runner` is what they share, `pool` describes a
runner's pool, `slot_probe` finds out where a layer keeps the bytes of a slot, `histories` keeps the tokens of requests
where the engine has none on the device, `versions` says which releases all of this was checked against, `worker`
and `weights` hear of new weights, and `containment` takes corrupt blocks out of the prefix index.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.model_runner import patch_model_runner
from kvcanary_agent.adapters.vllm.scheduler import (
    patch_block_pool,
    patch_manager,
    patch_scheduler,
)
from kvcanary_agent.adapters.vllm.v2_model_runner import patch_v2_model_runner
from kvcanary_agent.adapters.vllm.worker import patch_worker


def patch(module: ModuleType) -> None:
    """Patch an engine module that has just been imported; those of `adapters.targets.BUILTIN` that name this one."""
    name, class_name, patch_class = _PATCHES[module.__name__]
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        runtime.not_covered("vllm", name, f"{module.__name__} has no class {class_name}")
        return
    patch_class(cls)


_PATCHES: dict[str, tuple[str, str, Callable[[type], None]]] = {
    "vllm.v1.worker.gpu_model_runner": ("V1 model runner", "GPUModelRunner", patch_model_runner),
    "vllm.v1.worker.gpu.model_runner": ("V2 model runner", "GPUModelRunner", patch_v2_model_runner),
    "vllm.v1.worker.gpu_worker": ("worker", "Worker", patch_worker),
    "vllm.v1.core.block_pool": ("allocator", "BlockPool", patch_block_pool),
    "vllm.v1.core.kv_cache_manager": ("allocator", "KVCacheManager", patch_manager),
    "vllm.v1.core.sched.scheduler": ("allocator", "Scheduler", patch_scheduler),
}
