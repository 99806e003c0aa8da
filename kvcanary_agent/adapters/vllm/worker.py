"""Patch points of vLLM's worker: new weights while it serves, waking up from sleep, and what it sends back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm import containment
from kvcanary_agent.adapters.vllm.attached_runner import pool_contents_lost, weights_changed

# Each replaces weights, or says that they have been replaced; a worker of another version may lack some.
_NEW_WEIGHTS = ("reload_weights", "update_weights", "finish_weight_update")


def patch_worker(cls: type) -> None:
    """Patch ``Worker``, those of the methods that it has."""
    arounds: dict[str, Callable[..., Any]] = dict.fromkeys(_NEW_WEIGHTS, _around_new_weights)
    arounds["wake_up"] = _around_wake_up
    runtime.patch_class("vllm", cls, {name: around for name, around in arounds.items() if hasattr(cls, name)})
    if containment.is_asked_for():
        containment.patch_worker_outputs(cls)


def _around_new_weights(call: Callable[..., Any], worker: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    finally:
        # Also after a failure: some of the weights may be there.
        with runtime.FailOpen("vllm", "weights of the worker"):
            if not getattr(worker, "_weight_update_is_draft", False):
                weights_changed(worker.model_runner)


def _around_wake_up(call: Callable[..., Any], worker: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    with runtime.FailOpen("vllm", "wake-up of the worker"):
        pool_contents_lost(worker.model_runner)
    return result
