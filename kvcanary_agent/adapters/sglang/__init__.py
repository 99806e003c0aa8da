"""SGLang: the scheduler's process, which holds the model runner, its pool, the allocators and the requests.

`model_runner` patches the runner and the scheduler, `steps` says what its batches mean, `pool` describes its pool,
`allocator` follows what is handed out and taken back, `host_tier` what is copied to host memory and back,
`prefix_cache` lists what the radix tree holds, and `containment` takes corrupt pages out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from kvcanary_agent import runtime
from kvcanary_agent.adapters.sglang.allocator import patch_paged_allocator, patch_token_allocator
from kvcanary_agent.adapters.sglang.host_tier import patch_cache_controller, patch_host_pool
from kvcanary_agent.adapters.sglang.model_runner import (
    patch_forward_batch,
    patch_model_runner,
    patch_scheduler,
    patch_weight_updater,
)


def patch(module: ModuleType) -> None:
    """Patch an engine module that has just been imported; those of `adapters.targets.BUILTIN` that name this one."""
    class_name, patch_class = _PATCHES[module.__name__]
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        runtime.not_covered("sglang", class_name, f"{module.__name__} has no such class")
        return
    patch_class(cls)


_PATCHES: dict[str, tuple[str, Callable[[type], None]]] = {
    "sglang.srt.model_executor.model_runner": ("ModelRunner", patch_model_runner),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch", patch_forward_batch),
    "sglang.srt.model_executor.model_runner_components.weight_updater": ("WeightUpdater", patch_weight_updater),
    "sglang.srt.managers.scheduler": ("Scheduler", patch_scheduler),
    "sglang.srt.mem_cache.allocator.token": ("TokenToKVPoolAllocator", patch_token_allocator),
    "sglang.srt.mem_cache.allocator.paged": ("PagedTokenToKVPoolAllocator", patch_paged_allocator),
    "sglang.srt.managers.cache_controller": ("HiCacheController", patch_cache_controller),
    "sglang.srt.mem_cache.pool_host.base": ("HostKVCache", patch_host_pool),
}
