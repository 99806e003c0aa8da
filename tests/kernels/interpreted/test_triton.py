"""The Triton kernels, in Triton's interpreter on the CPU, give the same bits as the plain reference."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcanary_agent.kernels.checks import Checks
from kvcanary_agent.kernels.records import Column, Records
from kvcanary_agent.kernels.ring import ViolationRing
from kvcanary_agent.kernels.triton import TritonChecks
from kvcanary_agent.kernels.triton.parts import PartTable
from tests.canary.toy import LAYOUTS, Row, ToyEngine
from tests.kernels.histories import Setting, checks_by, hear, without_content_of_broken_chains


class SmallTiles(TritonChecks):
    """Tiles so small that little data needs several of them."""

    token_tile = 8
    read_tile = 16
    word_tile = 16
    block_tile = 64


def breaks_alone(*arguments: torch.Tensor) -> torch.Tensor:
    """The slots where a chain breaks, without the run that follows: what a GPU reports."""
    return arguments[-1]


SETTINGS = st.builds(
    Setting,
    layout=st.sampled_from(sorted(LAYOUTS)),
    block_size=st.sampled_from([1, 2, 4, 5]),
    content=st.sampled_from(["full", "scrub"]),
    known_tokens=st.booleans(),
    reports_ownership=st.booleans(),
    window=st.none(),
    seed=st.integers(0, 2**32),
    steps=st.just(4),
)


# The interpreter takes seconds for what a GPU does in microseconds.
@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(SETTINGS)
def test_a_history_is_heard_as_the_reference_hears_it(setting: Setting) -> None:
    assert_heard_alike(setting)


@pytest.mark.parametrize("window", [1, 6])
def test_a_window_is_heard_as_the_reference_hears_it(window: int) -> None:
    assert_heard_alike(
        Setting(
            layout="token_major",
            block_size=4,
            content="scrub",
            known_tokens=True,
            reports_ownership=True,
            window=window,
            seed=window,
            steps=4,
        )
    )


def assert_heard_alike(setting: Setting) -> None:
    with patch("kvcanary_agent.kernels.reference.reads._foreign_runs", breaks_alone):
        reference = hear(setting, Checks)
    device = hear(setting, SmallTiles)
    assert without_content_of_broken_chains(device.entries) == without_content_of_broken_chains(reference.entries)
    assert all(map(torch.equal, device.tables, reference.tables))
    assert all(map(torch.equal, device.fingerprints, reference.fingerprints))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_what_a_healthy_engine_writes_is_recorded_and_nothing_is_reported(layout: str) -> None:
    with checks_by(SmallTiles):
        toy = ToyEngine(layout, blocks=12)
    with checks_by(Checks):
        plain = ToyEngine(layout, blocks=12)
    for engine in (toy, plain):
        engine.start("a", range(10, 21))
        engine.request("b", [*range(10, 18), 5, 6])
        engine.share("b", "a", 2)
        engine.allocate("b", 1)
        engine.step(Row(request="b", count=2), Row(request="a", count=0))
    assert toy.sink.violations == []
    for records, wanted in zip(toy.canary._records, plain.canary._records, strict=True):
        assert torch.equal(records.table[:, : Column.CLAIM], wanted.table[:, : Column.CLAIM])
        assert torch.equal(records.fingerprints, wanted.fingerprints)


def test_a_payload_scattered_over_too_many_dimensions_is_refused() -> None:
    view = torch.zeros(2, 2, 3, 6, 6, 6, 6, dtype=torch.uint8)[..., ::2, ::2, ::2, ::2]
    records = Records(2, 2, view.device, [view])
    with pytest.raises(ValueError, match="part 0"):
        TritonChecks(records, ViolationRing(8, view.device), 0, lambda *_: None)


def test_numbers_larger_than_the_words_of_a_pool_are_left_out_and_named() -> None:
    odd = torch.zeros(2 * 2 * 8 + 1, dtype=torch.uint8)[1:].view(2, 2, 8)
    records = Records(2, 2, odd.device, [odd], [torch.bfloat16])
    assert PartTable(records).unchecked == [0]
