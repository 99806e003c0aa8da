"""An adapter that makes vLLM look like another version, to those that come after it in ``KVCANARY_ADAPTERS``."""

from types import ModuleType
from typing import Any

targets = ("vllm.v1.worker.gpu_model_runner",)


def patch(module: ModuleType) -> None:
    """Give a method of the model runner other parameters, with which it works as before."""
    original = module.GPUModelRunner._prepare_inputs

    def _prepare_inputs(self: Any, batch: Any, counts: Any) -> Any:
        return original(self, batch, counts)

    module.GPUModelRunner._prepare_inputs = _prepare_inputs
