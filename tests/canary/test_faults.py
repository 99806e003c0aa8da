"""Each fault is reported as what it is, where it is, with its evidence, and once."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from kvcanary_agent.canary import Canary, Kind, KVCanaryError, KVLayout, Violation, compare_ranks
from kvcanary_agent.canary.canary import RING_CAPACITY
from kvcanary_agent.kernels.hashing import chain_seed, mix
from kvcanary_agent.settings import Settings
from tests.canary.toy import RecordingSink, Row, ToyEngine, token_major


def only(toy: ToyEngine) -> Violation:
    (violation,) = toy.sink.violations
    return violation


def facts(violation: Violation, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(violation, name) for name in names)


def place(violation: Violation) -> tuple[Any, ...]:
    return facts(violation, "kind", "slot", "block", "offset", "step", "request", "position")


# Content


@pytest.mark.parametrize(("part", "names"), list(enumerate([("layers.0", "k"), ("layers.0", "v"), ("layers.1", "k")])))
def test_a_flipped_bit_is_reported_to_its_reader_with_layer_part_writer_and_step(
    part: int, names: tuple[str, str]
) -> None:
    toy = ToyEngine()
    toy.start("first", range(9))
    toy.start("a", range(10, 16))
    slot = toy.slot("a", 5)
    toy.poke(slot, part, byte=7, mask=0x80)
    toy.decode("first", "a", steps=3)
    violation = only(toy)
    assert place(violation) == (Kind.CONTENT, slot, slot // 4, 1, 3, "a", 5)
    assert facts(violation, "layer", "part") == names
    assert facts(violation, "writer", "written_step", "recorded_position") == ("a", 2, 5)
    assert facts(violation, "pool", "group", "block_history") == ("kv", "full", ("a",))
    assert violation.expected != violation.found
    assert violation.expected is not None
    assert violation.expected.startswith("hash:")


def test_bytes_compared_in_many_small_pieces_are_named_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary_agent.kernels.reference.content._CHUNK_BYTES", 1)
    toy = ToyEngine()
    toy.start("a", range(10, 21))
    toy.start("b", range(30, 37))
    toy.poke(toy.slot("a", 9), 1)
    toy.poke(toy.slot("b", 5), 1)
    toy.decode("a", "b")
    assert [facts(v, "slot", "request", "position") for v in toy.sink.violations] == [
        (toy.slot("a", 9), "a", 9),
        (toy.slot("b", 5), "b", 5),
    ]


def test_a_flip_is_reported_to_each_reader_once() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18))
    toy.request("b", [*range(10, 18), 5])
    toy.share("b", "a", 2)
    toy.allocate("b", 1)
    toy.poke(toy.slot("a", 0), 2)
    toy.step(Row(request="b"))
    assert facts(only(toy), "request", "writer") == ("b", "a")
    toy.decode("a", "b", steps=3)
    assert [violation.request for violation in toy.sink.violations] == ["b", "a"]


def test_a_slot_that_is_written_again_may_break_again() -> None:
    toy = ToyEngine()
    for _ in range(2):
        toy.start("a", range(10, 15))
        toy.poke(toy.slot("a", 1), 0)
        toy.decode("a", steps=2)
        toy.free("a")
    assert toy.sink.kinds() == [Kind.CONTENT] * 2


@pytest.mark.parametrize("period", [1, 3, 4, 5, 8, 16])
def test_scrubbing_finds_a_flip_within_its_period(period: int) -> None:
    for part in range(4):
        toy = ToyEngine(settings={"content": "scrub", "scrub_period": period})
        toy.start("a", range(10, 30), blocks=12)
        for position in (0, 7, 13):
            toy.poke(toy.slot("a", position), part)
        toy.decode("a", steps=period)
        assert {violation.position for violation in toy.sink.violations} == {0, 7, 13}
        assert set(toy.sink.kinds()) == {Kind.CONTENT}
        toy.decode("a", steps=period)
        assert len(toy.sink.violations) == 3


def test_the_patrol_finds_a_flip_that_nobody_reads() -> None:
    toy = ToyEngine(settings={"content": "scrub", "sweep_slots_per_step": 4})
    toy.start("a", range(10, 18))
    slot = toy.slot("a", 3)
    toy.free("a", cached=True, recycle=False)
    toy.poke(slot, 3)
    toy.start("b", range(30, 33))
    # 4 slots times 4 parts a step are 4 blocks of one part.
    toy.decode("b", steps=4 * 24 // 4)
    violation = only(toy)
    assert place(violation)[:4] == (Kind.CONTENT, slot, slot // 4, 3)
    assert facts(violation, "request", "position", "layer", "part") == (None, None, "layers.1", "v")
    assert violation.writer == "a"


def test_what_a_reader_has_reported_the_patrol_does_not_report_again() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14), blocks=2)
    toy.poke(toy.slot("a", 1), 0)
    toy.decode("a")
    toy.canary.sweep()
    assert [violation.request for violation in toy.sink.violations] == ["a"]


def test_without_a_patrol_nobody_looks_at_what_nobody_reads() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18))
    slot = toy.slot("a", 3)
    toy.free("a", cached=True, recycle=False)
    toy.poke(slot, 3)
    toy.start("b", range(30, 33))
    toy.decode("b", steps=5)
    assert toy.sink.violations == []
    assert {phase for phase, *_ in toy.sink.passes} == {"verify", "record"}


def test_with_content_off_bytes_are_not_looked_at_and_the_rest_is() -> None:
    toy = ToyEngine(settings={"content": "off"})
    toy.start("a", range(10, 18))
    toy.poke(toy.slot("a", 3), 0)
    toy.decode("a", steps=3)
    toy.canary.sweep()
    assert toy.sink.violations == []
    toy.requests["a"].tokens[2] = 999
    toy.decode("a")
    assert only(toy).kind is Kind.TOKEN


# Records against the request


def test_a_table_row_that_points_at_another_block_is_ownership_where_that_is_known() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18))
    toy.start("b", range(30, 38))
    toy.requests["a"].tables[0][1] = toy.requests["b"].tables[0][1]
    toy.decode("a", steps=2)
    stolen = toy.requests["b"].tables[0][1]
    assert [place(v) for v in toy.sink.violations] == [
        (Kind.OWNERSHIP, stolen * 4 + offset, stolen, offset, 3, "a", 4 + offset) for offset in range(4)
    ]
    assert {facts(v, "writer", "written_step", "block_history") for v in toy.sink.violations} == {("b", 2, ("b",))}


def test_another_request_s_tokens_are_token_faults_with_hashes_of_both() -> None:
    toy = ToyEngine(reports_ownership=False)
    toy.start("a", range(10, 18))
    toy.start("b", [10, 11, 12, 13, 99, 99, 16, 17])
    stolen = toy.requests["b"].tables[0][1]
    toy.requests["a"].tables[0][1] = stolen
    toy.decode("a", steps=2)
    by_offset = {v.offset: v for v in toy.sink.violations}
    assert {offset: by_offset[offset].kind for offset in (0, 1)} == {0: Kind.TOKEN, 1: Kind.TOKEN}
    assert by_offset[0].expected != by_offset[1].expected
    assert by_offset[0].found == by_offset[1].found
    assert place(by_offset[0]) == (Kind.TOKEN, stolen * 4, stolen, 0, 3, "a", 4)


def test_a_block_at_the_wrong_place_of_the_table_is_a_position_fault() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18))
    table = toy.requests["a"].tables[0]
    table[0], table[1] = table[1], table[0]
    toy.allocate("a", 1)
    toy.step(Row(request="a", count=0))
    assert toy.sink.kinds() == [Kind.POSITION] * 8
    first = toy.sink.violations[0]
    assert facts(first, "position", "expected", "found", "recorded_position") == (0, "0", "4", 4)


def test_the_same_tokens_after_another_prefix_are_a_chain_fault() -> None:
    toy = ToyEngine(reports_ownership=False)
    toy.start("a", [1, 2, 3, 4, 50, 51, 52, 53])
    toy.start("b", [1, 2, 9, 4, 50, 51, 52, 53])
    stolen = toy.requests["b"].tables[0][1]
    toy.requests["a"].tables[0][1] = stolen
    toy.decode("a", steps=3)
    assert [place(v) for v in toy.sink.violations] == [
        (Kind.CHAIN, stolen * 4 + offset, stolen, offset, 3, "a", 4 + offset) for offset in range(4)
    ]
    assert {v.writer for v in toy.sink.violations} == {"b"}


def test_a_foreign_block_in_the_middle_is_reported_and_what_follows_it_is_not() -> None:
    toy = ToyEngine(reports_ownership=False, known_tokens=False)
    toy.start("a", range(10, 26))
    toy.start("b", range(40, 56))
    table = toy.requests["a"].tables[0]
    table[1] = toy.requests["b"].tables[0][1]
    toy.decode("a", steps=2)
    assert toy.sink.kinds() == [Kind.CHAIN] * 4
    assert [v.position for v in toy.sink.violations] == [4, 5, 6, 7]


def test_a_shared_prefix_that_goes_on_behind_a_foreign_block_is_not_reported_with_it() -> None:
    toy = ToyEngine(reports_ownership=False, known_tokens=False)
    toy.start("donor", range(10, 26))
    toy.start("stranger", range(40, 56))
    toy.request("a", range(10, 27))
    toy.share("a", "donor", 4)
    toy.allocate("a", 1)
    toy.requests["a"].tables[0][1] = toy.requests["stranger"].tables[0][1]
    toy.step(Row(request="a"))
    assert [v.position for v in toy.sink.violations] == [4, 5, 6, 7]


def test_a_broken_chain_of_one_row_does_not_touch_the_next_row() -> None:
    toy = ToyEngine(reports_ownership=False, known_tokens=False)
    toy.start("donor", range(10, 26))
    toy.start("stranger", range(40, 56))
    toy.start("a", range(70, 78), blocks=3)
    toy.requests["a"].tokens.append(1)
    toy.requests["a"].tables[0][1] = toy.requests["stranger"].tables[0][1]
    toy.request("b", range(10, 27))
    toy.share("b", "donor", 4)
    toy.allocate("b", 1)
    toy.step(Row(request="a"), Row(request="b"))
    assert [facts(v, "request", "position") for v in toy.sink.violations] == [("a", at) for at in range(4, 8)]


def test_the_first_slot_is_judged_by_the_seed_alone() -> None:
    toy = ToyEngine(reports_ownership=False, known_tokens=False)
    toy.start("a", range(10, 14))
    # The same anchor, another chain: what no engine does by itself.
    toy.canary._records[0].chain[toy.slot("a", 0)] += 1
    toy.decode("a")
    assert facts(only(toy), "kind", "position") == (Kind.CHAIN, 0)


def test_a_prefix_of_another_namespace_is_a_namespace_fault_that_does_not_name_it() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18), namespace="lora:secret-a")
    toy.request("b", [*range(10, 18), 5], namespace="lora:secret-b")
    toy.share("b", "a", 2)
    toy.allocate("b", 1)
    toy.step(Row(request="b"))
    assert toy.sink.kinds() == [Kind.NAMESPACE] * 8
    first = toy.sink.violations[0]
    assert facts(first, "request", "position", "writer") == ("b", 0, "a")
    assert first.expected != first.found
    assert "secret" not in json.dumps([dataclasses.asdict(v) for v in toy.sink.violations])


def test_a_prefix_from_before_the_weights_changed_is_an_epoch_fault() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18))
    toy.canary.weights_changed()
    toy.request("b", [*range(10, 18), 5])
    toy.share("b", "a", 2)
    toy.allocate("b", 1)
    toy.step(Row(request="b"))
    assert toy.sink.kinds() == [Kind.EPOCH] * 8
    assert facts(toy.sink.violations[0], "request", "writer") == ("b", "a")
    assert "epoch 1" in str(toy.sink.violations[0].expected)
    assert "epoch 0" in str(toy.sink.violations[0].found)


def test_another_namespace_and_other_weights_are_a_namespace_fault() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18), namespace="x")
    toy.canary.weights_changed()
    toy.request("b", range(10, 19))
    toy.share("b", "a", 2)
    toy.allocate("b", 1)
    toy.step(Row(request="b"))
    assert set(toy.sink.kinds()) == {Kind.NAMESPACE}


def test_what_nobody_wrote_since_the_block_was_handed_out_is_unwritten() -> None:
    toy = ToyEngine()
    toy.start("old", range(50, 58))
    toy.free("old")
    toy.request("a", range(10, 18))
    blocks = toy.allocate("a", 3)
    toy.step(Row(request="a", count=5))
    toy.step(Row(request="a", start=7))
    assert [place(v) for v in toy.sink.violations] == [
        (Kind.UNWRITTEN, blocks[1] * 4 + offset, blocks[1], offset, 3, "a", 4 + offset) for offset in (1, 2)
    ]
    assert {v.writer for v in toy.sink.violations} == {"old"}, "the void record is evidence"


def test_a_position_beyond_what_the_request_consists_of_is_a_token_fault() -> None:
    toy = ToyEngine()
    request = toy.start("a", range(10, 16), blocks=3)
    request.tokens = request.tokens[:4]
    toy.step(Row(request="a", tokens=[1]))
    assert [facts(v, "kind", "position", "expected") for v in toy.sink.violations] == [
        (Kind.TOKEN, 4, "none"),
        (Kind.TOKEN, 5, "none"),
    ]


def test_a_rejected_draft_token_that_is_read_is_unwritten() -> None:
    toy = ToyEngine()
    request = toy.start("a", range(10, 16), blocks=3)
    toy.canary.rolled_back("a", 4)
    request.tokens.append(3)
    toy.step(Row(request="a"))
    assert [facts(v, "kind", "position") for v in toy.sink.violations] == [(Kind.UNWRITTEN, 4), (Kind.UNWRITTEN, 5)]


@pytest.mark.parametrize("block", [-1, -(2**31), 24, 2**31 - 1])
def test_a_table_entry_outside_the_pool_is_an_address_fault_without_a_slot(block: int) -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18), blocks=3)
    toy.requests["a"].tables[0][1] = block
    toy.decode("a", steps=2)
    violation = only(toy)
    assert place(violation) == (Kind.ADDRESS, -1, -1, -1, 2, "a", 4)
    assert violation.found == str(block)
    assert facts(violation, "writer", "written_step", "recorded_position") == (None, None, None)


def test_a_table_that_is_too_narrow_for_the_prefix_is_an_address_fault() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18), blocks=3)
    toy.requests["a"].tokens.append(1)
    step, _ = toy.plan(Row(request="a"))
    narrow = dataclasses.replace(step.groups[0], block_table=step.groups[0].block_table[:, :1])
    toy.canary.before_forward(dataclasses.replace(step, groups=[narrow]))
    assert set(toy.sink.kinds()) == {Kind.ADDRESS}


def test_an_empty_table_for_a_prefix_is_an_address_fault() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18), blocks=3)
    toy.requests["a"].tokens.append(1)
    step, _ = toy.plan(Row(request="a"))
    empty = dataclasses.replace(step.groups[0], block_table=step.groups[0].block_table[:, :0])
    toy.canary.before_forward(dataclasses.replace(step, groups=[empty]))
    assert set(toy.sink.kinds()) == {Kind.ADDRESS}


# Writes


@pytest.mark.parametrize("wrong", [0, 1, 95, 96, 10**9])
def test_a_write_slot_that_is_not_the_table_s_is_an_address_fault(wrong: int) -> None:
    toy = ToyEngine()
    toy.start("pad", range(3))
    toy.start("a", range(10, 16), blocks=3)
    right = toy.slot("a", 6)
    toy.requests["a"].tokens.append(8)
    toy.step(Row(request="a", slots=[wrong]))
    violation = toy.sink.violations[0]
    slot = wrong if wrong < 96 else -1
    assert place(violation) == (Kind.ADDRESS, slot, slot // 4, slot % 4 if slot >= 0 else -1, 3, "a", 6)
    assert facts(violation, "expected", "found") == (str(right), str(wrong))
    assert {v.kind for v in toy.sink.violations} == {Kind.ADDRESS}


def test_each_step_that_writes_to_a_wrong_slot_is_reported() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 16), blocks=3)
    for token in (1, 2):
        toy.requests["a"].tokens.append(token)
        toy.step(Row(request="a", start=6, tokens=[toy.requests["a"].tokens[6]], slots=[10**9]))
    assert [facts(v, "kind", "step") for v in toy.sink.violations] == [(Kind.ADDRESS, 2), (Kind.ADDRESS, 3)]


def test_the_victim_of_a_wrong_write_hears_of_it_when_it_reads() -> None:
    toy = ToyEngine()
    toy.start("victim", range(3))
    toy.start("a", range(10, 16), blocks=3)
    toy.requests["a"].tokens.append(8)
    toy.step(Row(request="a", slots=[toy.slot("victim", 1)]))
    toy.sink.violations.clear()
    toy.decode("victim")
    violation = only(toy)
    assert facts(violation, "kind", "request", "position", "writer", "written_step") == (
        Kind.POSITION,
        "victim",
        1,
        "a",
        3,
    )


def test_a_write_into_a_block_that_the_request_does_not_hold_is_ownership() -> None:
    toy = ToyEngine()
    toy.start("b", range(30, 33))
    toy.start("a", range(10, 14))
    toy.requests["a"].tokens.append(5)
    stolen = toy.requests["b"].tables[0][0]
    toy.requests["a"].tables[0].append(stolen)
    toy.step(Row(request="a"))
    violation = toy.sink.violations[0]
    assert place(violation) == (Kind.OWNERSHIP, stolen * 4, stolen, 0, 3, "a", 4)
    assert violation.writer == "b"
    assert "does not hold" in violation.detail


def test_two_requests_that_write_one_slot_are_ownership() -> None:
    toy = ToyEngine(reports_ownership=False)
    for name, token in (("a", 5), ("b", 6)):
        toy.request(name, [token])
    toy.allocate("a", 1)
    toy.requests["b"].tables[0] = list(toy.requests["a"].tables[0])
    toy.step(Row(request="a"), Row(request="b"))
    violation = only(toy)
    assert facts(violation, "kind", "slot", "request", "position") == (Kind.OWNERSHIP, 0, "a", 0)
    assert violation.expected != violation.found
    assert "two requests" in violation.detail
    assert toy.sink.failed() != {}, "the failure shows in the counts, too"


def test_two_requests_that_write_the_same_token_after_other_prefixes_to_one_slot_are_ownership() -> None:
    toy = ToyEngine(reports_ownership=False)
    for name, tokens in (("a", range(10, 14)), ("b", range(30, 34))):
        toy.start(name, tokens, blocks=1)
        toy.requests[name].tokens.append(7)
    toy.allocate("a", 1)
    toy.requests["b"].tables[0].append(toy.requests["a"].tables[0][1])
    toy.step(Row(request="a"), Row(request="b"))
    assert Kind.OWNERSHIP in toy.sink.kinds()


def test_two_requests_that_write_the_same_token_at_other_positions_to_one_slot_are_ownership() -> None:
    toy = ToyEngine(reports_ownership=False)
    toy.start("a", range(10, 14), blocks=2)
    toy.request("b", [7])
    toy.requests["a"].tokens.append(7)
    toy.requests["b"].tables[0] = [toy.requests["a"].tables[0][1]]
    toy.step(Row(request="a"), Row(request="b"))
    assert facts(only(toy), "kind", "slot", "request") == (Kind.OWNERSHIP, toy.slot("a", 4), "a")


def test_another_token_over_a_shared_one_is_ownership() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 16))
    toy.request("b", range(10, 16))
    toy.share("b", "a", 2)
    toy.requests["b"].computed = 5
    toy.requests["b"].tokens[5] = 77
    toy.step(Row(request="b"))
    violation = only(toy)
    assert facts(violation, "kind", "request", "position", "writer") == (Kind.OWNERSHIP, "b", 5, "a")
    assert "copy on write" in violation.detail
    assert violation.expected != violation.found


def test_a_position_that_does_not_follow_the_computed_tokens_is_a_position_fault() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 15))
    toy.requests["a"].tokens += [1, 2, 3]
    toy.step(Row(request="a", positions=[7], slots=[toy.slot("a", 7)]))
    violation = only(toy)
    assert facts(violation, "kind", "position", "expected", "found") == (Kind.POSITION, 7, "5", "7")


def test_a_token_that_is_not_the_request_s_is_a_token_fault_each_time_it_is_written() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 15), blocks=3)
    for token in (1, 2):
        toy.requests["a"].tokens.append(token)
        toy.step(Row(request="a", tokens=[500]))
        toy.requests["a"].computed = 5
        toy.requests["a"].tokens.pop()
    assert [facts(v, "kind", "request", "position", "step") for v in toy.sink.violations] == [
        (Kind.TOKEN, "a", 5, 2),
        (Kind.TOKEN, "a", 5, 3),
    ]


def test_a_write_that_does_not_happen_is_lost_once() -> None:
    toy = ToyEngine()
    toy.start("old", range(50, 58))
    toy.free("old")
    toy.start("a", range(10, 14), blocks=2)
    toy.requests["a"].tokens += [8, 9]
    toy.step(Row(request="a", count=2, drop=[5]))
    violation = only(toy)
    slot = toy.slot("a", 5)
    assert place(violation) == (Kind.LOST_WRITE, slot, slot // 4, 1, 3, "a", 5)
    assert violation.written_step == 3
    toy.decode("a", steps=2)
    only(toy)


def test_a_first_write_over_garbage_that_does_not_happen_is_lost() -> None:
    toy = ToyEngine()
    for part in toy.groups[0].parts:
        part.view.fill_(3)
    toy.request("a", range(10, 14))
    toy.allocate("a", 1)
    toy.step(Row(request="a", count=4, drop=[2]))
    assert facts(only(toy), "kind", "position") == (Kind.LOST_WRITE, 2)


@pytest.mark.parametrize("part", range(4))
def test_a_write_that_is_lost_in_one_part_names_it(part: int) -> None:
    toy = ToyEngine(settings={"content": "scrub"})
    toy.start("old", range(50, 58))
    toy.free("old")
    toy.request("a", range(10, 14))
    toy.allocate("a", 1)
    step, writes = toy.plan(Row(request="a", count=4))
    view = toy.groups[0].parts[part].view
    before = view.clone()
    toy.canary.before_forward(step)
    toy.forward(writes)
    view.copy_(before)
    toy.canary.after_forward()
    assert set(toy.sink.kinds()) == {Kind.LOST_WRITE}
    lost = toy.groups[0].parts[part]
    assert {facts(v, "layer", "part") for v in toy.sink.violations} == {(lost.layer, lost.part)}
    assert len(toy.sink.violations) == 4


def test_a_declared_write_that_is_skipped_leaves_the_slot_unwritten() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14), blocks=2)
    toy.requests["a"].tokens += [8, 9]
    toy.step(Row(request="a", slots=[-1]))
    assert toy.sink.violations == []
    toy.step(Row(request="a"))
    assert facts(only(toy), "kind", "position") == (Kind.UNWRITTEN, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_named_with_layer_and_part(bad: float) -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14), blocks=2)
    toy.requests["a"].tokens.append(8)
    step, writes = toy.plan(Row(request="a"))
    toy.canary.before_forward(step)
    toy.forward(writes)
    slot = toy.slot("a", 4)
    toy.groups[0].parts[3].view[slot // 4, 0, 1, 5] = bad
    toy.canary.after_forward()
    violation = only(toy)
    assert place(violation) == (Kind.NONFINITE, slot, slot // 4, 0, 2, "a", 4)
    assert facts(violation, "layer", "part") == ("layers.1", "v")


def test_a_null_block_that_is_not_finite_is_reported_once() -> None:
    toy = ToyEngine(null_block=0)
    toy.groups[0].parts[2].view[0, 3, 0, 0] = float("nan")
    toy.start("a", range(10, 14), blocks=3)
    toy.decode("a", steps=6)
    violation = only(toy)
    assert facts(violation, "kind", "slot", "block", "offset", "layer", "part") == (
        Kind.NONFINITE,
        3,
        0,
        3,
        "layers.1",
        "k",
    )
    assert violation.request is None


@pytest.mark.parametrize("padding", [[], [-1], [0, 1, 3, -1], [-1] * 100])
def test_padding_into_the_null_block_and_nowhere_is_legal(padding: list[int]) -> None:
    toy = ToyEngine(null_block=0)
    toy.request("a", range(10, 14))
    toy.allocate("a", 1)
    toy.step(Row(request="a", count=4), pad_slots=padding)
    assert toy.sink.violations == []


def test_minus_one_skips_a_write_or_padding_and_other_negative_slots_are_address_faults() -> None:
    toy = ToyEngine()
    toy.request("a", range(10, 14))
    toy.allocate("a", 1)
    toy.step(Row(request="a", count=4, slots=[-1, -1, -1, -1]), pad_slots=[-1, -1])
    assert toy.sink.violations == []
    toy.step(Row(request="a", count=2, start=0, slots=[-2, -1]), pad_slots=[-(2**31)])
    assert [facts(v, "kind", "slot", "found") for v in toy.sink.violations] == [
        (Kind.ADDRESS, -1, "-2"),
        (Kind.ADDRESS, -1, str(-(2**31))),
    ]


def test_padding_over_a_live_slot_is_a_wild_write_and_elsewhere_an_address_fault() -> None:
    toy = ToyEngine(null_block=0)
    toy.start("a", range(10, 14))
    toy.requests["a"].tokens.append(8)
    toy.allocate("a", 1)
    live = toy.slot("a", 2)
    toy.step(Row(request="a"), pad_slots=[live, 80, 96, -1, 1])
    assert [facts(v, "kind", "slot", "writer") for v in toy.sink.violations] == [
        (Kind.WILD_WRITE, live, "a"),
        (Kind.ADDRESS, 80, None),
        (Kind.ADDRESS, -1, None),
    ]


# Events


@pytest.mark.parametrize("name", [None, "b"])
def test_a_misuse_of_the_allocator_is_told_at_once(name: str | None) -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14))
    toy.canary.allocated([0], request=name)
    violation = only(toy)
    assert facts(violation, "kind", "block", "request", "writer", "step") == (Kind.OWNERSHIP, 0, name, "a", 1)
    assert "double allocation" in violation.detail


def test_an_adapter_that_does_not_report_ownership_hears_nothing_about_it() -> None:
    toy = ToyEngine(reports_ownership=False)
    toy.start("a", range(10, 14))
    toy.canary.allocated([20], request="b")
    toy.canary.allocated([20], request="c")
    toy.canary.freed([20], request="d")
    toy.canary.freed([20], request="c")
    toy.canary.freed([20], request="c")
    assert toy.sink.violations == []


def test_an_adapter_that_only_tells_of_sharing_hears_nothing_about_what_it_does_not_tell() -> None:
    toy = ToyEngine(reports_ownership=False)
    toy.start("a", range(10, 14), blocks=1)
    toy.canary.shared(toy.requests["a"].tables[0], request="b")
    # b has left, which nobody told; a's last token is rejected and computed anew.
    toy.requests["a"].tokens[3] = 99
    toy.step(Row(request="a", start=3))
    assert toy.sink.violations == []


def test_a_partial_copy_is_a_content_fault_in_the_copy() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14))
    target = toy.free_blocks.pop()
    toy.canary.allocated([target], request="a")
    source = toy.requests["a"].tables[0][0]
    for part in toy.groups[0].parts[:3]:
        part.view[target] = part.view[source]
    toy.canary.copied([source], [target])
    toy.requests["a"].tables[0][0] = target
    toy.decode("a")
    assert {facts(v, "kind", "block", "layer", "part") for v in toy.sink.violations} == {
        (Kind.CONTENT, target, "layers.1", "v")
    }


def test_a_copy_of_what_was_never_written_is_unwritten() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14), blocks=2)
    toy.canary.copied(toy.requests["a"].tables[0][1:], toy.requests["a"].tables[0][:1])
    toy.step(Row(request="a", count=0))
    assert toy.sink.kinds() == [Kind.UNWRITTEN] * 4


def test_a_swap_takes_both_blocks_as_they_were() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18))
    table = toy.requests["a"].tables[0]
    first, second = table
    for part in toy.groups[0].parts:
        part.view[[first, second]] = part.view[[second, first]]
    toy.canary.copied([first, second], [second, first])
    toy.requests["a"].tables[0][:] = [second, first]
    toy.decode("a", steps=2)
    assert toy.sink.violations == []


def test_what_comes_back_changed_from_another_tier_is_a_transfer_fault_and_stays_one_for_readers() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14))
    block = toy.requests["a"].tables[0][0]
    toy.canary.stored(("key", 1), [block])
    saved = [part.view[block].clone() for part in toy.groups[0].parts]
    toy.free("a")
    (target,) = toy.allocate("a", 1)
    for part, values in zip(toy.groups[0].parts, saved, strict=True):
        part.view[target] = values
    toy.poke(target * 4 + 2, 1)
    toy.canary.loaded(("key", 1), [target], request="a")
    violation = only(toy)
    assert facts(violation, "kind", "slot", "request", "layer", "part") == (
        Kind.TRANSFER,
        target * 4 + 2,
        "a",
        "layers.0",
        "v",
    )
    toy.requests["a"].computed = 4
    toy.decode("a")
    assert set(toy.sink.kinds()) == {Kind.TRANSFER}


def test_what_was_not_written_when_it_was_stored_is_unwritten_when_it_is_back() -> None:
    toy = ToyEngine()
    toy.request("a", range(10, 14))
    toy.allocate("a", 1)
    toy.step(Row(request="a", count=2))
    toy.canary.stored("key", toy.requests["a"].tables[0])
    toy.canary.loaded("key", toy.requests["a"].tables[0], request="a")
    toy.step(Row(request="a", start=4, count=0))
    assert [facts(v, "kind", "position") for v in toy.sink.violations] == [(Kind.UNWRITTEN, 2), (Kind.UNWRITTEN, 3)]


def test_an_index_entry_is_checked_when_its_block_is_full() -> None:
    toy = ToyEngine()
    toy.request("a", range(10, 18))
    first, second = toy.allocate("a", 2)
    toy.canary.indexed(range(10, 14), first)
    toy.canary.indexed([*range(10, 17), 99], second)
    toy.step(Row(request="a", count=5))
    assert toy.sink.violations == []
    toy.step(Row(request="a", count=3))
    violation = only(toy)
    assert facts(violation, "kind", "block", "slot", "writer") == (Kind.INDEX, second, second * 4, "a")


def test_an_index_entry_for_a_written_block_is_checked_at_once() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 18), namespace="x")
    toy.canary.indexed(range(10, 18), 1, namespace="x")
    assert toy.sink.violations == []
    toy.canary.indexed(range(10, 18), 1)
    assert only(toy).kind is Kind.INDEX


def test_the_rank_that_reads_something_else_is_reported_and_the_others_are_not() -> None:
    canaries, sinks = [], []
    for rank in range(3):
        sink = RecordingSink()
        layout = KVLayout(engine="toy", groups=token_major(24, 4), rank=rank, world_size=3)
        canaries.append(Canary(layout, Settings(), sink))
        sinks.append(sink)
    toy = ToyEngine(reports_ownership=False)
    toy.start("a", range(10, 18), blocks=3)
    toy.requests["a"].tokens.append(1)
    prefill, _ = toy.plan(Row(request="a", start=0, count=8))
    step, _ = toy.plan(Row(request="a"))
    stale = dataclasses.replace(step.groups[0], block_table=step.groups[0].block_table.flip(1))
    for rank, canary in enumerate(canaries):
        canary.before_forward(prefill)
        canary.after_forward()
        canary.before_forward(dataclasses.replace(step, groups=[stale]) if rank == 1 else step)
    compare_ranks(canaries)
    assert [[v.kind for v in sink.violations if v.kind is Kind.RANK] for sink in sinks] == [[], [Kind.RANK], []]
    assert sinks[1].violations[-1].request == "a"


# Raise mode


def test_raise_mode_fails_the_step_before_its_forward() -> None:
    toy = ToyEngine(settings={"mode": "raise"})
    toy.start("a", range(10, 18), blocks=3)
    toy.poke(toy.slot("a", 3), 0)
    toy.requests["a"].tokens.append(5)
    step, _ = toy.plan(Row(request="a"))
    with pytest.raises(KVCanaryError, match=r"content in slot 3 \(block 0\) of kv, request a, step 2") as caught:
        toy.canary.before_forward(step)
    assert caught.value.violations == toy.sink.violations
    assert toy.sink.passes[-1][0] == "verify"


def test_raise_mode_exports_what_was_found_before_it_fails_the_step() -> None:
    toy = ToyEngine(settings={"mode": "raise"})
    toy.start("a", range(10, 18), blocks=3)
    toy.poke(toy.slot("a", 3), 0)
    with pytest.raises(KVCanaryError):
        toy.decode("a")
    assert toy.sink.found_at_flush == [1]


def test_raise_mode_fails_every_step_that_reads_it_though_it_is_reported_once() -> None:
    toy = ToyEngine(settings={"mode": "raise"})
    toy.start("a", range(10, 18), blocks=3)
    toy.poke(toy.slot("a", 3), 0)
    toy.requests["a"].tokens.append(5)
    for _ in range(3):
        with pytest.raises(KVCanaryError) as caught:
            toy.step(Row(request="a"))
        assert [v.slot for v in caught.value.violations] == [3]
    assert len(toy.sink.violations) == 1


def test_raise_mode_fails_the_step_of_a_second_reader() -> None:
    toy = ToyEngine(settings={"mode": "raise"})
    toy.start("a", range(10, 18), blocks=3)
    toy.request("b", range(10, 19))
    toy.share("b", "a", 2)
    toy.allocate("b", 1)
    toy.poke(toy.slot("a", 3), 0)
    toy.requests["a"].tokens.append(5)
    for name in ("a", "b"):
        with pytest.raises(KVCanaryError, match=f"request {name}"):
            toy.step(Row(request=name))
    assert [v.request for v in toy.sink.violations] == ["a", "b"]


def test_raise_mode_fails_the_step_after_a_misuse() -> None:
    toy = ToyEngine(settings={"mode": "raise"})
    toy.start("a", range(10, 18), blocks=3)
    toy.canary.allocated([0], request="b")
    toy.requests["a"].tokens.append(5)
    with pytest.raises(KVCanaryError):
        toy.step(Row(request="a"))


def test_raise_mode_fails_after_a_lost_write() -> None:
    toy = ToyEngine(settings={"mode": "raise"})
    toy.start("old", range(50, 58))
    toy.free("old")
    toy.request("a", range(10, 14))
    toy.allocate("a", 1)
    with pytest.raises(KVCanaryError, match="lost_write"):
        toy.step(Row(request="a", count=4, drop=[1]))


def test_what_a_step_that_was_refused_would_have_written_counts_as_unwritten() -> None:
    toy = ToyEngine(settings={"mode": "raise"})
    toy.start("a", range(10, 18), blocks=3)
    toy.start("b", range(30, 35), blocks=2)
    toy.poke(toy.slot("a", 3), 0)
    for name in ("a", "b"):
        toy.requests[name].tokens.append(5)
    with pytest.raises(KVCanaryError):
        toy.step(Row(request="a"), Row(request="b"))
    # The engine drops a, and takes b's token for computed.
    toy.free("a")
    toy.requests["b"].computed = 6
    toy.requests["b"].tokens.append(6)
    with pytest.raises(KVCanaryError) as caught:
        toy.step(Row(request="b"))
    assert [facts(v, "kind", "request", "position") for v in caught.value.violations] == [(Kind.UNWRITTEN, "b", 5)]


def test_log_mode_never_raises_and_a_healthy_raise_mode_neither() -> None:
    toy = ToyEngine(settings={"mode": "raise"})
    toy.start("a", range(10, 18))
    toy.decode("a", steps=5)
    toy = ToyEngine(settings={"mode": "log"})
    toy.start("a", range(10, 18))
    toy.poke(3, 0)
    toy.canary.allocated([0], request="b")
    toy.decode("a", steps=5)
    toy.canary.sweep()
    assert toy.sink.violations


def test_an_abandoned_step_leaves_its_slots_unwritten() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14), blocks=2)
    toy.requests["a"].tokens += [5, 6]
    step, _ = toy.plan(Row(request="a"))
    toy.canary.before_forward(step)
    toy.canary.abandon_step()
    toy.canary.after_forward()
    toy.step(Row(request="a", start=5))
    assert facts(only(toy), "kind", "position") == (Kind.UNWRITTEN, 4)


def test_an_abandoned_step_can_be_repeated() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 14), blocks=2)
    toy.requests["a"].tokens.append(5)
    step, _ = toy.plan(Row(request="a"))
    toy.canary.before_forward(step)
    toy.canary.abandon_step()
    toy.step(Row(request="a"))
    toy.decode("a", steps=2)
    assert toy.sink.violations == []


# Reports


def test_more_violations_than_fit_are_counted_as_lost() -> None:
    blocks = RING_CAPACITY // 16 + 10
    toy = ToyEngine(blocks=blocks, block_size=16, settings={"content": "off"})
    toy.start("a", range(16 * (blocks - 1)), blocks=blocks)
    # Every token read is another one than the request has.
    toy.requests["a"].tokens[:] = [token + 1 for token in toy.requests["a"].tokens]
    toy.requests["a"].tokens.append(3)
    toy.step(Row(request="a"))
    read = 16 * (blocks - 1)
    assert len(toy.sink.violations) == RING_CAPACITY
    assert toy.sink.lost == read - RING_CAPACITY
    assert toy.sink.failed()["token"] == read


def token_leaks(toy: ToyEngine, token: int) -> bool:
    return str(token) in json.dumps([dataclasses.asdict(violation) for violation in toy.sink.violations])


def engine_with_every_token_fault(**settings: Any) -> ToyEngine:
    """Token 77077 read for 88088, written for 88088, and written over it while shared and in one step."""
    toy = ToyEngine(reports_ownership=False, settings=settings)
    toy.start("a", [77077, 1, 2, 3], blocks=3)
    toy.requests["a"].tokens[0] = 88088
    toy.requests["a"].tokens += [88088, 4]
    toy.step(Row(request="a", tokens=[77077]))
    for name, token in (("b", 77077), ("c", 88088)):
        toy.request(name, [token])
    toy.allocate("b", 1)
    toy.requests["c"].tables[0] = list(toy.requests["b"].tables[0])
    toy.step(Row(request="b"), Row(request="c"))
    return toy


def test_token_ids_appear_as_keyed_hashes_only() -> None:
    toy = engine_with_every_token_fault()
    assert toy.sink.kinds() == [Kind.TOKEN, Kind.TOKEN, Kind.OWNERSHIP]
    assert not token_leaks(toy, 77077)
    assert not token_leaks(toy, 88088)
    texts = {text for v in toy.sink.violations for text in (v.expected, v.found)}
    assert len(texts) == 2, "equal tokens have equal hashes within a process"
    assert all(str(text).startswith("hash:") for text in texts)


def test_token_hashes_of_two_processes_differ() -> None:
    first, second = engine_with_every_token_fault(), engine_with_every_token_fault()
    assert {v.expected for v in first.sink.violations}.isdisjoint(v.expected for v in second.sink.violations)


def test_token_ids_are_in_clear_when_asked_for() -> None:
    toy = engine_with_every_token_fault(reveal_tokens=True)
    assert toy.sink.violations[0].expected == "88088"
    assert toy.sink.violations[0].found == "77077"


def test_a_reported_chain_does_not_give_the_tokens_away_to_whoever_tries_them_all() -> None:
    toy = ToyEngine(reports_ownership=False, known_tokens=False)
    toy.start("a", [1234, 5, 6, 7])
    toy.start("b", [4321, 5, 6, 7])
    toy.canary._records[0].chain[toy.slot("a", 1)] = toy.canary._records[0].chain[toy.slot("b", 1)]
    toy.decode("a")
    reported = {text for v in toy.sink.violations for text in (v.expected, v.found)}
    vocabulary = torch.arange(5000)
    chains = (mix(vocabulary, torch.zeros_like(vocabulary)) + chain_seed(None, 0)).tolist()
    guessed = [token for token, chain in enumerate(chains) if f"{chain % 2**64:016x}" in reported]
    assert guessed == []


def test_every_report_is_plain_data() -> None:
    toy = engine_with_every_token_fault()
    for violation in toy.sink.violations:
        assert json.loads(json.dumps(dataclasses.asdict(violation)))["kind"] == str(violation.kind)


def test_each_pass_names_its_phase_and_step_and_hands_over_what_was_reported_since() -> None:
    toy = ToyEngine(settings={"sweep_slots_per_step": 4})
    toy.start("a", range(10, 14), blocks=3)
    toy.poke(toy.slot("a", 0), 0)
    toy.decode("a", steps=2)
    assert [(phase, step) for phase, step, *_ in toy.sink.passes] == list(
        itertools.product(("verify", "record", "sweep"), [1])
    ) + list(itertools.product(("verify", "record", "sweep"), [2])) + list(
        itertools.product(("verify", "record", "sweep"), [3])
    )
    handed = [violation for _, _, _, violations in toy.sink.passes for violation in violations]
    assert handed == toy.sink.violations


def test_a_pass_counts_the_slots_that_it_compared() -> None:
    toy = ToyEngine()
    toy.start("a", range(10, 17))
    toy.decode("a")
    phase, _, counts, _ = toy.sink.passes[-2]
    assert phase == "verify"
    assert counts.slots == {
        "write": (1, 0),
        "address": (7, 0),
        "ownership": (7, 0),
        "unwritten": (7, 0),
        "position": (7, 0),
        "token": (7, 0),
        "chain": (7, 0),
        "content": (7 * 4, 0),
    }
    phase, _, counts, _ = toy.sink.passes[-1]
    assert phase == "record"
    assert counts.slots == {"lost_write": (1, 0), "nonfinite": (1, 0)}
