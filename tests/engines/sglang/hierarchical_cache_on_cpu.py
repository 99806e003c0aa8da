"""An adapter that lets SGLang's hierarchical cache run on a CPU.

Used as ``KVCANARY_ADAPTERS=sglang,/path/to/this/file``. The engine registers the host's pool with CUDA and copies pages
with a kernel of its own; here all memory is the host's, and torch copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

targets = (
    "sglang.srt.mem_cache.pool_host.common",
    "sglang.srt.mem_cache.pool_host.mha",
)


def patch(module: ModuleType) -> None:
    """Do without CUDA."""
    if module.__name__.endswith("common"):
        module._cuda_host_register = lambda *args: None  # type: ignore[attr-defined]
    else:
        module.transfer_kv_direct = copy_slots  # type: ignore[attr-defined]


def copy_slots(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy slots, ``[n]`` int64, of each layer ``[slots, heads, dim]`` to those of another pool."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
