"""Reading cases: defaults, and what a malformed case is told."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_agent.faults.language import CaseError, parse_case, read_cases
from kvcanary_agent.faults.operations import Case, FreeRequest, Load, Request

REQUEST = {"op": "request", "req": "A", "prompt": [1, 2, 3]}
ALLOC = {"op": "alloc", "req": "A", "blocks": [1]}
FORWARD = {"op": "forward", "batch": [{"req": "A", "tokens": [1, 2, 3]}]}
COPY = {"op": "copy_block", "from": 1, "to": 2}
STORED = [
    {"op": "store_begin", "key": "k", "blocks": [1]},
    {"op": "store_end", "key": "k", "blocks": [1]},
]


def document(ops: list[Any], **more: Any) -> str:
    return json.dumps({"id": "x", "ops": ops, "expect": [], **more})


def forward(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"op": "forward", "batch": [{"req": "A", **row} for row in rows]}


def poke(**fields: Any) -> str:
    return document([{"op": "poke", "block": 1, "offset": 0, "layer": 0, "part": "k", **fields}])


def load(*blocks: int) -> dict[str, Any]:
    return {"op": "load", "key": "k", "req": "A", "blocks": list(blocks)}


def expecting(**fields: Any) -> str:
    return document([REQUEST, ALLOC], expect=[{"kind": "token", "from": 0, "by": 1, **fields}])


def complaint(text: str) -> CaseError:
    with pytest.raises(CaseError) as caught:
        parse_case(text, "cases.jsonl", 7)
    return caught.value


def test_every_field_of_the_pool_has_its_default() -> None:
    geometry = parse_case(document([]), "f", 1).geometry

    assert (geometry.blocks, geometry.block_size, geometry.kv_heads, geometry.head_dim) == (8, 4, 1, 8)
    assert (geometry.dtype, geometry.null_block, geometry.ranks) == ("float32", 0, 1)
    assert [(group.layers, group.window) for group in geometry.groups] == [((0, 1), None)]


def test_optional_fields_of_operations_have_their_defaults() -> None:
    operations = parse_case(document([REQUEST, ALLOC, *STORED, load(1), {"op": "free", "req": "A"}]), "f", 1).operations

    assert operations[0] == Request(req="A", prompt=(1, 2, 3), namespace=None)
    assert operations[4] == Load(key="k", req="A", blocks=(1,), layers=None, rank=None, group=0)
    assert operations[5] == FreeRequest(req="A", cached=False)


def test_a_namespace_with_nothing_in_it_is_none() -> None:
    namespaces: tuple[Any, ...] = ({"lora": None}, {}, {"lora": "x"}, {"salt": "x"})
    requests = [{**REQUEST, "req": str(number), "namespace": namespace} for number, namespace in enumerate(namespaces)]
    parsed = [op.namespace for op in parse_case(document(requests), "f", 1).operations if isinstance(op, Request)]

    assert parsed[:2] == [None, None]
    assert len(set(parsed)) == 3


def test_a_complaint_names_file_line_field_what_was_expected_and_what_was_found() -> None:
    error = complaint(document([REQUEST, {"op": "alloc", "req": "A", "blocks": [3, 8]}]))

    assert (error.file, error.line, error.field) == ("cases.jsonl", 7, "ops[1].blocks[1]")
    assert str(error) == "cases.jsonl:7: ops[1].blocks[1]: expected an integer from 0 to 7, found 8"


# The field that the complaint names, a part of what it says, and the case, by what is wrong.
MALFORMED: dict[str, tuple[str, str, str]] = {
    "not JSON": ("", "expected JSON", '{"id": '),
    "no object": ("", "an object", "[]"),
    "no id": ("id", "found nothing", '{"ops": [], "expect": []}'),
    "an empty id": ("id", "not empty", '{"id": "", "ops": [], "expect": []}'),
    "no operations": ("ops", "found nothing", '{"id": "x", "expect": []}'),
    "no expectations": ("expect", "found nothing", '{"id": "x", "ops": []}'),
    "an unknown field": ("colour", "no such field", document([], colour="red")),
    "a field twice": ("id", "twice", '{"id": "x", "id": "y", "ops": [], "expect": []}'),
    "NaN": ("", "NaN", '{"id": "x", "ops": [NaN], "expect": []}'),
    "an unknown field of the pool": ("pool.block", "no such field", document([], pool={"block": 8})),
    "a pool without blocks": ("pool.blocks", "at least 1", document([], pool={"blocks": 0})),
    "a dtype that is none": ("pool.dtype", "one of float32", document([], pool={"dtype": "float33"})),
    "a null block outside": ("pool.null_block", "from 0 to 7", document([], pool={"null_block": 8})),
    "a window of nothing": ("pool.window", "at least 1", document([], pool={"window": 0})),
    "true for a number": ("pool.layers", "an integer", document([], pool={"layers": True})),
    "a pool that fills the memory": ("pool", "bytes", document([], pool={"blocks": 2**30})),
    "a layer in no group": ("pool.groups", "in one", document([], pool={"groups": [{"layers": [1]}]})),
    "a window beside groups": ("pool.window", "null", document([], pool={"window": 4, "groups": [{"layers": [0, 1]}]})),
    "an unknown operation": ("ops[0].op", "one of request, alloc", document([{"op": "explode"}])),
    "an operation without a name": ("ops[0].op", "found nothing", document([{}])),
    "an unknown field of an operation": ("ops[0].x", "no such field", document([{**REQUEST, "x": 1}])),
    "a token below zero": ("ops[0].prompt[1]", "at least 0", document([{**REQUEST, "prompt": [1, -1]}])),
    "an unknown request": ("ops[0].req", "'A'", document([ALLOC])),
    "a request that comes later": ("ops[0].req", "has arrived", document([ALLOC, REQUEST])),
    "a request twice": ("ops[1].req", "new request", document([REQUEST, REQUEST])),
    "freeing an unknown request": ("ops[0].req", "has arrived", document([{"op": "free", "req": "A"}])),
    "freeing nothing": ("ops[0]", "one of req and blocks", document([{"op": "free"}])),
    "freeing both": ("ops[1]", "one of req", document([REQUEST, {"op": "free", "req": "A", "blocks": [1]}])),
    "no blocks": ("ops[1].blocks", "at least 1", document([REQUEST, {**ALLOC, "blocks": []}])),
    "an unknown group": ("ops[1].group", "from 0 to 0", document([REQUEST, {**ALLOC, "group": 1}])),
    "a gap": ("ops[1].index", "most 0", document([REQUEST, {"op": "map", "req": "A", "index": 1, "block": 1}])),
    "tokens beyond the table": ("ops[1].batch[0].tokens", "position 2", document([REQUEST, FORWARD])),
    "no tokens": ("ops[2].batch[0].tokens", "at least 1", document([REQUEST, ALLOC, forward({"tokens": []})])),
    "a request twice in a batch": (
        "ops[2].batch[1].req",
        "'A' again",
        document([REQUEST, ALLOC, forward({"tokens": [1]}, {"tokens": [2]})]),
    ),
    "slots for other tokens": (
        "ops[2].batch[0].slots",
        "2 tokens",
        document([REQUEST, ALLOC, forward({"tokens": [1, 2], "slots": [4]})]),
    ),
    "dropping what is not written": (
        "ops[2].batch[0].drop",
        "from 0 to 1",
        document([REQUEST, ALLOC, forward({"tokens": [1, 2], "drop": [2]})]),
    ),
    "replaying what is no forward": (
        "ops[1].of",
        "earlier forward",
        document([REQUEST, {"op": "replay_write", "of": 0, "req": "A"}]),
    ),
    "replaying what comes later": (
        "ops[2].of",
        "earlier forward",
        document([REQUEST, ALLOC, {"op": "replay_write", "of": 3, "req": "A"}, FORWARD]),
    ),
    "a poke beyond the payload": ("ops[0].xor[0][0]", "from 0 to 31", poke(xor=[[32, 1]])),
    "a poke beyond the block": ("ops[0].offset", "from 0 to 3", poke(offset=4, value="zero")),
    "a poke of nothing": ("ops[0]", "one of xor and value", poke()),
    "a poke of an unknown part": ("ops[0].part", "one of k, v", poke(part="q", value="zero")),
    "NaN in integers": (
        "ops[0].pad_value",
        "int8",
        document([{"op": "forward", "batch": [], "pad": [0], "pad_value": "nan"}], pool={"dtype": "int8"}),
    ),
    "more than a copy": ("ops[0].fraction", "0 to 1", document([{**COPY, "fraction": 1.5}])),
    "a store without a beginning": ("ops[0].key", "store_begin", document([STORED[1]])),
    "two stores of a key": ("ops[1].key", "not being stored", document([STORED[0], STORED[0]])),
    "another end of a store": ("ops[1].blocks", "[1]", document([STORED[0], {**STORED[1], "blocks": [2]}])),
    "a load before the end of its store": ("ops[2].key", "store_end", document([REQUEST, STORED[0], load(1)])),
    "a load of more than was stored": ("ops[3].blocks", "1 stored", document([REQUEST, *STORED, load(1, 2)])),
    "half a block": ("ops[0].key_tokens", "of 4", document([{"op": "index", "key_tokens": [1], "block": 1}])),
    "a rollback ahead": ("ops[1].to", "at most 0", document([REQUEST, {"op": "rollback", "req": "A", "to": 1}])),
    "an unknown kind": ("expect[0].kind", "one of", expecting(kind="gremlin")),
    "an unknown kind among others": ("expect[0].kind[1]", "one of", expecting(kind=["token", 3])),
    "an operation out of range": ("expect[0].by", "from 0 to 1", expecting(by=2)),
    "an end before its beginning": ("expect[0].by", "at least", expecting(**{"from": 1, "by": 0})),
    "a slot outside the pool": ("expect[0].slots[0]", "from 0 to 31", expecting(slots=[32])),
    "a stranger": ("expect[0].req", "of this case", expecting(req="Z")),
}


@pytest.mark.parametrize(("field", "said", "text"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_case_is_refused_with_its_field(field: str, said: str, text: str) -> None:
    error = complaint(text)

    assert error.field == field
    assert said in str(error)


FAULTS: dict[str, list[Any]] = {
    "a block handed out twice": [ALLOC, ALLOC],
    "a block freed twice": [ALLOC, {"op": "free", "blocks": [1]}, {"op": "free", "blocks": [1]}],
    "a hit on a block that nobody wrote": [{"op": "share", "req": "A", "blocks": [5]}],
    "a row that leaves the pool": [ALLOC, {"op": "map", "req": "A", "index": 0, "block": -9}],
    "a write that leaves the pool": [ALLOC, forward({"tokens": [1], "slots": [999]})],
    "a start beyond what is computed": [ALLOC, forward({"tokens": [1], "start": 3})],
    "a load into a block of another": [*STORED, load(6)],
}


@pytest.mark.parametrize("ops", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_no_malformed_case(ops: list[Any]) -> None:
    assert len(parse_case(document([REQUEST, *ops]), "f", 1).operations) == len(ops) + 1


def test_a_request_may_come_back_under_its_name_once_it_was_freed() -> None:
    parse_case(document([REQUEST, ALLOC, {"op": "free", "req": "A"}, REQUEST]), "f", 1)


def test_lines_are_counted_and_empty_ones_skipped() -> None:
    text = "\n" + document([]) + "\n\n" + '{"id": "y"}' + "\r\n"
    good, bad = read_cases(text, "f")

    assert isinstance(good, Case)
    assert isinstance(bad, CaseError)
    assert bad.line == 4


def test_a_file_may_be_one_case_on_many_lines() -> None:
    (case,) = read_cases(json.dumps(json.loads(document([REQUEST])), indent=2), "f")

    assert isinstance(case, Case)


def test_an_id_is_used_once_in_a_file() -> None:
    _, second = read_cases(document([]) + "\n" + document([]), "f")

    assert isinstance(second, CaseError)
    assert (second.line, second.field) == (2, "id")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
OPERATIONS: list[dict[str, Any]] = [
    REQUEST,
    ALLOC,
    FORWARD,
    *STORED,
    {**load(1), "layers": [0], "rank": 0},
    {"op": "poke", "block": 1, "offset": 0, "layer": 0, "part": "k", "xor": [[0, 1]]},
    {"op": "index", "key_tokens": [1, 2, 3, 4], "block": 1},
    {"op": "rollback", "req": "A", "to": 2},
    {**COPY, "fraction": 0.5},
]


@given(data=st.data(), value=json_values)
def test_whatever_stands_in_a_field_is_a_case_or_a_complaint_and_nothing_else(data: st.DataObject, value: Any) -> None:
    case = json.loads(document(OPERATIONS, pool={}, expect=[{"kind": "token", "from": 0, "by": 1, "slots": [1]}]))
    row = case["ops"][2]["batch"][0]
    where = data.draw(st.sampled_from([case, case["pool"], *case["ops"], *case["expect"], row]))
    where[data.draw(st.sampled_from([*where, "blocks", "group", "window", "dtype"]))] = value

    (result,) = read_cases(json.dumps(case), "f")

    assert isinstance(result, (Case, CaseError))
