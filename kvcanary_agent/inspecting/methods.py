"""Which methods of a module's classes write, allocate, free, and run the model, by their names and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType

_ALLOCATES = ("alloc", "take", "reserve", "acquire", "get_block", "get_new")
_FREES = ("free", "dealloc", "release", "give_back", "return_block", "evict")
_WRITES = ("write", "store", "append", "set_kv", "update", "put", "insert")
_RUNS = ("forward", "run_model", "execute", "decode", "prefill")
_BLOCKS = ("block_table", "blocks", "block_ids", "pages", "page_table", "block_tables", "tables")
_REQUESTS = ("request", "seq", "req", "sequence")
_SLOTS = ("slots", "slot_mapping", "loc", "out_cache_loc")
_LAYERS = ("layer", "layer_id", "layer_idx")
_ARGUMENTS = {
    "requests": ("request_ids", "req_ids", "requests", "seq_ids", "names"),
    "block_table": _BLOCKS,
    "token_ids": ("token_ids", "input_ids", "tokens", "ids"),
    "positions": ("positions", "position_ids"),
    "write_slots": _SLOTS,
    "prefix_lens": ("prefix_lens", "cached_lens", "starts"),
    "seq_lens": ("seq_lens", "context_lens", "lengths", "kv_lens"),  # paged attention counts new tokens into a context
    "query_lens": ("query_lens", "counts", "num_new_tokens"),
    "query_offsets": ("query_offsets", "cu_seqlens", "cu_seqlens_q", "query_start_loc"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A method that may be what a table asks for.

    role: ``step``, ``write``, ``allocated`` or ``freed``.
    method: ``Class.method``.
    arguments: its parameters.
    values: key of the table -> path, with ``?`` for what nothing tells.
    """

    role: str
    method: str
    arguments: tuple[str, ...]
    values: dict[str, str]


def candidates(module: object, pool: type) -> list[Candidate]:
    """What the classes that `module` defines may do to the pool."""
    return [found for cls in _classes(module, pool) for found in _of_class(cls, pool)]


def _classes(module: object, pool: type) -> Iterable[type]:
    own = [value for value in vars(module).values() if isinstance(value, type)]
    return dict.fromkeys([pool, *(cls for cls in own if cls.__module__ == getattr(module, "__name__", None))])


def _of_class(cls: type, pool: type) -> Iterator[Candidate]:
    for name, function in vars(cls).items():
        if not isinstance(function, FunctionType) or name.startswith("_"):
            continue
        arguments = tuple(inspect.signature(function).parameters)[1:]
        method = f"{cls.__qualname__}.{name}"
        slots = _first(arguments, _SLOTS)
        words = name.lower()
        if slots and any(word in words for word in _WRITES):
            values = {"slots": f"args.{slots}"}
            layer = _first(arguments, _LAYERS)
            yield Candidate(
                role="write",
                method=method,
                arguments=arguments,
                values=values | ({"layer": f"args.{layer}"} if layer else {}),
            )
        elif any(word in words for word in _FREES):
            yield Candidate(role="freed", method=method, arguments=arguments, values=_event(arguments, "args.?"))
        elif any(word in words for word in _ALLOCATES):
            yield Candidate(role="allocated", method=method, arguments=arguments, values=_event(arguments, "result"))
        elif any(word in words for word in _RUNS) and cls is not pool and arguments:
            yield Candidate(role="step", method=method, arguments=arguments, values=_step(arguments))


def _event(arguments: tuple[str, ...], otherwise: str) -> dict[str, str]:
    blocks, request = _first(arguments, _BLOCKS), _first(arguments, _REQUESTS)
    values = {"blocks": f"args.{blocks}" if blocks else otherwise}
    if request:
        values = {"blocks": f"args.{request}.?"} if not blocks else values
        values["request"] = f"args.{request}.?"
    return values


def _step(arguments: tuple[str, ...]) -> dict[str, str]:
    values = {}
    for key, names in _ARGUMENTS.items():
        found = _first(arguments, names)
        if found:
            values[key] = f"args.{found}"
    holder = arguments[0]
    for key in ("requests", "block_table", "token_ids"):
        values.setdefault(key, f"args.{holder}.?")
    return values


def _first(arguments: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in arguments), None)
