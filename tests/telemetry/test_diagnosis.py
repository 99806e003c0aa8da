"""Which cause is named for which evidence."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_agent.canary.violation import BlockEvent, Kind, Violation
from kvcanary_agent.telemetry.diagnosis import Burst, Diagnosis, diagnose_burst
from kvcanary_agent.telemetry.diagnosis import diagnose as diagnose_in
from tests.telemetry.samples import changed_bytes, violation


def diagnose(found: Violation, others: Iterable[Violation], parts: int = 8) -> Diagnosis:
    """The diagnosis of ``found`` next to ``others``, in a pool with so many parts in a slot."""
    return diagnose_in(found, Burst([*others, found], {"full": parts}))


READER, WRITER = "req-reader", "req-writer"


@pytest.mark.parametrize("kind", [Kind.TOKEN, Kind.CHAIN, Kind.POSITION])
def test_another_request_that_got_the_block_after_the_reader_means_double_allocation(kind: Kind) -> None:
    diagnosis = diagnose(violation(kind, block_history=(READER, WRITER)), ())
    assert diagnosis.cause == "double_allocation"
    for fact in ("block 4", READER, WRITER, "step 8", "step 9"):
        assert fact in diagnosis.sentence


@pytest.mark.parametrize("kind", [Kind.TOKEN, Kind.CHAIN])
@pytest.mark.parametrize("history", [(WRITER,), (WRITER, READER), ()])
def test_another_request_that_had_the_block_before_means_a_wrong_prefix_hit(
    kind: Kind, history: tuple[str, ...]
) -> None:
    assert diagnose(violation(kind, block_history=history), ()).cause == "wrong_prefix_hit"


def test_another_position_of_another_request_means_a_foreign_block() -> None:
    found = violation(Kind.POSITION, recorded_position=33, block_history=(WRITER,))
    assert diagnose(found, ()).cause == "foreign_block"


def test_another_position_of_its_own_means_a_stale_block_table() -> None:
    found = violation(Kind.POSITION, writer=READER, recorded_position=33)
    assert diagnose(found, ()).cause == "block_table_swapped"


@pytest.mark.parametrize("kind", [Kind.TOKEN, Kind.CHAIN])
def test_other_tokens_of_its_own_mean_that_its_history_changed(kind: Kind) -> None:
    assert diagnose(violation(kind, writer=READER), ()).cause == "rejected_tokens_kept"


def test_a_slot_nobody_wrote_means_a_read_before_the_write() -> None:
    found = violation(Kind.UNWRITTEN, writer=None, written_step=None, recorded_position=None)
    diagnosis = diagnose(found, ())
    assert diagnosis.cause == "read_before_write"
    assert "since its block was handed out" in diagnosis.sentence


def test_an_address_outside_the_pool_names_the_slot() -> None:
    diagnosis = diagnose(violation(Kind.ADDRESS, slot=-1, block=-1, offset=-1, found="99999"), ())
    assert diagnosis.cause == "address_outside_pool"
    assert "slot 99999" in diagnosis.sentence


def test_a_padded_row_that_writes_to_a_live_slot_is_named_so() -> None:
    assert diagnose(violation(Kind.ADDRESS, request=None, position=None), ()).cause == "padding_writes_live_slot"


def test_an_address_inside_the_pool_means_that_mapping_and_table_disagree() -> None:
    diagnosis = diagnose(violation(Kind.ADDRESS, expected="21"), ())
    assert diagnosis.cause == "slot_mapping_wrong"
    assert "slot 21" in diagnosis.sentence


def test_another_namespace_and_other_weights_are_named_so() -> None:
    assert diagnose(violation(Kind.NAMESPACE), ()).cause == "prefix_shared_across_namespaces"
    assert diagnose(violation(Kind.EPOCH), ()).cause == "cache_survived_weight_update"


def test_one_changed_part_of_one_slot_means_a_stray_write_and_names_layer_and_part() -> None:
    diagnosis = diagnose(changed_bytes(), [violation(Kind.TOKEN)])
    assert diagnosis.cause == "stray_write"
    assert "layer model.layers.3.attn, part k" in diagnosis.sentence


def test_several_changes_in_one_block_mean_that_the_block_was_overwritten() -> None:
    assert diagnose(changed_bytes(), [changed_bytes(slot=18, part="v")]).cause == "block_overwritten"


def test_changes_in_several_blocks_mean_wrong_addresses() -> None:
    assert diagnose(changed_bytes(), [changed_bytes(block=5, slot=20)]).cause == "many_blocks_overwritten"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Kind.OWNERSHIP, "freed_while_in_use"),
        (Kind.WILD_WRITE, "write_outside_the_step"),
        (Kind.LOST_WRITE, "write_dropped"),
        (Kind.NONFINITE, "stray_write"),
        (Kind.TRANSFER, "stray_write"),
        (Kind.INDEX, "prefix_index_wrong"),
        (Kind.RANK, "rank_divergence"),
    ],
)
def test_kinds_that_are_evidence_enough_have_a_cause_of_their_own(kind: Kind, cause: str) -> None:
    assert diagnose(violation(kind, detail="seen so"), ()).cause == cause


def test_what_an_allocator_did_is_told_with_who_is_concerned() -> None:
    found = violation(Kind.OWNERSHIP, position=None, detail="freed by a request that does not hold it")
    diagnosis = diagnose(found, ())
    assert diagnosis.cause == "allocator_misuse"
    for fact in (READER, WRITER, "freed by a request"):
        assert fact in diagnosis.sentence


requests = st.none() | st.sampled_from([READER, WRITER])
small = st.integers(-1, 5)
violations = st.builds(
    Violation,
    kind=st.sampled_from(Kind),
    pool=st.just("kv"),
    group=st.just("full"),
    slot=small,
    block=small,
    offset=small,
    step=small,
    request=requests,
    position=st.none() | small,
    layer=st.none() | st.just("layers.0"),
    part=st.none() | st.just("k"),
    writer=requests,
    written_step=st.none() | small,
    recorded_position=st.none() | small,
    block_history=st.lists(st.sampled_from([READER, WRITER])).map(tuple),
)


@given(violations, st.lists(violations, max_size=5))
def test_every_violation_has_ranked_causes_in_words(found: Violation, recent: list[Violation]) -> None:
    causes = diagnose(found, recent).causes
    assert causes
    confidences = [cause.confidence for cause in causes]
    assert confidences == sorted(confidences, reverse=True)
    assert all(0 < confidence <= 1 for confidence in confidences)
    assert not any("None" in cause.sentence for cause in causes)


def test_a_double_allocation_names_both_requests() -> None:
    detail = f"handed out while {WRITER} still holds it: double allocation"
    diagnosis = diagnose(violation(Kind.OWNERSHIP, position=None, detail=detail), ())
    assert diagnosis.cause == "double_allocation"
    assert f"handed to {READER}" in diagnosis.sentence
    assert f"{WRITER} still holds it" in diagnosis.sentence


def test_positions_that_are_exchanged_are_a_swap_though_another_wrote_them() -> None:
    found = violation(Kind.POSITION, held=True, position=1, recorded_position=5)
    other = violation(Kind.POSITION, held=True, slot=21, block=5, position=5, recorded_position=1)
    assert diagnose(found, [other]).cause == "block_table_swapped"


def test_one_wrong_position_in_a_shared_block_is_a_wrong_hit() -> None:
    assert diagnose(violation(Kind.POSITION, held=True, recorded_position=5), ()).cause == "wrong_prefix_hit"


def test_a_block_that_the_request_never_had_is_a_foreign_one() -> None:
    found = violation(Kind.OWNERSHIP, block_history=(WRITER,), detail="the reading request does not hold the block")
    assert diagnose(found, ()).cause == "foreign_block"


@pytest.mark.parametrize(
    ("event", "cause"), [("shared", "published_before_written"), ("allocated", "read_before_write")]
)
def test_how_the_reader_got_a_block_tells_who_was_to_write_it(event: str, cause: str) -> None:
    events = (BlockEvent(1, "allocated", WRITER), BlockEvent(3, event, READER))
    found = violation(Kind.UNWRITTEN, writer=None, written_step=None, recorded_position=None, block_events=events)
    assert diagnose(found, ()).cause == cause


def test_all_parts_of_a_slot_and_an_earlier_owner_mean_a_late_write() -> None:
    history = ("req-earlier", WRITER, READER)
    found = [changed_bytes(layer=layer, part=part, block_history=history) for layer in "01" for part in "kv"]
    assert diagnose_burst(found, {"full": 4}).cause == "late_write"
    assert diagnose_burst(found, {"full": 8}).cause != "late_write"
    assert "req-earlier" in diagnose_burst(found, {"full": 4}).sentence


def test_the_same_bytes_in_several_slots_mean_that_nothing_arrived_there() -> None:
    slots = [
        violation(Kind.TRANSFER, layer=layer, part=part, slot=slot, found=f"{layer}{part}")
        for layer in "01"
        for part in "kv"
        for slot in (16, 17)
    ]
    assert diagnose_burst(slots, {"full": 4}).cause == "transfer_incomplete"


def test_what_comes_first_explains_what_follows() -> None:
    twice = violation(Kind.OWNERSHIP, step=3, position=None, detail="freed although nobody holds it: double free")
    later = violation(Kind.NAMESPACE, step=4)
    assert diagnose_burst([twice, later], {}).cause == "double_free"
    assert diagnose_burst([later, twice], {}).cause == "prefix_shared_across_namespaces"


def test_what_the_model_computed_itself_is_no_stray_write() -> None:
    assert diagnose(violation(Kind.NONFINITE, written_step=9), ()).cause == "nonfinite_values"
    null_block = violation(
        Kind.NONFINITE, request=None, writer=None, position=None, written_step=None, recorded_position=None
    )
    assert diagnose(null_block, ()).cause == "nonfinite_in_null_block"
