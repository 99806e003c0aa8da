"""A pool that cannot be described is refused in words that name the part, what was found and what is wanted."""

from __future__ import annotations

import pytest
import torch

from kvcanary_agent.canary import KVGroup, KVLayout, KVPart, LayoutError


def part(view: torch.Tensor, name: str = "v", layer: str = "layers.7") -> KVPart:
    return KVPart(layer=layer, part=name, view=view)


GOOD = part(torch.zeros(6, 4, 2, 8), "k")


def layout(*parts: KVPart, block_size: int = 4, null_block: int | None = None, window: int | None = None) -> KVLayout:
    group = KVGroup(name="sliding", block_size=block_size, parts=parts, null_block=null_block, window=window)
    return KVLayout(engine="toy", pool="draft", groups=(group,))


def refusal(*parts: KVPart, **group: int) -> str:
    with pytest.raises(LayoutError) as caught:
        layout(*parts, **group)
    message = str(caught.value)
    assert "'sliding'" in message
    assert "'draft'" in message
    return message


def test_a_pool_without_groups_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"pool 'draft' of toy has no groups"):
        KVLayout(engine="toy", pool="draft", groups=())


def test_a_group_without_parts_is_refused() -> None:
    assert "at least one layer" in refusal()


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_names_it_and_the_minimum(block_size: int) -> None:
    message = refusal(GOOD, block_size=block_size)
    assert f"block_size {block_size}" in message
    assert "at least 1" in message


@pytest.mark.parametrize("shape", [(6, 3, 8), (24,), (), (4, 6, 8)])
def test_a_view_of_another_shape_names_part_shape_and_block_size(shape: tuple[int, ...]) -> None:
    message = refusal(GOOD, part(torch.zeros(shape)))
    assert "layers.7.v" in message
    assert str(shape) in message
    assert "block_size=4" in message


def test_the_first_view_is_checked_like_the_others() -> None:
    assert "layers.7.v" in refusal(part(torch.zeros(())))


def test_another_number_of_blocks_names_part_and_both_numbers() -> None:
    message = refusal(GOOD, part(torch.zeros(5, 4, 2, 8)))
    assert "layers.7.v" in message
    assert "5 blocks" in message
    assert "6" in message


def test_another_device_names_part_and_both_devices() -> None:
    message = refusal(GOOD, part(torch.zeros(6, 4, 2, 8, device="meta")))
    assert "layers.7.v" in message
    assert "meta" in message
    assert "cpu" in message


def test_the_meta_device_has_no_bytes() -> None:
    message = refusal(part(torch.zeros(6, 4, 2, device="meta")))
    assert "layers.7.v" in message
    assert "meta" in message
    assert "no bytes" in message


def test_a_sparse_tensor_names_part_its_layout_and_what_is_wanted() -> None:
    message = refusal(GOOD, part(torch.zeros(6, 4).to_sparse()))
    assert "layers.7.v" in message
    assert "sparse" in message
    assert "strided" in message


@pytest.mark.parametrize("shape", [(6, 4, 0), (6, 4, 2, 0)])
def test_an_empty_payload_names_part_and_shape(shape: tuple[int, ...]) -> None:
    message = refusal(GOOD, part(torch.zeros(shape)))
    assert "layers.7.v" in message
    assert str(shape) in message


def test_a_pool_of_no_blocks_is_refused() -> None:
    assert "(0, 4, 8)" in refusal(part(torch.zeros(0, 4, 8)))


@pytest.mark.parametrize("expanded", [(1, 4, 8), (6, 1, 8), (6, 4, 1)])
def test_slots_that_share_their_bytes_are_refused(expanded: tuple[int, ...]) -> None:
    message = refusal(GOOD, part(torch.zeros(expanded).expand(6, 4, 8)))
    assert "layers.7.v" in message
    assert "stride 0" in message


@pytest.mark.parametrize("null_block", [-1, 6, 100])
def test_a_null_block_outside_the_pool_names_it_and_the_number_of_blocks(null_block: int) -> None:
    message = refusal(GOOD, null_block=null_block)
    assert f"null_block {null_block}" in message
    assert "6 blocks" in message


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_names_it_and_the_minimum(window: int) -> None:
    message = refusal(GOOD, window=window)
    assert f"window {window}" in message
    assert "at least 1" in message


def test_any_strides_and_dtypes_and_an_empty_payload_are_accepted() -> None:
    described = layout(
        GOOD,
        part(torch.zeros(6, 8, 4, dtype=torch.float8_e5m2).transpose(1, 2)),
        part(torch.zeros(4, 6).t(), "k_scale"),
        part(torch.zeros(1000, dtype=torch.uint8).as_strided((6, 4, 10), (97, 11, 1), 5), "kv"),
        null_block=5,
        window=1,
    )
    group = described.groups[0]
    assert (group.num_blocks, group.num_slots) == (6, 24)
    assert [each.bytes_per_slot for each in group.parts] == [64, 8, 4, 10]
    assert group.bytes_per_slot == 86
    assert described.device == torch.device("cpu")


def test_one_block_of_one_slot_is_a_pool() -> None:
    assert layout(part(torch.zeros(1, 1)), block_size=1).groups[0].num_slots == 1
