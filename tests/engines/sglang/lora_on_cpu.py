"""An adapter that lets SGLang's LoRA layers in plain torch run on a CPU, which has no memory to pin.

Used as ``KVCANARY_ADAPTERS=sglang,/path/to/this/file``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

targets = (
    "sglang.srt.lora.layers",
    "sglang.srt.lora.backend.torch_backend",
)


def patch(module: ModuleType) -> None:
    """Do without pinned memory."""
    module.torch = _Unpinned()  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]


class _Unpinned:
    """All of torch, but nothing in it pins what it makes."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _unpinned(found) if name in ("tensor", "zeros", "empty") else found


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)
