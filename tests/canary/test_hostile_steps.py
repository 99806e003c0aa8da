"""Steps that no tidy engine makes, and a few that real ones do: the canary neither fails nor cries wolf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.canary import ForwardStep, GroupStep, Kind, KnownTokens
from tests.canary.toy import LAYOUTS, Row, ToyEngine

Change = Callable[[ForwardStep], ForwardStep]


def decode_with(toy: ToyEngine, change: Change, *names: str) -> None:
    """One decode of a step whose description was changed."""
    for name in names:
        request = toy.requests[name]
        request.tokens.append(5 + len(request.tokens))
    step, writes = toy.plan(*[Row(request=name) for name in names])
    toy.canary.before_forward(change(step))
    toy.forward(writes)
    for name in names:
        toy.requests[name].computed += 1
    toy.canary.after_forward()


def two_requests(null_block: int | None = None) -> ToyEngine:
    toy = ToyEngine(settings={"sweep_slots_per_step": 16}, null_block=null_block)
    toy.start("a", range(10, 17), blocks=5)
    toy.start("b", range(30, 33), blocks=3)
    return toy


def each_group(change: Callable[[GroupStep], GroupStep]) -> Change:
    return lambda step: dataclasses.replace(step, groups=[change(group) for group in step.groups])


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(step: ForwardStep) -> ForwardStep:
        known = step.known_tokens
        assert known is not None
        assert known.lengths is not None
        return dataclasses.replace(
            step,
            prefix_lens=change(step.prefix_lens),
            query_offsets=change(step.query_offsets),
            token_ids=change(step.token_ids),
            positions=change(step.positions),
            groups=[
                GroupStep(block_table=change(group.block_table), write_slots=change(group.write_slots))
                for group in step.groups
            ],
            known_tokens=KnownTokens(
                tokens=change(known.tokens), rows=change(known.rows), lengths=change(known.lengths)
            ),
        )

    return changed


def with_garbage(value: int) -> Callable[[GroupStep], GroupStep]:
    """Entries beyond what the requests reach, and 40 further columns, hold ``value``."""

    def change(group: GroupStep) -> GroupStep:
        table = torch.full((2, group.block_table.shape[1] + 40), value, dtype=group.block_table.dtype)
        table[0, :3] = group.block_table[0, :3]
        table[1, :2] = group.block_table[1, :2]
        return dataclasses.replace(group, block_table=table)

    return change


@pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1, 24, 1, 0])
def test_garbage_in_unused_columns_of_the_block_table(value: int) -> None:
    toy = two_requests()
    for _ in range(3):
        decode_with(toy, each_group(with_garbage(value)), "a", "b")
    assert toy.sink.violations == []


def test_a_block_table_of_10_000_columns() -> None:
    toy = two_requests()
    wide = each_group(
        lambda group: dataclasses.replace(
            group, block_table=torch.nn.functional.pad(group.block_table, (0, 10_000), value=-7)
        )
    )
    decode_with(toy, wide, "a", "b")
    assert toy.sink.violations == []


def test_a_block_table_as_narrow_as_what_is_used() -> None:
    toy = two_requests()
    narrow = each_group(lambda group: dataclasses.replace(group, block_table=group.block_table[:, :2]))
    decode_with(toy, narrow, "a", "b")
    assert toy.sink.violations == []


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_tensors_of_any_integer_type(dtype: torch.dtype) -> None:
    toy = two_requests()
    for _ in range(2):
        decode_with(toy, each_tensor(lambda tensor: tensor.to(dtype)), "a", "b")
    assert toy.sink.violations == []


def test_tensors_that_lie_scattered() -> None:
    toy = two_requests()

    def scattered(tensor: torch.Tensor) -> torch.Tensor:
        apart = torch.full((*tensor.shape, 3), -99, dtype=tensor.dtype)
        apart[..., 1] = tensor
        return apart[..., 1].t().contiguous().t() if tensor.dim() == 2 else apart[..., 1]

    for _ in range(2):
        decode_with(toy, each_tensor(scattered), "a", "b")
    assert toy.sink.violations == []


def test_slices_of_the_engine_s_longer_buffers() -> None:
    toy = two_requests()

    def sliced(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.full([2 * size + 1 for size in tensor.shape], 77, dtype=tensor.dtype)
        view = buffer[tuple(slice(size) for size in tensor.shape)]
        view.copy_(tensor)
        return view

    for _ in range(2):
        decode_with(toy, each_tensor(sliced), "a", "b")
    assert toy.sink.violations == []


def test_the_engine_s_tensors_are_not_written_to() -> None:
    toy = two_requests()
    toy.requests["a"].tokens.append(5)
    step, _ = toy.plan(Row(request="a"), pad_slots=[-1])
    tensors = [
        step.prefix_lens,
        step.query_offsets,
        step.token_ids,
        step.positions,
        step.groups[0].block_table,
        step.groups[0].write_slots,
        step.groups[0].pad_slots,
    ]
    before = [tensor.clone() for tensor in tensors if tensor is not None]
    pool = [part.view.clone() for part in toy.groups[0].parts]
    toy.canary.before_forward(step)
    toy.canary.after_forward()
    toy.canary.sweep()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True) if b is not None)
    assert all(torch.equal(a, part.view) for a, part in zip(pool, toy.groups[0].parts, strict=True))


# Who is in the batch


def test_rows_without_new_tokens_only_read() -> None:
    toy = two_requests()
    toy.step(Row(request="a", count=0), Row(request="b", count=0))
    toy.decode("a", "b")
    assert toy.sink.violations == []
    toy.poke(toy.slot("b", 1), 0)
    toy.step(Row(request="a", count=0), Row(request="b", count=0))
    assert [(v.kind, v.request) for v in toy.sink.violations] == [(Kind.CONTENT, "b")]


def test_rows_that_read_nothing_and_write_nothing() -> None:
    toy = two_requests()
    toy.request("c", [1, 2])
    toy.step(Row(request="c", count=0), Row(request="a", count=0), Row(request="c", count=0, start=0))
    assert toy.sink.violations == []


@pytest.mark.parametrize("width", [0, 1, 7])
@pytest.mark.parametrize("content", ["full", "scrub", "off"])
def test_a_step_without_rows(width: int, content: str) -> None:
    toy = ToyEngine(settings={"content": content, "sweep_slots_per_step": 16}, null_block=0)
    nothing = torch.zeros(0, dtype=torch.int32)
    step = ForwardStep(
        requests=[],
        prefix_lens=nothing,
        query_offsets=torch.zeros(1, dtype=torch.int32),
        token_ids=nothing,
        positions=nothing,
        groups=[GroupStep(block_table=torch.zeros(0, width, dtype=torch.int32), write_slots=nothing)],
        known_tokens=KnownTokens(tokens=torch.zeros(0, width, dtype=torch.int32), rows=nothing, lengths=nothing),
        namespaces=[],
    )
    toy.canary.before_forward(step)
    toy.canary.after_forward()
    toy.start("a", range(10, 14))
    assert toy.sink.violations == []


def test_a_first_step_whose_rows_have_no_blocks_and_no_tokens() -> None:
    toy = ToyEngine()
    toy.request("a", [])
    toy.step(Row(request="a", count=0))
    assert toy.sink.violations == []


def test_a_request_twice_in_a_step() -> None:
    # Two branches of one request that share its blocks: both compute the same token.
    toy = two_requests()
    toy.requests["a"].tokens.append(9)
    toy.step(Row(request="a"), Row(request="a", start=7))
    toy.requests["a"].computed = 8
    toy.decode("a", "b", steps=2)
    assert toy.sink.violations == []


def test_a_request_twice_in_a_step_in_two_pieces() -> None:
    toy = two_requests()
    toy.requests["a"].tokens += [9, 8]
    toy.step(Row(request="a", start=8), Row(request="a", start=7))
    toy.requests["a"].computed = 9
    toy.decode("a", "b", steps=2)
    assert toy.sink.violations == []


def test_a_name_that_comes_back_for_another_request() -> None:
    toy = ToyEngine()
    for number in range(5):
        toy.start("same", range(10 + number, 17 + number))
        toy.decode("same", steps=2)
        toy.free("same")
    assert toy.sink.violations == []


def test_before_forward_twice_without_an_end_between() -> None:
    toy = two_requests()
    toy.requests["a"].tokens.append(9)
    step, _ = toy.plan(Row(request="a"))
    toy.canary.before_forward(step)
    toy.step(Row(request="a"))
    toy.canary.after_forward()
    toy.decode("a", "b")
    assert toy.sink.violations == []


# Known tokens


@pytest.mark.parametrize("width", [0, 1, 3, 7])
def test_histories_shorter_than_the_positions(width: int) -> None:
    toy = two_requests()

    def short(step: ForwardStep) -> ForwardStep:
        known = step.known_tokens
        assert known is not None
        return dataclasses.replace(step, known_tokens=KnownTokens(tokens=known.tokens[:, :width], rows=known.rows))

    for _ in range(2):
        decode_with(toy, short, "a", "b")
    assert toy.sink.violations == []


def test_histories_that_are_unknown_in_places() -> None:
    toy = two_requests()

    def holes(step: ForwardStep) -> ForwardStep:
        known = step.known_tokens
        assert known is not None
        tokens = known.tokens.clone()
        tokens[:, 1::2] = -1
        return dataclasses.replace(step, known_tokens=dataclasses.replace(known, tokens=tokens))

    decode_with(toy, holes, "a", "b")
    assert toy.sink.violations == []
    toy.requests["a"].tokens[2:4] = [900, 901]
    decode_with(toy, holes, "a", "b")
    assert [(v.kind, v.position) for v in toy.sink.violations] == [(Kind.TOKEN, 2)]


def test_histories_that_lie_in_other_rows() -> None:
    toy = two_requests()

    def elsewhere(step: ForwardStep) -> ForwardStep:
        known = step.known_tokens
        assert known is not None
        tokens = torch.full((9, known.tokens.shape[1] + 100), 12345)
        rows = torch.tensor([7, 3], dtype=torch.int32)
        tokens[rows.long(), : known.tokens.shape[1]] = known.tokens.long()
        return dataclasses.replace(step, known_tokens=dataclasses.replace(known, tokens=tokens, rows=rows))

    decode_with(toy, elsewhere, "a", "b")
    assert toy.sink.violations == []


def test_negative_token_ids_are_no_tokens_that_a_request_could_differ_from() -> None:
    # Placeholders of a multimodal input.
    toy = ToyEngine()
    toy.start("a", [10, -1, -1, 13, 14], blocks=3)
    toy.decode("a", steps=2)
    assert toy.sink.violations == []


@pytest.mark.parametrize("token", [2**31 - 1, 2**31, 2**40])
def test_token_ids_beyond_32_bits(token: int) -> None:
    toy = ToyEngine()
    toy.request("a", [10, token, 12])
    toy.allocate("a", 2)
    tokens = torch.tensor([[10, token, 12]])

    def large(step: ForwardStep) -> ForwardStep:
        known = KnownTokens(tokens=tokens, rows=torch.tensor([0]), lengths=torch.tensor([3]))
        ids = tokens[0, step.positions]
        return dataclasses.replace(step, token_ids=ids, known_tokens=known)

    toy.requests["a"].tokens = [10, 11, 12]
    for count in (2, 1):
        step, writes = toy.plan(Row(request="a", count=count))
        toy.canary.before_forward(large(step))
        toy.forward(writes)
        toy.canary.after_forward()
        toy.requests["a"].computed += count
    assert toy.sink.violations == []


# Small worlds


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_one_slot(layout: str) -> None:
    toy = ToyEngine(layout, block_size=1, blocks=60, settings={"sweep_slots_per_step": 1})
    toy.start("a", range(10, 17))
    toy.start("b", range(30, 33))
    toy.decode("a", "b", steps=5)
    assert toy.sink.violations == []
    toy.poke(toy.slot("a", 6), 0)
    toy.decode("a")
    assert (toy.sink.violations[0].kind, toy.sink.violations[0].position) == (Kind.CONTENT, 6)


@pytest.mark.parametrize("content", ["full", "scrub"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_pool_of_one_block(block_size: int, content: str) -> None:
    toy = ToyEngine(
        blocks=1, block_size=block_size, settings={"content": content, "scrub_period": 1, "sweep_slots_per_step": 1000}
    )
    for _ in range(3):
        toy.start("a", range(10, 10 + block_size))
        toy.step(Row(request="a", count=0))
        toy.free("a")
    assert toy.sink.violations == []


def test_a_prefill_of_the_whole_pool() -> None:
    toy = ToyEngine(blocks=64, block_size=16, settings={"sweep_slots_per_step": 10**6})
    toy.start("a", range(1024), blocks=64)
    toy.step(Row(request="a", count=0))
    assert toy.sink.violations == []


# Wrong numbers must not bring the canary down


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_numbers_the_tensors_hold_a_step_is_checked_and_never_fails(data: st.DataObject) -> None:
    toy = two_requests(null_block=23)
    wild = st.sampled_from([-(2**31), -97, -2, -1, 0, 1, 3, 5, 22, 23, 24, 95, 96, 2**20, 2**31 - 1])

    def disturbed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        flat = tensor.view(-1)
        for at in data.draw(st.lists(st.integers(0, max(0, flat.numel() - 1)), max_size=2)):
            flat[at] = data.draw(wild)
        return tensor

    def change(step: ForwardStep) -> ForwardStep:
        known = step.known_tokens
        assert known is not None
        return dataclasses.replace(
            step,
            prefix_lens=disturbed(step.prefix_lens).clamp(0, 200),
            token_ids=disturbed(step.token_ids),
            positions=disturbed(step.positions),
            groups=[
                GroupStep(
                    block_table=disturbed(group.block_table),
                    write_slots=disturbed(group.write_slots),
                    pad_slots=disturbed(torch.tensor([-1, 23 * 4])),
                )
                for group in step.groups
            ],
            known_tokens=dataclasses.replace(known, tokens=disturbed(known.tokens)),
        )

    for _ in range(3):
        decode_with(toy, change, "a", "b")
    toy.canary.sweep()
    for violation in toy.sink.violations:
        assert -1 <= violation.slot < 96
        assert (violation.block, violation.offset) == (divmod(violation.slot, 4) if violation.slot >= 0 else (-1, -1))
