"""Caches that are one tensor per layer, a row for each sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary_agent.canary import Kind, KVCanaryError
from kvcanary_agent.canary.tensor_cache import TensorCache, TensorCaches
from kvcanary_agent.settings import Settings
from tests.canary.toy import RecordingSink

ROWS, HEADS, DIM = 3, 2, 8


class Layer:
    """One layer's keys in a cache that grows, and what the canary is told of it."""

    def __init__(self, sink: RecordingSink, **settings: object) -> None:
        self.caches = TensorCaches("caches", replace(Settings(content="full"), **settings), sink)  # type: ignore[arg-type]
        self.cache: TensorCache = self.caches.open()
        self.keys = torch.empty(ROWS, HEADS, 0, DIM)

    def step(self, new: int = 1, *, window: int | None = None) -> None:
        """``new`` columns come; of all, only the last ``window`` stay."""
        self.cache.begin_step(ROWS, new, 1)
        follows = self.cache.follows("layers.0", "k", self.keys)
        if follows:
            self.cache.verify(0, "layers.0", "k", self.keys, self.keys.shape[2])
        self.keys = torch.cat([self.keys, torch.randn(ROWS, HEADS, new, DIM)], 2)
        if window is not None:
            self.keys = self.keys[:, :, -window:]
        self.cache.appended("layers.0", "k", self.keys, new, follows)
        self.cache.end_step()


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.mark.parametrize("window", [None, 6])
def test_a_byte_that_changes_is_reported_once_for_its_row(sink: RecordingSink, window: int | None) -> None:
    layer = Layer(sink)
    layer.step(5, window=window)
    layer.step(2, window=window)
    assert sink.violations == []

    layer.keys[1, 0, 4, 3] += 1
    layer.step(window=window)
    layer.step(window=window)

    (violation,) = sink.violations
    assert (violation.kind, violation.layer, violation.part) == (Kind.CONTENT, "layers.0", "k")
    assert (violation.block, violation.position, violation.request) == (1, 4, "cache-1.row-1")


def test_scrubbing_sees_it_within_the_period(sink: RecordingSink) -> None:
    layer = Layer(sink, content="scrub", scrub_period=8)
    layer.step(5)
    layer.keys[2, 1, 3, 0] += 1

    for _ in range(8):
        layer.step()

    assert [violation.position for violation in sink.violations] == [3]


def test_rows_and_columns_that_move_take_their_records_along(sink: RecordingSink) -> None:
    layer = Layer(sink)
    layer.step(5)
    order = torch.tensor([2, 0, 2])
    layer.keys = layer.keys.index_select(0, order)
    layer.cache.moved("layers.0", "k", layer.keys, lambda records: records.index_select(0, order))
    layer.step()
    layer.keys = layer.keys[:, :, :-2]
    layer.cache.cropped("layers.0", "k", layer.keys, 2)
    layer.step()
    assert sink.violations == []

    # A reordering in which the layer took no part.
    layer.cache.moved("layers.0", "k", layer.keys, lambda records: records.flip(0))
    layer.step()

    assert [violation.block for violation in sink.violations] == [0, 2]


def test_another_tensor_in_the_place_of_a_recorded_one_is_taken_as_it_is(sink: RecordingSink) -> None:
    layer = Layer(sink)
    layer.step(5)
    layer.keys = torch.randn(ROWS, HEADS, 4, DIM)
    layer.step()
    layer.step()
    assert sink.violations == []

    layer.keys[0, 0, 0, 0] += 1
    layer.step()

    assert [violation.position for violation in sink.violations] == [0]


def test_a_row_that_was_computed_for_other_tokens_is_reported(sink: RecordingSink) -> None:
    layer = Layer(sink)
    tokens = torch.arange(ROWS * 6).view(ROWS, 6)
    layer.cache.expect(tokens[:, :5], 0)
    layer.step(5)
    layer.cache.expect(tokens, 5)
    layer.step()
    assert sink.violations == []

    longer = torch.cat([tokens, tokens[:, :1]], 1)
    longer[1, 2] = 99
    layer.cache.expect(longer, 6)

    assert [(each.kind, each.block, each.position) for each in sink.violations] == [(Kind.TOKEN, 1, 2)]


def test_in_raise_mode_nothing_is_read_before_it_is_compared(sink: RecordingSink) -> None:
    layer = Layer(sink, mode="raise")
    layer.step(5)
    layer.keys[0, 0, 0, 0] += 1

    with pytest.raises(KVCanaryError, match="content"):
        layer.step()


def test_a_tensor_of_fixed_size_is_judged_where_it_was_written(sink: RecordingSink) -> None:
    cache = TensorCaches("caches", Settings(content="full"), sink).open()
    keys = torch.zeros(ROWS, HEADS, 8, DIM)
    for start, new in ((0, 4), (4, 1), (5, 1)):
        cache.begin_step(ROWS, new, 1)
        follows = cache.follows("layers.0", "v", keys, start)
        if follows:
            cache.verify(1, "layers.0", "v", keys, start)
        at = torch.arange(start, start + new)
        keys[:, :, at] = torch.randn(ROWS, HEADS, new, DIM)
        cache.written("layers.0", "v", keys, at, start + new, follows)
        # What nobody reads yet may hold anything.
        keys[:, :, 7] += 1
        cache.end_step()
    assert sink.violations == []

    keys[2, 1, 0, 0] += 1
    cache.begin_step(ROWS, 1, 1)
    cache.verify(1, "layers.0", "v", keys, 6)

    assert [(each.block, each.position, each.part) for each in sink.violations] == [(2, 0, "v")]
