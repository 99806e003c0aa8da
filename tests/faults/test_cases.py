"""The canary on every fault case of the repository."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcanary_agent.canary import Kind
from kvcanary_agent.faults.language import read_cases
from kvcanary_agent.faults.operations import Case
from kvcanary_agent.faults.runner import run_case

CASES = Path(__file__).with_name("cases")


def cases_in(file: Path) -> Iterator[Case]:
    for case in read_cases(file.read_text(encoding="utf-8"), file.name):
        assert isinstance(case, Case), str(case)
        yield case


ALL_CASES = [case for file in sorted(CASES.glob("*.jsonl")) for case in cases_in(file)]


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)
def test_a_case_reports_what_it_expects_and_nothing_else(case: Case) -> None:
    outcome = run_case(case)

    assert outcome.problems == ()


def test_every_kind_of_violation_has_a_case() -> None:
    expected = {kind for case in ALL_CASES for expectation in case.expectations for kind in expectation.kinds}

    assert expected == set(Kind)
