"""An adapter that breaks a function of the agent itself: ``BREAK`` names it, as ``package.module:Class.method``.

Used as ``KVCANARY_ADAPTERS=/path/to/this/file,vllm``.
"""

import importlib
import os
from types import FunctionType, ModuleType
from typing import Any

targets = ("vllm.v1.worker.gpu_model_runner",)


def patch(engine_module: ModuleType) -> None:
    """Let the function raise from now on, wherever it is referred to."""
    module, path = os.environ["BREAK"].split(":")
    function: Any = importlib.import_module(module)
    for name in path.split("."):
        function = getattr(function, name)
    assert isinstance(function, FunctionType)
    function.__code__ = _raises.__code__.replace(co_freevars=function.__code__.co_freevars)


def _raises(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("broken on purpose")
