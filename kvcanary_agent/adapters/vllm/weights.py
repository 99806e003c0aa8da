"""Weights that are loaded into a model directly, as trainers' worker extensions do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from kvcanary_agent import runtime
from kvcanary_agent.canary.canary import Canary

# Weak on both sides, so that an engine that is dropped in-process goes.
_canary_of: WeakKeyDictionary[Any, weakref.ref[Canary]] = WeakKeyDictionary()
runtime.on_shut_down(_canary_of.clear)


def watch_weights(model: Any, canary: Canary) -> None:
    """Tell ``canary`` of all weights that are loaded into ``model`` from now on."""
    if hasattr(model, "load_weights"):
        _canary_of[model] = weakref.ref(canary)
        runtime.patch_class("vllm", type(model), {"load_weights": _around_load_weights})


def _around_load_weights(call: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    finally:
        # Also after a failure: some of the weights may be there.
        watched = _canary_of.get(model)
        canary = watched() if watched is not None else None
        if canary is not None:
            canary.weights_changed()
