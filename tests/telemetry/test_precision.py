"""How often the cause that is named first is the one that was put in: on fault cases, and on random histories.

What the true cause of a case is, ``true_causes.json`` says by what the case does, without a look at what is reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvcanary_agent.faults.language import parse_case, read_cases
from kvcanary_agent.faults.operations import Case
from kvcanary_agent.faults.runner import run_case
from kvcanary_agent.telemetry.diagnosis import Diagnosis, diagnose_burst
from kvcanary_agent.telemetry.diagnosis.causes import CAUSES
from tests.faults.oracle import Oracle
from tests.faults.sabotage import FAULTS, Saboteur
from tests.faults.traffic import Traffic

WANTED = 0.9
CONFIDENT = 0.75
HISTORIES_OF_EACH_KIND = 12

CASES = Path(__file__).parents[1] / "faults" / "cases"
TRUE_CAUSE = {
    case: cause
    for cause, family in json.loads(Path(__file__).with_name("true_causes.json").read_text()).items()
    for case in family["cases"]
}
# Each fault of tests/faults/sabotage.py, and what an engineer may call it: more than one where what the fault does
# depends on the place that it strikes.
TRUE_CAUSES_OF_SABOTAGE = {
    "flipped_bits": {"stray_write"},
    "nan": {"stray_write"},
    "zeros": {"stray_write"},
    "padding_on_a_live_slot": {"padding_writes_live_slot"},
    "lost_write": {"write_dropped"},
    "stale_row": {"foreign_block", "block_table_swapped"},
    "row_outside_the_pool": {"address_outside_pool"},
    "freed_while_in_use": {"freed_while_in_use", "double_free"},
    "handed_out_while_held": {"double_allocation"},
    "late_write": {"late_write"},
    "half_a_copy": {"copy_incomplete"},
    "half_a_load": {"transfer_incomplete"},
    "load_on_one_rank": {"rank_divergence"},
    "other_token": {"wrong_input_tokens"},
    "other_namespace": {"prefix_shared_across_namespaces"},
    "forgotten_epoch": {"cache_survived_weight_update"},
    "other_slot": {"slot_mapping_wrong"},
    "wrong_index_entry": {"prefix_index_wrong"},
}


def faulty_cases() -> Iterator[Case]:
    for file in sorted(CASES.glob("*.jsonl")):
        for case in read_cases(file.read_text(encoding="utf-8"), file.name):
            assert isinstance(case, Case), str(case)
            if case.expectations:
                yield case


def diagnosis_of(case: Case) -> Diagnosis | None:
    """The diagnosis of everything that the canaries report in the case; None if that is nothing."""
    found = [report.violation for report in run_case(case).reports]
    parts = {f"group{index}": 2 * len(group.layers) for index, group in enumerate(case.geometry.groups)}
    return diagnose_burst(found, parts) if found else None


@pytest.fixture(scope="module")
def diagnoses() -> dict[str, Diagnosis]:
    return {case.id: diagnosis for case in faulty_cases() if (diagnosis := diagnosis_of(case))}


def test_the_true_cause_of_every_fault_case_is_stated_once() -> None:
    assert sorted(TRUE_CAUSE) == sorted(case.id for case in faulty_cases())


def test_the_first_cause_is_the_true_one_in_nine_of_ten_fault_cases(diagnoses: dict[str, Diagnosis]) -> None:
    wrong = {
        case: f"{diagnosis.cause}, not {TRUE_CAUSE[case]}"
        for case, diagnosis in diagnoses.items()
        if diagnosis.cause != TRUE_CAUSE[case]
    }
    assert 1 - len(wrong) / len(diagnoses) >= WANTED, wrong


def test_a_cause_named_with_confidence_is_hardly_ever_wrong(diagnoses: dict[str, Diagnosis]) -> None:
    confident = {case: diagnosis for case, diagnosis in diagnoses.items() if diagnosis.confidence >= CONFIDENT}
    wrong = [case for case, diagnosis in confident.items() if diagnosis.cause != TRUE_CAUSE[case]]
    assert len(confident) > 0.7 * len(diagnoses)
    assert len(wrong) <= 0.05 * len(confident), wrong


def test_every_diagnosis_says_what_to_try(diagnoses: dict[str, Diagnosis]) -> None:
    for diagnosis in diagnoses.values():
        for cause in diagnosis.causes:
            assert cause.title
            assert cause.next_steps
    assert set(TRUE_CAUSE.values()) <= set(CAUSES)


def test_the_first_cause_is_the_true_one_in_nine_of_ten_random_histories() -> None:
    said: dict[str, Counter[str]] = {sabotage.__name__: Counter(_said_of(sabotage.__name__)) for sabotage in FAULTS}
    right = sum(said[name][cause] for name, causes in TRUE_CAUSES_OF_SABOTAGE.items() for cause in causes)
    total = sum(counts.total() for counts in said.values())
    assert total > 10 * len(FAULTS)
    assert right / total >= WANTED, said


def _said_of(name: str) -> Iterator[str]:
    """The causes named for histories with this fault in it, up to the operation by which it must have been seen."""
    sabotage, favoured = next(item for item in FAULTS.items() if item[0].__name__ == name)
    found = 0
    for seed in range(40 * HISTORIES_OF_EACH_KIND):
        random = Random(f"{name} {seed}")
        traffic = Traffic(random)
        traffic.run(random.randint(4, 14), favoured)
        fault = sabotage(Saboteur(random, traffic.pool, traffic.operations))
        if fault is None:
            continue
        wrong = Oracle(fault.pool).follow(fault.operations).wrong
        if not fault.at_once and not wrong:
            continue
        seen = fault.index if fault.at_once else wrong[0]
        document = {"id": name, "pool": fault.pool, "ops": fault.operations[: seen + 1], "expect": []}
        diagnosis = diagnosis_of(parse_case(json.dumps(document), name, 1))
        yield diagnosis.cause if diagnosis else "nothing"
        found += 1
        if found == HISTORIES_OF_EACH_KIND:
            return
