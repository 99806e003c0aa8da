"""What is tuned for CPUs gives the same bits as the plain reference, whatever the layout and whatever happens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.kernels.checks import Checks
from kvcanary_agent.kernels.hashing import as_words
from kvcanary_agent.kernels.reference.fingerprint import fingerprint
from kvcanary_agent.kernels.tuned import TunedChecks
from kvcanary_agent.kernels.tuned.fingerprint import Fingerprinter
from tests.canary.toy import LAYOUTS
from tests.kernels.histories import Setting, hear

SETTINGS = st.builds(
    Setting,
    layout=st.sampled_from(sorted(LAYOUTS)),
    block_size=st.sampled_from([1, 2, 4, 5]),
    content=st.sampled_from(["full", "scrub"]),
    known_tokens=st.booleans(),
    reports_ownership=st.booleans(),
    window=st.none(),
    seed=st.integers(0, 2**32),
)


@settings(deadline=None, max_examples=60)
@given(SETTINGS)
def test_a_history_is_heard_as_the_reference_hears_it(setting: Setting) -> None:
    tuned, reference = hear(setting, TunedChecks), hear(setting, Checks)
    assert tuned.entries == reference.entries
    assert tuned.counts == reference.counts
    assert all(map(torch.equal, tuned.tables, reference.tables))
    assert all(map(torch.equal, tuned.fingerprints, reference.fingerprints))


@pytest.mark.parametrize("window", [1, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_a_window_is_heard_as_the_reference_hears_it(window: int, seed: int) -> None:
    setting = Setting(
        layout="token_major",
        block_size=4,
        content="full",
        known_tokens=True,
        reports_ownership=True,
        window=window,
        seed=seed,
    )
    tuned, reference = hear(setting, TunedChecks), hear(setting, Checks)
    assert tuned.entries == reference.entries
    assert tuned.counts == reference.counts


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_slots_and_blocks_of_every_layout_have_the_reference_s_fingerprints(layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for group in LAYOUTS[layout](7, 4):
        views = [as_words(part.view) for part in group.parts]
        for view in views:
            octets = torch.randint(0, 256, (*view.shape, view.element_size()), generator=generator)
            view.copy_(octets.to(torch.uint8).view(view.dtype).squeeze(-1))
        fingerprinter = Fingerprinter(views, [part.view.dtype for part in group.parts])
        blocks = torch.tensor([6, 0, 3, 3])
        block, offset = torch.tensor([1, 5, 5]), torch.tensor([3, 0, 2])
        for part, view in enumerate(views):
            wanted = fingerprint(view[blocks].flatten(0, 1)).view(4, 4)
            assert torch.equal(fingerprinter.of_blocks(part, blocks), wanted)
            run = torch.arange(2, 6)
            assert torch.equal(fingerprinter.of_blocks(part, run), fingerprint(view[2:6].flatten(0, 1)).view(4, 4))
        for stacks in fingerprinter.stacks.values():
            _, prints = fingerprinter.of_slots(stacks, block, offset)
            for row, part in enumerate(part for stack in stacks for part in stack.parts):
                assert torch.equal(prints[row], fingerprint(views[part][block, offset]))


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 31, 63, 64, 127, 128, 129, 200, 256, 300, 1152, 2048])
def test_payloads_of_any_length_have_the_reference_s_fingerprints(num_bytes: int) -> None:
    rows = torch.randint(0, 256, (9, num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    rows[0], rows[1] = 128, 127
    fingerprinter = Fingerprinter([rows[:, None]], [torch.uint8])
    assert torch.equal(fingerprinter.of_rows(rows), fingerprint(rows))


def test_a_cpu_whose_product_of_bytes_saturates_gets_the_same_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(0, 256, (9, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(
        torch, "_int_mm", lambda a, b: (a.to(torch.int32) @ b.to(torch.int32)).clamp(-(2**15), 2**15 - 1)
    )
    assert torch.equal(Fingerprinter([rows[:, None]], [torch.uint8]).of_rows(rows), fingerprint(rows))


def test_parts_that_lie_in_no_regular_grid_are_gathered_one_by_one() -> None:
    data = torch.arange(4 * 3 * 2 * 8, dtype=torch.uint8).view(4 * 3, 2, 8)
    views = [data[first : first + 3] for first in (0, 3, 9)]
    fingerprinter = Fingerprinter(views, [torch.uint8] * 3)
    (stacks,) = fingerprinter.stacks.values()
    assert [stack.parts for stack in stacks] == [(0,), (1,), (2,)]
    _, prints = fingerprinter.of_slots(stacks, torch.tensor([2]), torch.tensor([1]))
    assert prints.flatten().tolist() == [int(fingerprint(view[2, 1:])) for view in views]
