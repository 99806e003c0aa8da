"""transformers: continuous batching, and the caches of plain ``generate``.

Continuous batching: `paged_pool` describes the pool, `paged_events` follows its allocators, `paged_steps` says what a
batch means, and `paged_runner` patches cache and model runner. Plain ``generate``: `generation`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from kvcanary_agent.adapters.transformers.generation import patch_caches, patch_generation
from kvcanary_agent.adapters.transformers.paged_runner import (
    cannot_patch,
    patch_cache,
    patch_events_of,
    patch_model_runner,
)


def patch(module: ModuleType) -> None:
    """Patch an engine module that has just been imported; those of `adapters.targets.BUILTIN` that name this one."""
    for class_name, patch_class in _PATCHES[module.__name__].items():
        cls = getattr(module, class_name, None)
        if isinstance(cls, type):
            patch_class(cls)
        else:
            cannot_patch(class_name, f"{module.__name__} has no class {class_name}")


_BATCHING = "transformers.generation.continuous_batching"
_PATCHES: dict[str, dict[str, Callable[[type], None]]] = {
    f"{_BATCHING}.cache": {
        "PagedAttentionCache": patch_cache,
        "CacheAllocator": patch_events_of,
        "FullAttentionCacheAllocator": patch_events_of,
    },
    f"{_BATCHING}.offloading_manager": {"OffloadingManager": patch_events_of},
    f"{_BATCHING}.model_runner": {"ModelRunner": patch_model_runner},
    "transformers.cache_utils": {"Cache": patch_caches},
    "transformers.generation.utils": {"GenerationMixin": patch_generation},
}
