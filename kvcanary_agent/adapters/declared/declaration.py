"""The table of a declared adapter, checked: every wrong key and value is an error that says where and what instead.

Imports nothing of the engine and no torch: `run` checks a table before the server starts.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcanary_agent.adapters.api.words import WordsError, axes_of
from kvcanary_agent.adapters.declared.paths import Path, PathError, Root

Constant = int | bool
Value = Path | Constant | tuple["Path | Constant", ...]

_CLASS = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_PLACE = re.compile(rf"(?:({_CLASS}):)?({_CLASS})")
_BEFORE: tuple[Root, ...] = ("self", "args", "pool", "remembered", "module")
_AFTER: tuple[Root, ...] = (*_BEFORE, "result")

STEP_KEYS = (
    "requests",
    "block_table",
    "table_rows",
    "token_ids",
    "write_slots",
    "positions",
    "prefix_lens",
    "seq_lens",
    "query_lens",
    "query_offsets",
    "known_tokens",
    "namespaces",
)
_BUFFERS = {"keys": "k", "values": "v", "kv": "kv", "key_scales": "k_scale", "value_scales": "v_scale"}
_EVENT_KEYS: Mapping[str, tuple[str, ...]] = {
    "allocated": ("blocks", "request", "added", "shared_tokens"),
    "shared": ("blocks", "request"),
    "freed": ("blocks", "request", "cached"),
    "copied": ("source", "destination"),
}


class DeclarationError(ValueError):
    """A table that cannot be used; the message names the key, the value and what is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A method of a class of a module."""

    module: str
    cls: str
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTable:
    """``[pool]``; `buffers` and `layouts` are by part: k, v, kv, k_scale, v_scale."""

    opened_by: tuple[Place, ...]
    closed_by: tuple[Place, ...]
    buffers: Mapping[str, Path]
    layouts: Mapping[str, tuple[str, ...]]
    block_size: Path | int | None
    null_block: Path | int | None
    window: Path | int | None
    used_by: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTable:
    """``[[step]]``, ``[[event]]``, ``[[remember]]`` or ``[[write]]``: what is read from a call of `place`.

    label: where it stands in the table, for messages.
    kind: of an event.
    """

    label: str
    place: Place
    values: Mapping[str, Value]
    kind: str = ""
    before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A whole table."""

    engine: str
    pool: PoolTable
    steps: tuple[CallTable, ...] = ()
    events: tuple[CallTable, ...] = ()
    remembered: tuple[CallTable, ...] = ()
    writes: tuple[CallTable, ...] = ()

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> "Declaration":
        """Check a table as TOML gives it. Raises `DeclarationError` at the first thing that is wrong."""
        _known(table, "the table", ("engine", "module", "pool", "step", "event", "remember", "write"))
        engine = _text(table, "engine", "the name of the engine in reports", "")
        module = _text(table, "module", "the module that defines its classes", "")
        if not re.fullmatch(_CLASS, module):
            raise DeclarationError(f"module = {module!r} is not the name of a module, such as my_engine.runner")
        pool = _pool(_table(table, "pool"), module)
        steps = tuple(_step(entry, label, module) for label, entry in _tables(table, "step"))
        events = tuple(_event(entry, label, module) for label, entry in _tables(table, "event"))
        writes = tuple(_write(entry, label, module) for label, entry in _tables(table, "write"))
        remembered = tuple(_remember(entry, label, module) for label, entry in _tables(table, "remember"))
        if steps and writes:
            raise DeclarationError("there are both [[step]] and [[write]]; steps say more: remove the writes")
        if not steps and not writes:
            raise DeclarationError(
                "there is neither [[step]] (the call that runs the model) nor [[write]] (a method of the pool that "
                "writes): nothing would be recorded; add one of them"
            )
        _check_remembered(remembered, (*steps, *events))
        return cls(
            engine=engine,
            pool=pool,
            steps=steps,
            events=events,
            remembered=remembered,
            writes=writes,
        )


def _pool(table: Mapping[str, Any], module: str) -> PoolTable:
    where = "[pool] "
    known = (*_BUFFERS, "class", "opened_by", "closed_by", "layout", "scale_layout", "value_layout")
    _known(table, "[pool]", (*known, "block_size", "null_block", "window", "used_by"))
    holder = _text(table, "class", "the class whose object leads to the buffers", where)
    found = _PLACE.fullmatch(holder)
    if not found:
        raise DeclarationError(f"{where}class = {holder!r} is neither Class nor module:Class")
    opened_by = tuple(
        Place(module=found[1] or module, cls=found[2], method=name)
        for name in _names(table, "opened_by", where, ("__init__",))
    )
    closed_by = tuple(
        Place(module=found[1] or module, cls=found[2], method=name) for name in _names(table, "closed_by", where, ())
    )
    buffers = {part: _path(table, key, where, ("self", "module")) for key, part in _BUFFERS.items() if key in table}
    if not {"k", "v", "kv"} & set(buffers):
        raise DeclarationError(f"{where}has none of keys, values and kv; add the path of the buffers: keys = 'self.k'")
    layouts = {part: _layout(table, part, where) for part in buffers}
    return PoolTable(
        opened_by=opened_by,
        closed_by=closed_by,
        buffers=buffers,
        layouts=layouts,
        block_size=_whole(table, "block_size", where),
        null_block=_whole(table, "null_block", where),
        window=_whole(table, "window", where),
        used_by=_paths(table, "used_by", where, ("self", "module")),
    )


def _layout(table: Mapping[str, Any], part: str, where: str) -> tuple[str, ...]:
    key = "scale_layout" if part in ("k_scale", "v_scale") else "layout"
    if part == "v" and "value_layout" in table:
        key = "value_layout"
    words = _text(table, key, "the axes of the buffers, for example 'blocks tokens heads dim'", where)
    try:
        return axes_of(words, splits_kv=part == "kv")
    except WordsError as error:
        raise DeclarationError(f"{where}{key} = {words!r}: {error}") from None


def _step(table: Mapping[str, Any], label: str, module: str) -> CallTable:
    where = f"{label} "
    _known(table, label, ("method", "unless", *STEP_KEYS))
    values = {key: _value(table, key, where, _BEFORE) for key in ("unless", *STEP_KEYS) if key in table}
    for key in ("requests", "block_table"):
        if key not in values:
            raise DeclarationError(f"{where}has no {key}; add the path of it, for example {key} = 'args.{key}'")
    if not {"token_ids", "write_slots", "positions"} & set(values):
        raise DeclarationError(
            f"{where}has none of token_ids, write_slots and positions: nothing says how many tokens are new; add one"
        )
    return CallTable(label=label, place=_method(table, where, module), values=values)


def _event(table: Mapping[str, Any], label: str, module: str) -> CallTable:
    where = f"{label} "
    kind = _text(table, "kind", f"one of {', '.join(_EVENT_KEYS)}", where)
    if kind not in _EVENT_KEYS:
        raise DeclarationError(f"{where}kind = {kind!r}; accepted are {', '.join(_EVENT_KEYS)}")
    _known(table, label, ("kind", "method", "when", *_EVENT_KEYS[kind]))
    when = table.get("when", "before" if kind == "freed" else "after")
    if when not in ("before", "after"):
        raise DeclarationError(f"{where}when = {when!r}; accepted are 'before' and 'after'")
    before = when == "before"
    values = {
        key: _value(table, key, where, _BEFORE if before else _AFTER) for key in _EVENT_KEYS[kind] if key in table
    }
    for key in ("source", "destination") if kind == "copied" else ("blocks",):
        if key not in values:
            raise DeclarationError(f"{where}has no {key}; add the path of it")
    for key in ("added", "cached"):
        if key == "added" and not isinstance(values.get(key, False), bool):
            raise DeclarationError(f"{where}added = {table[key]!r}; accepted are true and false")
    if values.get("added"):
        if before:
            raise DeclarationError(f"{where}added compares the list before and after the call: when must be 'after'")
        if isinstance(values["blocks"], Path) and values["blocks"].root == "result":
            raise DeclarationError(f"{where}added needs a list that is there before the call, not its result")
    return CallTable(label=label, place=_method(table, where, module), values=values, kind=kind, before=before)


def _remember(table: Mapping[str, Any], label: str, module: str) -> CallTable:
    where = f"{label} "
    _known(table, label, ("name", "method", "value"))
    name = _text(table, "name", "the name that remembered.NAME asks for", where)
    if "value" not in table:
        raise DeclarationError(f"{where}has no value; add the path of what is to be remembered")
    value = _path(table, "value", where, ("self", "args", "pool", "module", "result"))
    return CallTable(
        label=label,
        place=_method(table, where, module),
        values={"value": value},
        kind=name,
        before=value.root != "result",
    )


def _write(table: Mapping[str, Any], label: str, module: str) -> CallTable:
    where = f"{label} "
    _known(table, label, ("method", "slots", "layer"))
    if "slots" not in table:
        raise DeclarationError(f"{where}has no slots; add the path of the slots that the call writes to")
    values = {
        key: _value(table, key, where, ("self", "args", "pool", "module")) for key in ("slots", "layer") if key in table
    }
    return CallTable(label=label, place=_method(table, where, module), values=values)


def _check_remembered(remembered: Sequence[CallTable], calls: Sequence[CallTable]) -> None:
    names = {entry.kind for entry in remembered}
    for call in calls:
        for key, value in call.values.items():
            for path in paths_in(value):
                if path.root == "remembered" and path.name not in names:
                    raise DeclarationError(
                        f"{call.label} {key} = {path.text!r}: nothing is remembered under that name; add a "
                        f"[[remember]] with name = {path.name!r}"
                    )


def _known(table: Mapping[str, Any], where: str, keys: Sequence[str]) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"accepted are {', '.join(keys)}"
            raise DeclarationError(f"{where} has no key {key!r}; {hint}")


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key)
    if not isinstance(value, Mapping):
        found = "is missing" if value is None else f"is {value!r}"
        raise DeclarationError(f"the table [{key}] {found}; it says which class holds the buffers, and how they lie")
    return value


def _tables(table: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    value = table.get(key, [])
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise DeclarationError(f"{key} = {value!r} is no table; write it as [[{key}]]")
    alone = len(entries) == 1
    return [(f"[[{key}]]" if alone else f"[[{key}]] {number}", entry) for number, entry in enumerate(entries, start=1)]


def _text(table: Mapping[str, Any], key: str, meaning: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        found = f"{where or 'the table '}has no {key}" if value is None else f"{where}{key} = {value!r}"
        raise DeclarationError(f"{found}; it is {meaning}, a string")
    return value


def _names(table: Mapping[str, Any], key: str, where: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = table.get(key, list(default))
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise DeclarationError(f"{where}{key} = {value!r}; accepted is the name of a method of the class, or a list")
    return tuple(names)


def _method(table: Mapping[str, Any], where: str, module: str) -> Place:
    text = _text(table, "method", "the method that is called, Class.method or module:Class.method", where)
    found = _PLACE.fullmatch(text)
    if not found or "." not in found[2]:
        raise DeclarationError(f"{where}method = {text!r} is neither Class.method nor module:Class.method")
    cls, _, method = found[2].rpartition(".")
    return Place(module=found[1] or module, cls=cls, method=method)


def _value(table: Mapping[str, Any], key: str, where: str, roots: tuple[Root, ...]) -> Value:
    value = table[key]
    if isinstance(value, list):
        return tuple(each if isinstance(each, int) else _path({key: each}, key, where, roots) for each in value)
    if isinstance(value, int):
        return value
    return _path(table, key, where, roots)


def paths_in(value: Value) -> tuple[Path, ...]:
    """The paths that a value consists of."""
    values = value if isinstance(value, tuple) else (value,)
    return tuple(each for each in values if isinstance(each, Path))


def _whole(table: Mapping[str, Any], key: str, where: str) -> Path | int | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        return _path(table, key, where, ("self", "module"))
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DeclarationError(f"{where}{key} = {value!r}; accepted is a whole number from 0, or a path to one")
    return value


def _path(table: Mapping[str, Any], key: str, where: str, roots: tuple[Root, ...]) -> Path:
    value = table[key]
    if not isinstance(value, str):
        raise DeclarationError(f"{where}{key} = {value!r} is no path, such as 'self.{key}'")
    try:
        return Path.parse(value, roots)
    except PathError as error:
        raise DeclarationError(f"{where}{key}: {error}") from None


def _paths(table: Mapping[str, Any], key: str, where: str, roots: tuple[Root, ...]) -> tuple[Path, ...]:
    value = table.get(key, [])
    if not isinstance(value, list):
        raise DeclarationError(f"{where}{key} = {value!r} is no list of paths; write ['self.runner']")
    return tuple(_path({key: entry}, key, where, roots) for entry in value)
