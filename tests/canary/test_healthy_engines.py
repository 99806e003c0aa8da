"""Everything that healthy engines do is silent, in every layout; and every byte of every layout is watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.canary import Kind
from tests.canary.toy import LAYOUTS, Row, ToyEngine

CONTENTS = ["full", "scrub", "off"]


def engine(layout: str, **options: Any) -> ToyEngine:
    """A toy engine whose patrol covers its whole pool within a few steps."""
    content = options.pop("content", "full")
    return ToyEngine(layout, settings={"content": content, "sweep_slots_per_step": 64, "scrub_period": 4}, **options)


def assert_silent(toy: ToyEngine) -> None:
    toy.canary.sweep()
    assert toy.sink.violations == []
    assert toy.sink.failed() == {}
    assert toy.sink.lost == 0
    assert all(reported == () for _, _, _, reported in toy.sink.passes)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_and_decode(layout: str, content: str) -> None:
    toy = engine(layout, content=content)
    toy.start("a", range(10, 17))
    toy.start("b", range(30, 33))
    toy.decode("a", "b", steps=6)
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_null_block_of_finite_garbage(layout: str) -> None:
    toy = engine(layout, null_block=0)
    for part in range(len(toy.groups[0].parts)):
        toy.poke(1, part, byte=0, mask=0x11)
    toy.start("a", range(10, 17))
    toy.decode("a", steps=3)
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunked_prefill_beside_a_decode(layout: str) -> None:
    toy = engine(layout)
    toy.start("a", range(5))
    toy.request("b", range(100, 111))
    toy.allocate("b", 3)
    for chunk in (1, 5, 2, 3):
        toy.requests["a"].tokens.append(7)
        if toy.requests["a"].computed % 4 == 0:
            toy.allocate("a", 1)
        toy.step(Row(request="a"), Row(request="b", count=chunk))
    toy.decode("a", "b", steps=3)
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shared_prefix(layout: str) -> None:
    toy = engine(layout)
    toy.start("a", range(10, 22))
    toy.request("b", [*range(10, 18), 500, 501])
    toy.share("b", "a", 2)
    toy.allocate("b", 1)
    toy.step(Row(request="b", count=2))
    toy.decode("a", "b", steps=3)
    toy.free("a", cached=True, recycle=False)
    toy.decode("b", steps=3)
    assert_silent(toy)


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chain_of_rows_that_share_what_the_one_before_writes_in_the_same_step(
    layout: str, order: tuple[str, ...]
) -> None:
    toy = engine(layout)
    toy.request("a", range(10, 18))
    toy.request("b", [*range(10, 18), *range(40, 44)])
    toy.request("c", [*range(10, 18), *range(40, 44), 60, 61])
    toy.allocate("a", 2)
    toy.share("b", "a", 2)
    toy.allocate("b", 1)
    toy.share("c", "b", 3)
    toy.allocate("c", 1)
    counts = {"a": 8, "b": 4, "c": 2}
    toy.step(*[Row(request=name, count=counts[name]) for name in order])
    toy.decode("a", "b", "c", steps=5)
    assert_silent(toy)


def test_bytes_that_are_about_to_be_written_are_not_compared_with_what_was_there_before() -> None:
    toy = ToyEngine(settings={"content": "scrub", "scrub_period": 1})
    for first in (10, 50):
        toy.request("a", range(first, first + 8))
        toy.request("b", range(first, first + 9))
        toy.allocate("a", 2)
        toy.share("b", "a", 2)
        toy.allocate("b", 1)
        toy.step(Row(request="a", count=8), Row(request="b"))
        toy.decode("a", "b")
        toy.free("a", recycle=False)
        toy.free("b")
        if first == 10:
            # What lies in a free block is the engine's to change.
            toy.poke(0, 0)
    assert_silent(toy)


def test_a_long_chain_of_rows_that_share_within_one_step() -> None:
    toy = engine("token_major", blocks=40)
    tokens = list(range(100, 180))
    names = [f"r{index:02}" for index in range(17)]
    rows = []
    for index, name in enumerate(names):
        toy.request(name, tokens[: 4 * (index + 1)])
        if index:
            toy.share(name, names[index - 1], index)
        toy.allocate(name, 1)
        rows.append(Row(request=name, count=4))
    toy.step(*reversed(rows))
    toy.decode(*names, steps=1)
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_hit_that_computes_its_last_token_again(layout: str) -> None:
    toy = engine(layout)
    toy.start("a", range(10, 18))
    toy.request("b", range(10, 18))
    toy.share("b", "a", 2)
    toy.step(Row(request="b", start=7))
    toy.decode("a", "b", steps=2)
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_full_hits_that_compute_the_same_last_token_in_one_step(layout: str) -> None:
    toy = engine(layout)
    toy.start("a", range(10, 18))
    for name in ("b", "c"):
        toy.request(name, range(10, 18))
        toy.share(name, "a", 2)
    toy.step(Row(request="b", start=7), Row(request="c", start=7))
    toy.decode("a", "b", "c", steps=2)
    assert_silent(toy)


def test_a_hit_that_skips_the_write_of_its_recomputed_token_because_it_is_there_already() -> None:
    toy = engine("token_major")
    toy.start("a", range(10, 18))
    toy.request("b", [*range(10, 18), 500])
    toy.share("b", "a", 2)
    toy.allocate("b", 1)
    toy.step(Row(request="b", start=7, count=2, slots=[-1, toy.slot("b", 8)]))
    toy.decode("b", steps=2)
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rejected_draft_tokens_and_others_in_their_place(layout: str) -> None:
    toy = engine(layout)
    request = toy.start("a", range(10, 16), blocks=4)
    for accepted in (0, 1, 2, 3):
        kept = len(request.tokens)
        request.tokens += [900 + accepted, 901, 902]
        toy.step(Row(request="a", count=3))
        del request.tokens[kept + min(accepted, 2) :]
        request.computed = len(request.tokens)
        toy.canary.rolled_back("a", len(request.tokens))
        toy.decode("a")
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_preemption_and_recomputation_into_other_blocks(layout: str) -> None:
    toy = engine(layout)
    toy.start("a", range(10, 17))
    toy.start("b", range(30, 37))
    toy.decode("a", "b", steps=2)
    toy.free("b")
    toy.start("c", range(50, 58))
    request = toy.requests["b"]
    toy.allocate("b", 3)
    toy.step(Row(request="a", count=0), Row(request="b", count=len(request.tokens)))
    toy.decode("a", "b", "c", steps=3)
    assert_silent(toy)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 9])
def test_a_sliding_window_whose_blocks_are_recycled_behind_it(window: int) -> None:
    toy = engine("two_groups_over_one_storage", window=window, blocks=60)
    toy.start("a", range(10, 13))
    recycled = 0
    for round_ in range(20):
        toy.decode("a")
        request = toy.requests["a"]
        behind = max(0, request.computed - window + 1) // toy.block_size
        while recycled < behind:
            toy.give_back(1, [request.tables[1][recycled]], "a")
            request.tables[1][recycled] = 0
            recycled += 1
        if round_ % 4 == 0:
            # Someone else computes, and frees, in what was given back.
            toy.start(f"b{round_}", range(70, 74))
            toy.free(f"b{round_}")
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_copied_on_write(layout: str) -> None:
    toy = engine(layout)
    toy.start("a", range(10, 16))
    b = toy.request("b", range(10, 16))
    toy.share("b", "a", 1)
    toy.allocate("b", 1)
    for group, table in enumerate(b.tables):
        source, target = toy.requests["a"].tables[group][1], table[1]
        for part in toy.groups[group].parts:
            part.view[target] = part.view[source]
        toy.canary.copied([source], [target], group=group)
    b.computed = 6
    toy.requests["a"].tokens.append(1)
    b.tokens.append(2)
    toy.step(Row(request="a"), Row(request="b"))
    toy.decode("a", "b", steps=3)
    assert_silent(toy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_go_to_another_tier_and_come_back(layout: str) -> None:
    toy = engine(layout)
    toy.start("a", range(10, 20))
    saved = []
    for group, table in enumerate(toy.requests["a"].tables):
        toy.canary.stored("a", table, group=group)
        saved.append([part.view[table].clone() for part in toy.groups[group].parts])
    toy.free("a")
    toy.start("b", range(50, 60))
    a = toy.requests["a"]
    toy.allocate("a", 3)
    for group, table in enumerate(a.tables):
        for part, values in zip(toy.groups[group].parts, saved[group], strict=True):
            part.view[table] = values
        toy.canary.loaded("a", table, group=group, request="a")
    a.computed = 10
    toy.decode("a", "b", steps=3)
    assert_silent(toy)


def test_other_namespaces_and_new_weights_for_requests_that_share_nothing() -> None:
    toy = engine("token_major")
    toy.start("a", range(10, 17), namespace="lora-a")
    toy.start("b", range(10, 17), namespace="lora-b")
    toy.start("c", range(10, 17))
    toy.decode("a", "b", "c", steps=2)
    for name in "abc":
        toy.free(name)
    toy.epoch = 1
    toy.canary.weights_changed()
    toy.start("d", range(10, 17))
    toy.decode("d", steps=2)
    assert_silent(toy)


def test_a_pool_that_was_emptied_and_used_again() -> None:
    toy = engine("token_major")
    toy.start("a", range(10, 17))
    toy.free("a")
    toy.canary.reset()
    for part in toy.groups[0].parts:
        part.view.zero_()
    toy.start("b", range(30, 37))
    toy.decode("b", steps=2)
    assert_silent(toy)


def test_a_new_allocator_over_a_pool_that_was_emptied() -> None:
    toy = engine("token_major")
    toy.start("a", range(10, 17))
    toy.canary.reset()
    toy.free_blocks = list(range(24))
    toy.start("b", range(30, 37))
    toy.decode("b", steps=2)
    assert_silent(toy)


def test_an_engine_whose_events_and_tokens_are_unknown() -> None:
    toy = engine("token_major", reports_ownership=False, known_tokens=False)
    toy.start("a", range(10, 17))
    toy.decode("a", steps=9)
    assert_silent(toy)


def test_what_lies_in_freed_blocks_is_nobodys_business() -> None:
    toy = engine("token_major")
    toy.start("a", range(10, 18))
    slot = toy.slot("a", 3)
    toy.free("a", cached=False)
    toy.poke(slot, 0)
    assert_silent(toy)


@pytest.mark.parametrize("engine_in_inference_mode", [True, False])
@pytest.mark.parametrize("made_in_inference_mode", [True, False])
@pytest.mark.parametrize("layout", ["token_major", "k_transposed", "fp8_with_head_scales"])
def test_in_and_outside_inference_mode(
    layout: str, made_in_inference_mode: bool, engine_in_inference_mode: bool
) -> None:
    with torch.inference_mode(made_in_inference_mode):
        toy = engine(layout, blocks=80)
        toy.start("a", range(10, 17))
    if not made_in_inference_mode or engine_in_inference_mode:
        # Outside inference mode nobody may write to a pool that was made in it.
        with torch.inference_mode(engine_in_inference_mode):
            toy.decode("a", steps=3)
            for number in range(40):
                toy.start(f"r{number}", range(30, 34))
    toy.free("a")
    toy.canary.sweep()
    assert toy.sink.violations == []


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_healthy_history_is_silent(data: st.DataObject) -> None:
    """Requests of a small vocabulary arrive, hit each other's prefixes, run in chunks, are preempted and leave."""
    toy = engine(data.draw(st.sampled_from(sorted(LAYOUTS))), blocks=64)
    live: list[str] = []
    for number in range(data.draw(st.integers(1, 6))):
        name = f"r{number}"
        tokens = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=14))
        toy.request(name, tokens)
        for donor in live:
            blocks = 0
            shared = min(toy.requests[donor].computed, len(tokens) - 1) // toy.block_size
            while (
                blocks < shared
                and toy.requests[donor].tokens[blocks * 4 : blocks * 4 + 4] == tokens[blocks * 4 : blocks * 4 + 4]
            ):
                blocks += 1
            if blocks:
                toy.share(name, donor, blocks)
                break
        toy.allocate(name, -(-len(tokens) // toy.block_size) - len(toy.requests[name].tables[0]))
        while toy.requests[name].computed < len(tokens):
            left = len(tokens) - toy.requests[name].computed
            others = [other for other in live if data.draw(st.booleans())]
            for other in others:
                request = toy.requests[other]
                request.tokens.append(data.draw(st.integers(1, 2)))
                if request.computed == len(request.tables[0]) * toy.block_size:
                    toy.allocate(other, 1)
            chunk = data.draw(st.integers(1, left))
            rows = [Row(request=name, count=chunk), *[Row(request=other) for other in others]]
            toy.step(*data.draw(st.permutations(rows)))
        live.append(name)
        if data.draw(st.integers(0, 3)) == 0:
            toy.free(live.pop(0), cached=data.draw(st.booleans()), recycle=False)
    toy.canary.sweep()
    assert toy.sink.violations == []


# Every byte counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flip_in_any_part_layer_and_byte_is_named_once(layout: str) -> None:
    toy = engine(layout, blocks=40)
    toy.start("a", range(10, 80))
    parts = toy.groups[0].parts
    wanted = []
    for index, part in enumerate(parts):
        for byte in range(part.bytes_per_slot):
            slot = toy.slot("a", byte)
            toy.poke(slot, index, byte=byte, mask=1 << byte % 8)
            # A flip may make an 8-bit float a NaN, which is the more specific finding.
            number = part.view[slot // 4, slot % 4].float()
            kind = Kind.CONTENT if bool(number.isfinite().all()) else Kind.NONFINITE
            wanted.append((kind, part.layer, part.part, slot, slot // 4, slot % 4, "a", 1, byte))
    toy.canary.sweep()
    toy.canary.sweep()
    found = [
        (v.kind, v.layer, v.part, v.slot, v.block, v.offset, v.writer, v.written_step, v.recorded_position)
        for v in toy.sink.violations
        if v.group == toy.groups[0].name
    ]
    assert sorted(found) == sorted(wanted)
    assert all(violation.request is None and violation.position is None for violation in toy.sink.violations)
