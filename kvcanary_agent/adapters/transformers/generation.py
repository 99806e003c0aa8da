"""Patch points of the caches that plain ``generate``, or any other loop around a model, keeps: dynamic and static ones,
sliding windows among them.

A model puts each layer's new keys and values into its cache by `Cache.update`: that is where they are checked, whoever
runs the loop. What traces or compiles the model does not see the checks, nor is it seen by them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.transformers.paged_pool import ENGINE, engine_version
from kvcanary_agent.canary.tensor_cache import OfRows, TensorCache, TensorCaches

_SUBJECT = "caches of generate"
_POOL = "generate"
# What the arounds below rely on: each method's leading parameters after self.
CACHE: dict[str, tuple[str, ...]] = {
    "update": ("key_states", "value_states", "layer_idx"),
    "reorder_cache": ("beam_idx",),
    "crop": ("tokens_to_remove",),
    "batch_repeat_interleave": ("repeats",),
    "batch_select_indices": ("indices",),
    "reset": (),
}
MIXIN: dict[str, tuple[str, ...]] = {"prepare_inputs_for_generation": ("input_ids",)}

_APPENDING = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)
_FIXED = frozenset({"StaticLayer", "StaticIndexedLayer", "LinearAttentionAndStaticFullAttentionLayer"})
_ROLLING = frozenset({"StaticSlidingWindowLayer", "LinearAttentionAndStaticSlidingWindowAttentionLayer"})
_BESIDE = {
    "DynamicIndexedLayer": "keys of the index of sparse attention",
    "StaticIndexedLayer": "keys of the index of sparse attention",
    "LinearAttentionAndFullAttentionLayer": "states of linear attention",
    "LinearAttentionAndSlidingWindowAttentionLayer": "states of linear attention",
    "LinearAttentionAndStaticFullAttentionLayer": "states of linear attention",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": "states of linear attention",
}
"""What layers hold beside keys and values, which is not covered."""


class _Watched:
    """A cache that is watched."""

    def __init__(self, caches: TensorCaches) -> None:
        self.cache: TensorCache = caches.open()
        self.last_layer = -1
        # Positions put in since it was new or reset, as far as they were seen.
        self.length = 0


class _Watching:
    """What is the same for all caches of the process; set up with the first."""

    def __init__(self) -> None:
        self.part = runtime.FailOpen(ENGINE, _SUBJECT)
        self.of_cache: WeakKeyDictionary[Any, _Watched] = WeakKeyDictionary()
        self._caches: TensorCaches | None = None
        self._lock = threading.Lock()

    def find(self, cache: Any) -> _Watched | None:
        """The watch of a cache, if it has one and caches are watched; does not raise, though a cache have no hash."""
        found = None
        if self.part.on:
            with self.part:
                found = self.of_cache.get(cache)
        return found

    def open(self, cache: Any) -> _Watched | None:
        """The watch of a cache, from now on."""
        watched = self.of_cache.get(cache)
        if watched is None and self.part.on:
            with self._lock:
                if self._caches is None:
                    self._caches = runtime.open_tensor_caches(ENGINE, engine_version(), _POOL)
            if self._caches is None:
                self.part.on = False
                return None
            watched = self.of_cache[cache] = _Watched(self._caches)
        return watched


_watching = _Watching()


def _start_over() -> None:
    global _watching
    _watching = _Watching()


runtime.on_shut_down(_start_over)


def patch_caches(cls: type) -> None:
    """Patch ``Cache``."""
    problem = runtime.unexpected_methods(cls, CACHE)
    if problem is not None:
        runtime.patch_class(ENGINE, cls, {"update": _around_unknown_update(problem)})
        return
    runtime.patch_class(
        ENGINE,
        cls,
        {
            "update": _around_update,
            "reorder_cache": _around_reorder,
            "crop": _around_crop,
            "batch_repeat_interleave": _around_repeat,
            "batch_select_indices": _around_select,
            "reset": _around_reset,
        },
    )


def patch_generation(cls: type) -> None:
    """Patch ``GenerationMixin``, which says what tokens the rows of a cache are for."""
    if runtime.unexpected_methods(cls, MIXIN) is None:
        runtime.patch_class(ENGINE, cls, {"prepare_inputs_for_generation": _around_prepare_inputs})


# Updates


def _around_unknown_update(problem: str) -> Callable[..., Any]:
    """What is not known is said when it is used: many a process imports transformers for something else."""

    def around(call: Callable[..., Any], cache: Any, /, *args: Any, **kwargs: Any) -> Any:
        runtime.not_covered(ENGINE, _SUBJECT, problem)
        return call(*args, **kwargs)

    return around


def _around_update(
    call: Callable[..., Any],
    cache: Any,
    /,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    layer_idx: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    watching = _watching
    if not watching.part.on:
        return call(key_states, value_states, layer_idx, *args, **kwargs)
    update = None
    with watching.part, _apart():
        update = _before_update(watching, cache, key_states, layer_idx)
    result = call(key_states, value_states, layer_idx, *args, **kwargs)
    if update is not None and watching.part.on:
        with watching.part, _apart():
            _after_update(update, cache, layer_idx)
    return result


@dataclass(frozen=True, slots=True)
class _Update:
    """One layer's update, between its two looks.

    Attributes:
        watched: The cache.
        new: How many columns come.
        ends_step: It is the last layer's.
        follows: What is there is what was recorded last.
        before: How many positions were put in before, of a tensor of fixed size; None if that is not known.
        at: The columns that are written, of a tensor of fixed size.
    """

    watched: _Watched
    new: int
    ends_step: bool
    follows: bool = False
    before: int | None = None
    at: torch.Tensor | None = None


def _before_update(watching: _Watching, cache: Any, key_states: Any, layer_idx: int) -> _Update | None:
    offloading = getattr(cache, "offloading", False)
    if not _is_plain(key_states) or offloading:
        if offloading:
            runtime.not_covered(ENGINE, "offloaded caches of generate", "their layers move between devices")
        watched = watching.of_cache.get(cache)
        if watched is not None:
            watched.cache.forget()
        return None
    watched = watching.open(cache)
    if watched is None:
        return None
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    rows, new = key_states.shape[0], key_states.shape[2]
    if watched.last_layer < 0 or layer_idx <= watched.last_layer:
        watched.cache.begin_step(rows, new, max(len(cache.layers), layer_idx + 1))
        watched.length += new
    watched.last_layer = layer_idx
    if not watched.cache.compares_content:
        return None
    # Of a cache that makes its layers as they come, none is known to be the last.
    ends_step = layer is not None and layer_idx == len(cache.layers) - 1
    if not _is_covered(layer):
        return _Update(watched, new, ends_step)
    before, at = _in_use(layer, new)
    name = f"layers.{layer_idx}"
    follows = all(watched.cache.follows(name, part, tensor, before) for part, tensor in _parts(layer))
    if follows:
        for index, (part, tensor) in enumerate(_parts(layer)):
            columns = tensor.shape[2] if before is None else min(before, tensor.shape[2])
            first = 0 if type(layer).__name__ in _FIXED else _length(layer) - columns
            watched.cache.verify(2 * layer_idx + index, name, part, tensor, columns, first)
    return _Update(watched, new, ends_step, follows, before, at)


def _after_update(update: _Update, cache: Any, layer_idx: int) -> None:
    layer, records, name = cache.layers[layer_idx], update.watched.cache, f"layers.{layer_idx}"
    kind, new, follows = type(layer).__name__, update.new, update.follows
    if kind in _BESIDE:
        runtime.not_covered(ENGINE, _BESIDE[kind], f"they are beside the keys and values of {kind}")
    if not _is_covered(layer):
        quantised = hasattr(layer, "_quantized_keys")
        reason = "what they hold is quantised in groups of tokens" if quantised else "their layout is not known"
        runtime.not_covered(ENGINE, f"caches with layers of class {kind}", reason)
    elif kind in _APPENDING:
        for part, tensor in _parts(layer):
            records.appended(name, part, tensor, new, follows)
    else:
        before, columns = update.before or 0, layer.keys.shape[2]
        at = torch.arange(new, device=layer.keys.device) if update.at is None else update.at
        for part, tensor in _parts(layer):
            if kind in _ROLLING and before + new > columns:
                records.shifted(name, part, tensor, new, before + new, follows)
            else:
                records.written(name, part, tensor, at, before + new, follows)
    if update.ends_step:
        records.end_step()


def _parts(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield "k", layer.keys
    yield "v", layer.values


def _is_covered(layer: Any) -> bool:
    """Whether a layer keeps its keys and values in a way that is known, and has any."""
    known = type(layer).__name__ in _APPENDING | _FIXED | _ROLLING
    return known and layer.is_initialized and layer.keys is not None and layer.keys.dim() == 4


def _in_use(layer: Any, new: int) -> tuple[int | None, torch.Tensor | None]:
    """Of a tensor of fixed size, how many positions were put in, if the host knows, and where ``new`` ones will go."""
    kind, device = type(layer).__name__, layer.keys.device
    if kind in _APPENDING:
        return None, None
    if kind in _FIXED and device.type != "cpu":
        # The host would wait for the number.
        return None, layer.cumulative_length + torch.arange(new, device=device)
    before = int(layer.cumulative_length if kind in _FIXED else layer.cumulative_length_int)
    return before, torch.arange(before, before + new, device=device)


def _is_plain(states: Any) -> bool:
    """Whether these are tensors with bytes that no gradient is taken of, outside of everything that traces."""
    return (
        type(states) is torch.Tensor
        and states.dim() == 4
        and states.device.type in ("cpu", "cuda")
        and not states.requires_grad
        and not torch._C._is_tracing()
        and not torch._C._functorch.is_functorch_wrapped_tensor(states)
        and not (states.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


# Rows and columns that move


def _around_reorder(call: Callable[..., Any], cache: Any, /, beam_idx: Any, *args: Any, **kwargs: Any) -> Any:
    with _moving(cache, lambda records: records.index_select(0, beam_idx.to(records.device))):
        return call(beam_idx, *args, **kwargs)


def _around_repeat(call: Callable[..., Any], cache: Any, /, repeats: int, *args: Any, **kwargs: Any) -> Any:
    with _moving(cache, lambda records: records.repeat_interleave(repeats, dim=0)):
        return call(repeats, *args, **kwargs)


def _around_select(call: Callable[..., Any], cache: Any, /, indices: Any, *args: Any, **kwargs: Any) -> Any:
    with _moving(cache, lambda records: records[indices]):
        return call(indices, *args, **kwargs)


@contextlib.contextmanager
def _moving(cache: Any, of_rows: OfRows) -> Iterator[None]:
    """Within it, the cache's rows are moved as ``of_rows`` moves those of its records."""
    watched = _watching.find(cache)
    if watched is None:
        yield
        return
    with _watching.part:
        _forget_strangers(watched, cache)
    yield
    with _watching.part, _apart():
        for index, layer in _covered_layers(cache):
            for part, tensor in _parts(layer):
                watched.cache.moved(f"layers.{index}", part, tensor, of_rows)
        watched.cache.tokens_moved(of_rows)


def _around_crop(call: Callable[..., Any], cache: Any, /, tokens_to_remove: int, *args: Any, **kwargs: Any) -> Any:
    watched = _watching.find(cache)
    if watched is None:
        return call(tokens_to_remove, *args, **kwargs)
    before = {}
    with _watching.part:
        _forget_strangers(watched, cache)
        before = {index: _length(layer) for index, layer in _growing_layers(cache)}
    result = call(tokens_to_remove, *args, **kwargs)
    with _watching.part, _apart():
        removed = abs(tokens_to_remove)
        for index, layer in _covered_layers(cache):
            for part, tensor in _parts(layer):
                name = f"layers.{index}"
                if type(layer).__name__ in _APPENDING:
                    watched.cache.cropped(name, part, tensor, before.get(index, 0) - _length(layer))
                else:
                    in_use = torch.arange(tensor.shape[2], device=tensor.device) < layer.cumulative_length
                    watched.cache.limited(name, part, in_use, removed)
        watched.cache.tokens_cropped(removed)
        watched.length -= removed
    return result


def _forget_strangers(watched: _Watched, cache: Any) -> None:
    """Tensors that somebody has put in the place of recorded ones have no records."""
    for index, layer in _covered_layers(cache):
        for part, tensor in _parts(layer):
            if not watched.cache.follows(f"layers.{index}", part, tensor):
                watched.cache.forget_part(f"layers.{index}", part)


def _around_reset(call: Callable[..., Any], cache: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    watched = _watching.find(cache)
    if watched is not None:
        with _watching.part:
            watched.cache.forget()
            watched.length = 0
    return result


def _covered_layers(cache: Any) -> Iterator[tuple[int, Any]]:
    return ((index, layer) for index, layer in enumerate(cache.layers) if _is_covered(layer))


def _growing_layers(cache: Any) -> Iterator[tuple[int, Any]]:
    return ((index, layer) for index, layer in _covered_layers(cache) if type(layer).__name__ in _APPENDING)


def _length(layer: Any) -> int:
    """Positions put in, of a layer that counts them on the host."""
    return int(layer.get_seq_length())


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """What the agent makes here is changed later, inside and outside of inference mode, and never has a gradient."""
    with torch.inference_mode(False), torch.no_grad():
        yield


# Tokens


def _around_prepare_inputs(
    call: Callable[..., Any], model: Any, /, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    inputs = call(input_ids, *args, **kwargs)
    if not _watching.part.on:
        return inputs
    with _watching.part, _apart():
        _expect(_watching, inputs, input_ids)
    return inputs


def _expect(watching: _Watching, inputs: Any, input_ids: torch.Tensor) -> None:
    new = inputs.get("input_ids")
    cache = next((inputs[name] for name in ("cache", "past_key_values") if inputs.get(name) is not None), None)
    if cache is None or not hasattr(cache, "layers") or not all(map(_is_tokens, (new, input_ids))):
        return
    watched = watching.of_cache.get(cache)
    computed = input_ids.shape[1] - new.shape[1]
    if watched is None:
        if computed:
            return
        # A new one: its tokens are known from the first on.
        watched = watching.open(cache)
    if watched is not None and watched.length == computed and new.shape[0] == input_ids.shape[0]:
        watched.cache.expect(input_ids, computed)


def _is_tokens(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.dim() == 2 and tensor.device.type in ("cpu", "cuda")
