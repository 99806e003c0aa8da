"""Random histories: healthy ones are clean, and one fault that a later read can see is reported."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvcanary_agent.faults.language import parse_case
from kvcanary_agent.faults.runner import run_case
from tests.faults.oracle import Oracle
from tests.faults.sabotage import FAULTS, Fault, Saboteur
from tests.faults.traffic import Traffic

HEALTHY_HISTORIES = 1200
FAULTY_HISTORIES_OF_EACH_KIND = 60
# Places to try for a fault before another history is taken.
ATTEMPTS = 6

randoms = st.randoms(use_true_random=False)


def histories(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def check(pool: dict[str, Any], operations: list[dict[str, Any]], expect: list[dict[str, Any]]) -> None:
    document = json.dumps({"id": "history", "pool": pool, "ops": operations, "expect": expect})
    outcome = run_case(parse_case(document, "history", 1))
    assert outcome.passed, f"{'; '.join(outcome.problems)} in {document}"


@histories(HEALTHY_HISTORIES)
@given(random=randoms, actions=st.integers(2, 14))
def test_a_healthy_history_is_clean(random: Random, actions: int) -> None:
    traffic = Traffic(random)
    traffic.run(actions)
    assert Oracle(traffic.pool).follow(traffic.operations).wrong == [], "the history is not healthy"
    check(traffic.pool, traffic.operations, [])


@pytest.mark.parametrize(("sabotage", "favoured"), FAULTS.items(), ids=[sabotage.__name__ for sabotage in FAULTS])
@histories(FAULTY_HISTORIES_OF_EACH_KIND)
@given(random=randoms, actions=st.integers(4, 14))
def test_a_fault_that_a_later_read_can_see_is_reported(
    sabotage: Callable[[Saboteur], Fault | None], favoured: tuple[str, ...], random: Random, actions: int
) -> None:
    traffic = Traffic(random)
    traffic.run(actions, favoured)
    for _ in range(ATTEMPTS):
        fault = sabotage(Saboteur(random, traffic.pool, traffic.operations))
        if fault is None:
            continue
        seen = fault.index if fault.at_once else first_wrong(fault)
        if seen is not None:
            expect = {"kind": fault.kinds.split(), "from": fault.index, "by": seen}
            # What comes after is a consequence, which may be called many things.
            check(fault.pool, fault.operations[: seen + 1], [expect])
            return
    assume(False)


def first_wrong(fault: Fault) -> int | None:
    """The first operation that, by the oracle, goes wrong because of the fault."""
    wrong = Oracle(fault.pool).follow(fault.operations).wrong
    return wrong[0] if wrong else None
