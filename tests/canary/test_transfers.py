"""K/V that another process has computed, and copies that go on while the forward that reads them runs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from kvcanary_agent.canary import Kind
from tests.canary.toy import LAYOUTS, Row, ToyEngine, two_groups_over_one_storage

PROMPT = range(10, 18)
BLOCKS = 2


def produced(layout: str) -> tuple[ToyEngine, list[int], torch.Tensor]:
    """An engine that has computed the prompt, its blocks, and their digests."""
    producer = ToyEngine(layout)
    blocks = producer.start("a", PROMPT, "x").tables[0]
    fingerprints = producer.canary.fingerprints(blocks)
    assert fingerprints is not None
    return producer, blocks, fingerprints


def consuming(layout: str) -> tuple[ToyEngine, list[int]]:
    """An engine that has handed out blocks for the prompt and one token more."""
    consumer = ToyEngine(layout)
    consumer.request("b", [*PROMPT, 99], "x")
    return consumer, consumer.allocate("b", BLOCKS + 1)[:BLOCKS]


def copy_bytes(source: ToyEngine, blocks: Iterable[int], target: ToyEngine, to: Iterable[int]) -> None:
    for block, other in zip(blocks, to, strict=True):
        for part, theirs in zip(target.groups[0].parts, source.groups[0].parts, strict=True):
            part.view[other] = theirs.view[block]


def adopt(toy: ToyEngine, blocks: list[int], fingerprints: torch.Tensor | None, *, complete: bool = True) -> None:
    toy.canary.adopted(blocks, PROMPT, request="b", namespace="x", fingerprints=fingerprints, complete=complete)
    toy.requests["b"].computed = len(PROMPT)


ONE_GROUP = [name for name in LAYOUTS if name != two_groups_over_one_storage.__name__]


@pytest.mark.parametrize("layout", ONE_GROUP)
def test_what_arrives_as_the_other_process_wrote_it_is_read_and_continued_like_ones_own(layout: str) -> None:
    producer, blocks, fingerprints = produced(layout)
    consumer, to = consuming(layout)
    copy_bytes(producer, blocks, consumer, to)
    adopt(consumer, to, fingerprints)
    consumer.decode("b", steps=3)
    assert consumer.sink.violations == []
    consumer.poke(consumer.slot("b", 5), 0)
    consumer.decode("b")
    assert {violation.kind for violation in consumer.sink.violations} == {Kind.CONTENT}


@pytest.mark.parametrize("layout", ONE_GROUP)
def test_a_byte_that_changed_on_the_way_from_another_process_is_a_transfer_fault(layout: str) -> None:
    producer, blocks, fingerprints = produced(layout)
    consumer, to = consuming(layout)
    copy_bytes(producer, blocks, consumer, to)
    consumer.poke(consumer.slot("b", 5), 1)
    adopt(consumer, to, fingerprints)
    (violation,) = consumer.sink.violations
    assert (violation.kind, violation.slot, violation.request) == (Kind.TRANSFER, consumer.slot("b", 5), "b")


def test_without_digests_what_arrives_is_right_as_it_is_but_must_not_change() -> None:
    consumer, to = consuming("token_major")
    adopt(consumer, to, None)
    consumer.decode("b")
    assert consumer.sink.violations == []
    consumer.poke(consumer.slot("b", 5), 0)
    consumer.decode("b")
    assert consumer.sink.kinds() == [Kind.CONTENT]


def test_another_prompt_than_arrived_is_seen_at_the_first_read() -> None:
    producer, blocks, fingerprints = produced("token_major")
    consumer, to = consuming("token_major")
    consumer.requests["b"].tokens[2] = 77
    copy_bytes(producer, blocks, consumer, to)
    adopt(consumer, to, fingerprints)
    consumer.decode("b")
    assert (consumer.sink.violations[0].kind, consumer.sink.violations[0].position) == (Kind.TOKEN, 2)


@pytest.mark.parametrize("stays_wrong", [False, True])
def test_bytes_that_arrive_during_the_forward_are_compared_when_it_is_over(stays_wrong: bool) -> None:
    producer, blocks, fingerprints = produced("token_major")
    consumer, to = consuming("token_major")
    adopt(consumer, to, fingerprints, complete=False)
    consumer.decode("b")
    assert consumer.sink.violations == []
    if not stays_wrong:
        copy_bytes(producer, blocks, consumer, to)
    computed = consumer.requests["b"].computed
    adopt(consumer, to, fingerprints)
    consumer.requests["b"].computed = computed
    consumer.decode("b", steps=2)
    assert set(consumer.sink.kinds()) == ({Kind.TRANSFER} if stays_wrong else set())


@pytest.mark.parametrize("stays_wrong", [False, True])
def test_what_this_process_stored_may_come_back_during_the_forward(stays_wrong: bool) -> None:
    toy = ToyEngine()
    blocks = list(toy.start("a", PROMPT).tables[0])
    toy.canary.stored("key", blocks)
    saved = [part.view[blocks].clone() for part in toy.groups[0].parts]
    for part in toy.groups[0].parts:
        part.view[blocks] = 0
    toy.canary.loaded("key", blocks, request="a", complete=False)
    toy.decode("a")
    assert toy.sink.violations == []
    if not stays_wrong:
        for part, values in zip(toy.groups[0].parts, saved, strict=True):
            part.view[blocks] = values
    toy.canary.loaded("key", blocks, request="a")
    assert set(toy.sink.kinds()) == ({Kind.TRANSFER} if stays_wrong else set())


@pytest.mark.parametrize("swapped", [False, True])
def test_blocks_that_were_stored_together_may_come_back_one_by_one(swapped: bool) -> None:
    toy = ToyEngine()
    blocks = list(toy.start("a", PROMPT).tables[0])
    toy.canary.stored("key", torch.tensor(blocks))
    saved = [part.view[blocks].clone() for part in toy.groups[0].parts]
    to = list(reversed(blocks)) if swapped else blocks
    for part, values in zip(toy.groups[0].parts, saved, strict=True):
        part.view[to] = values

    for place in reversed(range(BLOCKS)):
        toy.canary.loaded("key", torch.tensor([blocks[place]]), picked=[place])

    toy.decode("a")
    assert set(toy.sink.kinds()) == ({Kind.TRANSFER} if swapped else set())


def test_what_comes_back_under_a_key_that_was_discarded_is_not_judged() -> None:
    toy = ToyEngine()
    blocks = toy.start("a", PROMPT).tables[0]
    toy.canary.stored("key", blocks)
    toy.canary.discarded("key")
    for part in toy.groups[0].parts:
        part.view[blocks] = 0

    toy.canary.loaded("key", torch.tensor(blocks), picked=[1, 0])

    assert not toy.canary.has_stored("key")
    toy.decode("a", steps=2)
    assert toy.sink.violations == []


def test_blocks_into_which_something_is_being_copied_are_not_judged_until_they_are_written() -> None:
    consumer, to = consuming("token_major")
    consumer.canary.arriving(to)
    consumer.requests["b"].computed = len(PROMPT)
    consumer.decode("b", steps=3)
    assert consumer.sink.violations == []


@pytest.mark.parametrize("arriving", [True, False])
def test_a_write_over_what_nobody_knows_is_not_lost_because_the_bytes_stay(arriving: bool) -> None:
    toy = ToyEngine()
    request = toy.start("a", PROMPT)
    if arriving:
        toy.canary.arriving(request.tables[0])
    request.tokens[4:] = [50, 51, 52, 53]

    toy.step(Row(request="a", start=4, count=4, drop=range(4, 8)))

    assert set(toy.sink.kinds()) == (set() if arriving else {Kind.LOST_WRITE})


def test_copies_of_what_nobody_knows_are_not_judged_either() -> None:
    consumer, to = consuming("token_major")
    consumer.canary.arriving(to)
    consumer.request("c", [*PROMPT, 98])
    copies = consumer.allocate("c", BLOCKS + 1)[:BLOCKS]

    consumer.canary.copied(to, copies)
    consumer.requests["c"].computed = len(PROMPT)
    consumer.decode("c", steps=3)

    assert consumer.sink.violations == []


def test_blocks_that_are_not_written_in_full_have_no_digests() -> None:
    toy = ToyEngine()
    blocks = toy.start("a", range(10, 17)).tables[0]
    assert toy.canary.fingerprints(blocks) is None
    assert toy.canary.fingerprints(blocks[:1]) is not None


def test_what_arrives_before_the_first_step_may_be_computed_once_more() -> None:
    consumer, to = consuming("token_major")
    adopt(consumer, to, None)
    consumer.requests["b"].computed = len(PROMPT) - 1
    step, _ = consumer.plan(Row(request="b"))
    consumer.canary.before_forward(step)
    # The forward writes what is there already.
    consumer.canary.after_forward()
    assert consumer.sink.violations == []
