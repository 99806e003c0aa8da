"""Run what vLLM has for GPUs alone on a CPU.

To be called before vLLM or Triton is imported, in the process that holds the engine.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def run_v2_model_runner() -> None:
    """Have vLLM choose the V2 model runner; its own Triton kernels run in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    _pretend_a_triton_backend()
    _accept_masks_of_integers()


def keep_asynchronous_scheduling() -> None:
    """Have vLLM schedule a step before the tokens of the last one are known, which it switches off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _pretend_a_triton_backend() -> None:
    """vLLM uses Triton where one backend's driver is registered; the interpreter needs none that works."""
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: False)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def _accept_masks_of_integers() -> None:
    """The compiler takes a mask of any integer for a load or store, the interpreter only one of booleans."""
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_booleans(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, as_booleans(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, as_booleans(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
