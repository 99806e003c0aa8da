"""An adapter that lets the canary that SGLang brings along start on a CPU.

Used as ``KVCANARY_ADAPTERS=sglang,/path/to/this/file``. That canary copies its results to the host on a CUDA stream of
its own, and checks the order of its own calls with a kernel; here the results are there already, and the calls are
taken to be in order.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

targets = (
    "sglang.srt.utils.phase_checker",
    "sglang.srt.kv_canary.runner.canary_manager",
    "sglang.srt.kv_canary.runner.future_tensor",
)


def patch(module: ModuleType) -> None:
    """Do without streams and events."""
    if module.__name__.endswith("canary_manager"):
        module.create_device_stream = lambda device: None  # type: ignore[attr-defined]
        return
    if module.__name__.endswith("phase_checker"):
        module.SimplePhaseChecker.update = lambda self, **kwargs: None
        return
    futures = module.FutureTensors

    def device_to_host(tensors: Any, *, d2h_stream: None) -> Any:
        named = tensors if isinstance(tensors, dict) else {module._DUMMY_DICT_KEY: tensors}
        copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in named.items()}
        return futures(_data=copies, _event=SimpleNamespace(synchronize=lambda: None))

    futures.device_to_host = staticmethod(device_to_host)
