"""The case language: how a case is written, read and checked, before anything runs.

A case is a JSON object; a file of them is JSON Lines, or one object on as many lines as it likes::

    {"id": "...", "source": "...", "note": "...", "pool": {...}, "ops": [...], "expect": [...]}

``source`` (where the fault was seen) and ``note`` are free text and optional. ``pool`` is optional, and so is every
field of it: ``blocks`` 8, ``block_size`` 4, ``layers`` 2, ``kv_heads`` 1 (of each rank), ``head_dim`` 8, ``dtype``
"float32" (or float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8), ``null_block`` 0 (or null), ``window`` null,
``ranks`` 1.

Operations, with optional fields in brackets. A *fault* is legal: it is what the canary has to see.

``request`` req, prompt, [namespace {lora, salt, mm}]
    A request arrives. A name may come back once its request has been freed.
``alloc`` req, blocks / ``share`` req, blocks
    The allocator hands out blocks as new / adds a reference to blocks that hold a prefix; both append them to the
    block table. ``share`` makes the computed length grow. Allocating a block that is held is a fault. Sharing the null
    block takes no reference: it holds a place that a sliding window does not read.
``map`` req, index, block
    Fault: an entry of the block table changes, or one is added at its end. Any number will do, also one outside the
    pool.
``free`` req or blocks, [cached false]
    With ``req`` the allocator takes back what it has handed to the request, and its block table is empty; ``map`` has
    no part in this. With ``blocks`` one reference to each; tables stay, and a later ``free`` of the request
    gives the same blocks back again, except for those that were behind its sliding window.
``forward`` batch [{req, tokens, [start], [positions], [slots], [drop]}], [pad], [pad_value "finite"]
    One step. Overriding ``positions`` leaves the slots as computed and the other way round. A slot outside the pool is
    not written to; -1 is a write that is skipped; other negative slots wrap around, as tensor indices do. ``drop``
    names positions from ``start`` on. An empty batch is a step of padding alone.
``replay_write`` of, req
    Fault: the bytes that this row of an earlier forward wrote are written again.
``poke`` block, offset, layer, part, xor [[byte, mask], ...] or value "nan" / "zero", [rank: all]
    Fault: bytes of one payload change; ``value`` fills all of it.
``copy_block`` from, to, [fraction 1]
    The engine copies a block, layer by layer, K before V; with a fraction below 1 only the first part of those bytes
    arrives, which is a fault.
``store_begin`` key, blocks / ``store_end`` key, blocks
    A copy to another tier. A finished key may be stored anew.
``load`` key, req, blocks, [layers: all], [rank: all]
    The copy back, of all stored blocks or of the first ones. Fewer layers or ranks are a fault. A rank that did
    not load learns of no load.
``index`` key_tokens, block
    A claim of the prefix index, in the namespace of the request that the block was last handed to.
``rollback`` req, to / ``epoch`` / ``sweep``
    Rejected drafts / new weights / a patrol.

Several layer groups: ``pool.groups`` ``[{"layers": [0, 2], "window": null}, {"layers": [1], "window": 4}]`` takes the
place of ``pool.window``; each layer is in one group. Each group has a block table of its own for each request, and
``blocks`` blocks of its own memory. Operations that name blocks, and ``forward`` for ``slots``, ``drop`` and ``pad``,
take ``group``, by default 0; ``free`` with ``req`` empties the tables of all groups. The computed length follows
group 0.

``expect`` is a list of {kind, from, by, [slots], [req]}: a report of (one of) the kinds must appear during operations
``from`` to ``by``, and none of them earlier; each of ``slots`` must be named by such a report, and ``req`` by it as
well. An empty list wants no report at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from kvcanary_agent.canary import Kind

from . import operations as ops
from .dtypes import DTYPES
from .engine_state import EngineState, SenselessError

# Token ids, slots and block numbers are 32-bit integers in engines and in records.
_INT32_MAX = 2**31 - 1
# A case is a small thing; more is a slip of the pen and would only exhaust the machine.
_MAX_POOL_BYTES = 1 << 30

_T = TypeVar("_T")
_Parser = Callable[[object, str], _T]


class CaseError(ValueError):
    """A case that is malformed.

    Attributes:
        file: The file it is in, ``line`` its line there, from 1.
        field: The path of the field, such as ``ops[3].blocks[0]``; ``""`` for the case as a whole.
    """

    def __init__(self, file: str, line: int, field: str, message: str) -> None:
        self.file, self.line, self.field = file, line, field
        super().__init__(f"{file}:{line}: {field + ': ' if field else ''}{message}")


def read_cases(text: str, file: str) -> Iterator[ops.Case | CaseError]:
    """The cases of a file's text, in its order, an error in place of each that is malformed."""
    documents = [(1, text)]
    if not _is_one_document(text):
        documents = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    line_of_id: dict[str, int] = {}
    for line, document in documents:
        case = _case_or_error(document, file, line)
        if isinstance(case, ops.Case):
            namesake = line_of_id.setdefault(case.id, line)
            if namesake != line:
                case = CaseError(file, line, "id", f"expected an id of its own, found that of line {namesake}")
        yield case


def _case_or_error(document: str, file: str, line: int) -> ops.Case | CaseError:
    try:
        return parse_case(document, file, line)
    except CaseError as error:
        return error


def parse_case(document: str, file: str, line: int) -> ops.Case:
    """Read one case and check that it makes sense from its first to its last operation.

    Raises:
        CaseError: If it does not; the message names file, line, field, what was expected and what was found.
    """
    try:
        value = json.loads(document, object_pairs_hook=_object_without_duplicates, parse_constant=_no_constant)
        case = _case(value)
        _check_story(case)
    except json.JSONDecodeError as error:
        raise CaseError(
            file, line + error.lineno - 1, "", f"expected JSON, found {error.msg} at {error.colno}"
        ) from None
    except RecursionError:
        raise CaseError(file, line, "", "expected a case, found JSON nested too deeply") from None
    except _WrongError as error:
        raise CaseError(file, line, error.path, error.message) from None
    return case


def _is_one_document(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _WrongError(Exception):
    def __init__(self, path: str, expected: str, found: object = None, *, message: str = "") -> None:
        self.path = path
        self.message = message or f"expected {expected}, found {_shown(found)}"
        super().__init__(self.message)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _WrongError(name, "", message="expected one value, found the field twice in one object")
    return dict(pairs)


def _no_constant(name: str) -> object:
    raise _WrongError("", "", message=f"expected JSON, found {name}, which JSON has not")


# Values


def _integer(low: int, high: int) -> _Parser[int]:
    def parse(value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _WrongError(path, f"an integer from {low} to {high}" if high < _INT32_MAX else _at_least(low), value)
        return value

    return parse


def _at_least(low: int) -> str:
    return "a 32-bit integer" if low < -_INT32_MAX else f"a 32-bit integer of at least {low}"


def _fraction(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise _WrongError(path, "a number from 0 to 1", value)
    return value


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _WrongError(path, "a string", value)
    return value


def _name(value: object, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise _WrongError(path, "a string that is not empty", value)
    return value


def _boolean(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise _WrongError(path, "true or false", value)
    return value


def _one_of(*choices: str) -> _Parser[str]:
    def parse(value: object, path: str) -> str:
        if value not in choices:
            raise _WrongError(path, f"one of {', '.join(choices)}", value)
        return value

    return parse


def _or_null(parse: _Parser[_T]) -> _Parser[_T | None]:
    return lambda value, path: None if value is None else parse(value, path)


def _list_of(parse: _Parser[_T], *, at_least: int = 0) -> _Parser[tuple[_T, ...]]:
    def parse_list(value: object, path: str) -> tuple[_T, ...]:
        if not isinstance(value, list) or len(value) < at_least:
            raise _WrongError(path, f"a list of at least {at_least}" if at_least else "a list", value)
        return tuple(parse(item, f"{path}[{index}]") for index, item in enumerate(value))

    return parse_list


_token = _integer(0, _INT32_MAX)
_any_int32 = _integer(-_INT32_MAX - 1, _INT32_MAX)
_required: Any = object()


class _Fields:
    """The fields of one JSON object, each to be taken once; what is left at the end is unknown."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise _WrongError(path, "an object", value)
        self.path = path
        self._left: dict[str, object] = dict(value)

    def path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, parse: _Parser[_T], default: Any = _required) -> _T:
        if name in self._left:
            return parse(self._left.pop(name), self.path_of(name))
        if default is _required:
            raise _WrongError(self.path_of(name), "", message="expected this field, found nothing")
        return cast(_T, default)

    def finish(self) -> None:
        for name in self._left:
            raise _WrongError(self.path_of(name), "", message="expected no such field")


# A case


def _case(value: object) -> ops.Case:
    fields = _Fields(value, "")
    identity = fields.take("id", _name)
    fields.take("source", _text, "")
    fields.take("note", _text, "")
    geometry = fields.take("pool", _geometry, _geometry({}, "pool"))
    reader = _Operations(geometry)
    operations = fields.take("ops", _list_of(reader.operation))
    reader.num_operations = len(operations)
    expectations = fields.take("expect", _list_of(reader.expectation))
    fields.finish()
    return ops.Case(id=identity, geometry=geometry, operations=operations, expectations=expectations)


def _geometry(value: object, path: str) -> ops.Geometry:
    fields = _Fields(value, path)
    count = _integer(1, _INT32_MAX)
    blocks = fields.take("blocks", count, 8)
    layers = fields.take("layers", _integer(1, 4096), 2)
    grouped = "groups" in fields
    window = fields.take("window", _or_null(count), None)
    if grouped and window is not None:
        raise _WrongError(fields.path_of("window"), "null beside groups, which have windows of their own", window)
    whole = (ops.LayerGroup(layers=tuple(range(layers)), window=window),)
    geometry = ops.Geometry(
        blocks=blocks,
        block_size=fields.take("block_size", count, 4),
        kv_heads=fields.take("kv_heads", count, 1),
        head_dim=fields.take("head_dim", count, 8),
        dtype=fields.take("dtype", _one_of(*DTYPES), "float32"),
        null_block=fields.take("null_block", _or_null(_integer(0, blocks - 1)), 0),
        ranks=fields.take("ranks", count, 1),
        groups=fields.take("groups", _list_of(_group(layers), at_least=1), whole),
    )
    fields.finish()
    grouped_layers = sorted(layer for group in geometry.groups for layer in group.layers)
    if grouped_layers != list(range(layers)):
        raise _WrongError(fields.path_of("groups"), f"each of {layers} layers in one group", grouped_layers)
    if geometry.num_bytes > _MAX_POOL_BYTES:
        raise _WrongError(path, f"a pool of at most {_MAX_POOL_BYTES} bytes", geometry.num_bytes)
    return geometry


def _group(layers: int) -> _Parser[ops.LayerGroup]:
    def parse(value: object, path: str) -> ops.LayerGroup:
        fields = _Fields(value, path)
        group = ops.LayerGroup(
            layers=fields.take("layers", _list_of(_integer(0, layers - 1), at_least=1)),
            window=fields.take("window", _or_null(_integer(1, _INT32_MAX)), None),
        )
        fields.finish()
        return group

    return parse


def _namespace(value: object, path: str) -> str | None:
    """The namespace as the opaque string that the canary gets; None if nothing in it is set."""
    fields = _Fields(value, path)
    parts = {name: fields.take(name, _or_null(_namespace_part), None) for name in ("lora", "salt", "mm")}
    fields.finish()
    given = {name: part for name, part in parts.items() if part is not None}
    return json.dumps(given) if given else None


def _namespace_part(value: object, path: str) -> object:
    if isinstance(value, list):
        return [_namespace_part(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _WrongError(path, "a string, an integer or a list of them", value)
    return value


class _Operations:
    """Reads the operations and expectations of a case with one geometry.

    Attributes:
        num_operations: How many operations there are, once they have been read.
    """

    def __init__(self, geometry: ops.Geometry) -> None:
        self.num_operations = 0
        self._geometry = geometry
        self._block = _integer(0, geometry.blocks - 1)
        self._blocks = _list_of(self._block, at_least=1)
        self._group = _integer(0, len(geometry.groups) - 1)
        self._rank = _or_null(_integer(0, geometry.ranks - 1))
        self._layer = _integer(0, sum(len(group.layers) for group in geometry.groups) - 1)
        self._readers: dict[str, Callable[[_Fields], ops.Operation]] = {
            "request": self._request,
            "alloc": lambda f: ops.Alloc(req=f.take("req", _name), blocks=self._take_blocks(f), group=self._in(f)),
            "share": lambda f: ops.Share(req=f.take("req", _name), blocks=self._take_blocks(f), group=self._in(f)),
            "map": self._map,
            "free": self._free,
            "forward": self._forward,
            "replay_write": self._replay_write,
            "poke": self._poke,
            "copy_block": self._copy_block,
            "store_begin": lambda f: ops.StoreBegin(
                key=f.take("key", _name), blocks=self._take_distinct_blocks(f), group=self._in(f)
            ),
            "store_end": lambda f: ops.StoreEnd(
                key=f.take("key", _name), blocks=self._take_distinct_blocks(f), group=self._in(f)
            ),
            "load": self._load,
            "index": self._index,
            "rollback": lambda f: ops.Rollback(req=f.take("req", _name), to=f.take("to", _integer(0, _INT32_MAX))),
            "epoch": lambda f: ops.Epoch(),
            "sweep": lambda f: ops.Sweep(),
        }

    def operation(self, value: object, path: str) -> ops.Operation:
        fields = _Fields(value, path)
        operation = self._readers[fields.take("op", _one_of(*self._readers))](fields)
        fields.finish()
        return operation

    def expectation(self, value: object, path: str) -> ops.Expectation:
        fields = _Fields(value, path)
        index = _integer(0, self.num_operations - 1)
        expectation = ops.Expectation(
            kinds=fields.take("kind", _kinds),
            first=fields.take("from", index),
            last=fields.take("by", index),
            slots=frozenset(fields.take("slots", _list_of(_integer(0, self._geometry.num_slots - 1)), ())),
            req=fields.take("req", _or_null(_name), None),
        )
        fields.finish()
        if expectation.last < expectation.first:
            raise _WrongError(f"{path}.by", f"at least from, which is {expectation.first}", expectation.last)
        return expectation

    def _in(self, fields: _Fields) -> int:
        return fields.take("group", self._group, 0)

    def _take_blocks(self, fields: _Fields) -> tuple[int, ...]:
        return fields.take("blocks", self._blocks)

    def _take_distinct_blocks(self, fields: _Fields) -> tuple[int, ...]:
        blocks = self._take_blocks(fields)
        if len(set(blocks)) < len(blocks):
            raise _WrongError(fields.path_of("blocks"), "different blocks", list(blocks))
        return blocks

    def _request(self, fields: _Fields) -> ops.Request:
        return ops.Request(
            req=fields.take("req", _name),
            prompt=fields.take("prompt", _list_of(_token)),
            namespace=fields.take("namespace", _or_null(_namespace), None),
        )

    def _map(self, fields: _Fields) -> ops.Map:
        return ops.Map(
            req=fields.take("req", _name),
            index=fields.take("index", _integer(0, _INT32_MAX)),
            block=fields.take("block", _any_int32),
            group=self._in(fields),
        )

    def _free(self, fields: _Fields) -> ops.FreeRequest | ops.FreeBlocks:
        if ("req" in fields) == ("blocks" in fields):
            raise _WrongError(fields.path, "", message="expected one of req and blocks")
        cached = fields.take("cached", _boolean, False)
        if "req" in fields:
            return ops.FreeRequest(req=fields.take("req", _name), cached=cached)
        return ops.FreeBlocks(blocks=self._take_blocks(fields), cached=cached, group=self._in(fields))

    def _forward(self, fields: _Fields) -> ops.Forward:
        forward = ops.Forward(
            batch=fields.take("batch", _list_of(self._row)),
            pad=fields.take("pad", _list_of(_any_int32), ()),
            pad_value=cast(Any, fields.take("pad_value", _one_of("finite", "nan"), "finite")),
            group=self._in(fields),
        )
        if forward.pad_value == "nan":
            self._need_nan(fields.path_of("pad_value"))
        return forward

    def _row(self, value: object, path: str) -> ops.Row:
        fields = _Fields(value, path)
        position = _integer(0, _INT32_MAX)
        row = ops.Row(
            req=fields.take("req", _name),
            tokens=fields.take("tokens", _list_of(_token, at_least=1)),
            start=fields.take("start", _or_null(position), None),
            positions=fields.take("positions", _or_null(_list_of(position)), None),
            slots=fields.take("slots", _or_null(_list_of(_any_int32)), None),
            drop=frozenset(fields.take("drop", _list_of(position), ())),
        )
        fields.finish()
        return row

    def _replay_write(self, fields: _Fields) -> ops.ReplayWrite:
        return ops.ReplayWrite(of=fields.take("of", _integer(0, _INT32_MAX)), req=fields.take("req", _name))

    def _poke(self, fields: _Fields) -> ops.Poke:
        if ("xor" in fields) == ("value" in fields):
            raise _WrongError(fields.path, "", message="expected one of xor and value")
        change = _list_of(_xor_change(self._geometry.payload_bytes), at_least=1)
        poke = ops.Poke(
            block=fields.take("block", self._block),
            offset=fields.take("offset", _integer(0, self._geometry.block_size - 1)),
            layer=fields.take("layer", self._layer),
            part=cast(Any, fields.take("part", _one_of(*ops.PARTS))),
            xor=fields.take("xor", change, ()),
            value=cast(Any, fields.take("value", _one_of("nan", "zero"), None)),
            rank=fields.take("rank", self._rank, None),
        )
        if poke.value == "nan":
            self._need_nan(fields.path_of("value"))
        return poke

    def _need_nan(self, path: str) -> None:
        if self._geometry.format.nan is None:
            raise _WrongError(path, f"something that {self._geometry.dtype} can hold", "nan")

    def _copy_block(self, fields: _Fields) -> ops.CopyBlock:
        return ops.CopyBlock(
            source=fields.take("from", self._block),
            destination=fields.take("to", self._block),
            fraction=fields.take("fraction", _fraction, 1),
            group=self._in(fields),
        )

    def _load(self, fields: _Fields) -> ops.Load:
        load = ops.Load(
            key=fields.take("key", _name),
            req=fields.take("req", _name),
            blocks=self._take_distinct_blocks(fields),
            layers=fields.take("layers", _or_null(_list_of(self._layer)), None),
            rank=fields.take("rank", self._rank, None),
            group=self._in(fields),
        )
        own = self._geometry.groups[load.group].layers
        for index, layer in enumerate(load.layers or ()):
            if layer not in own:
                raise _WrongError(fields.path_of(f"layers[{index}]"), f"a layer of group {load.group}", layer)
        return load

    def _index(self, fields: _Fields) -> ops.Index:
        index = ops.Index(
            key_tokens=fields.take("key_tokens", _list_of(_token, at_least=1)),
            block=fields.take("block", self._block),
            group=self._in(fields),
        )
        size = self._geometry.block_size
        if len(index.key_tokens) % size:
            raise _WrongError(
                fields.path_of("key_tokens"), f"whole blocks of {size} tokens each", list(index.key_tokens)
            )
        return index


def _xor_change(payload_bytes: int) -> _Parser[tuple[int, int]]:
    byte, mask = _integer(0, payload_bytes - 1), _integer(0, 255)

    def parse(value: object, path: str) -> tuple[int, int]:
        if not isinstance(value, list) or len(value) != 2:
            raise _WrongError(path, "a pair [byte, mask]", value)
        return byte(value[0], f"{path}[0]"), mask(value[1], f"{path}[1]")

    return parse


def _kinds(value: object, path: str) -> frozenset[Kind]:
    kind = _one_of(*Kind)
    if isinstance(value, list):
        return frozenset(map(Kind, _list_of(kind, at_least=1)(value, path)))
    return frozenset({Kind(kind(value, path))})


def _check_story(case: ops.Case) -> None:
    """Follow the case on the engine's host side, where an operation that makes no sense shows."""
    state = EngineState(case.geometry)
    arrived = set()
    for index, operation in enumerate(case.operations):
        try:
            state.apply(index, operation)
        except SenselessError as error:
            path = f"ops[{index}]" + (f".{error.field}" if error.field else "")
            raise _WrongError(path, "", message=f"expected {error}") from None
        if isinstance(operation, ops.Request):
            arrived.add(operation.req)
    for index, expectation in enumerate(case.expectations):
        if expectation.req is not None and expectation.req not in arrived:
            raise _WrongError(f"expect[{index}].req", "a request of this case", expectation.req)
