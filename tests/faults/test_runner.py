"""Running and judging cases: what counts as seen, too early, unexpected, and as a crash."""

import json
from typing import Any

import pytest

from kvcanary_agent.canary import Canary, ForwardStep, Kind, Violation
from kvcanary_agent.faults.language import parse_case
from kvcanary_agent.faults.operations import Expectation
from kvcanary_agent.faults.runner import Report, judge, run_case

OPERATIONS: list[dict[str, Any]] = [
    {"op": "request", "req": "A", "prompt": [1, 2, 3]},
    {"op": "alloc", "req": "A", "blocks": [1]},
    {"op": "forward", "batch": [{"req": "A", "tokens": [1, 2, 3]}]},
    {"op": "poke", "block": 1, "offset": 1, "layer": 1, "part": "v", "xor": [[4, 1]]},
    {"op": "forward", "batch": [{"req": "A", "tokens": [4]}]},
]


def report(operation: int, kind: Kind = Kind.CONTENT, slot: int = 5, req: str | None = "A") -> Report:
    violation = Violation(
        kind=kind, pool="kv", group="g", slot=slot, block=slot // 4, offset=slot % 4, step=1, request=req
    )
    return Report(operation=operation, rank=0, violation=violation)


def expect(*kinds: Kind, slots: tuple[int, ...] = (), req: str | None = None) -> Expectation:
    return Expectation(kinds=frozenset(kinds), first=3, last=4, slots=frozenset(slots), req=req)


CONTENT = expect(Kind.CONTENT)


def test_a_report_within_its_operations_is_what_was_expected() -> None:
    assert judge([CONTENT], [report(3)]) == []
    assert judge([CONTENT], [report(4), report(7)]) == []
    assert judge([expect(Kind.TOKEN, Kind.CONTENT)], [report(4)]) == []


def test_a_report_too_late_is_none() -> None:
    assert judge([CONTENT], [report(5)]) == ["no content during operations 3 to 4"]


def test_a_report_too_early_is_one_too_many() -> None:
    assert judge([CONTENT], [report(2), report(3)]) == ["content during operation 2, which nothing expects"]


def test_a_report_of_another_kind_is_one_too_many() -> None:
    assert judge([CONTENT], [report(3), report(9, Kind.TOKEN)]) == ["token during operation 9, which nothing expects"]


def test_a_clean_case_wants_no_report() -> None:
    assert judge([], []) == []
    assert judge([], [report(0)]) == ["content during operation 0, which nothing expects"]


def test_every_slot_must_be_named() -> None:
    wanted = expect(Kind.CONTENT, slots=(5, 6))

    assert judge([wanted], [report(3, slot=5), report(4, slot=6), report(4, slot=7)]) == []
    assert judge([wanted], [report(3, slot=5)]) == ["no content during operations 3 to 4 for slot 6"]


def test_the_request_must_be_named() -> None:
    wanted = expect(Kind.CONTENT, slots=(5,), req="A")

    assert judge([wanted], [report(3, req="B"), report(3, slot=6)]) == [
        "no content during operations 3 to 4 for request A for slot 5"
    ]


def test_each_expectation_needs_a_report_of_its_own_time() -> None:
    later = Expectation(kinds=frozenset({Kind.CONTENT}), first=7, last=8, slots=frozenset(), req=None)

    assert judge([CONTENT, later], [report(3), report(8)]) == []
    assert judge([CONTENT, later], [report(3)]) == ["no content during operations 7 to 8"]


def test_a_report_says_during_which_operation_and_on_which_rank_it_was_seen() -> None:
    poke = {**OPERATIONS[3], "rank": 1}
    expectation = {"kind": "content", "from": 4, "by": 4, "slots": [5], "req": "A"}
    case = {"id": "x", "pool": {"ranks": 2}, "ops": [*OPERATIONS[:3], poke, OPERATIONS[4]], "expect": [expectation]}
    outcome = run_case(parse_case(json.dumps(case), "f", 1))

    assert outcome.passed
    (seen,) = outcome.reports
    assert (seen.operation, seen.rank) == (4, 1)
    assert (seen.violation.layer, seen.violation.part, seen.violation.slot) == ("1", "v", 5)


def test_a_canary_that_crashes_fails_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Canary, step: ForwardStep) -> None:
        raise ZeroDivisionError("over and out")

    monkeypatch.setattr(Canary, "before_forward", crash)
    outcome = run_case(parse_case(json.dumps({"id": "x", "ops": OPERATIONS, "expect": []}), "f", 1))

    assert outcome.problems == ("operation 2 ended with ZeroDivisionError: over and out",)
    assert outcome.crash is not None
    assert "over and out" in outcome.crash.trace


def test_a_case_that_overflows_the_ring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary_agent.canary.canary.RING_CAPACITY", 1)
    operations = [*OPERATIONS[:4], {**OPERATIONS[3], "offset": 2}, OPERATIONS[4]]
    expected = [{"kind": "content", "from": 5, "by": 5}]
    outcome = run_case(parse_case(json.dumps({"id": "x", "ops": operations, "expect": expected}), "file", 1))
    assert not outcome.passed
    assert outcome.crash is not None
    assert "did not fit" in outcome.crash.message
