"""What is tuned for CPUs gives the same bits as the plain reference, whatever the layout and whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.canary.transfers import enter_foreign
from kvcanary_agent.kernels.checks import Checks
from kvcanary_agent.kernels.hashing import as_words
from kvcanary_agent.kernels.plan import KnownTokens, Rows, Writes
from kvcanary_agent.kernels.records import Records
from kvcanary_agent.kernels.reference.fingerprint import fingerprint
from kvcanary_agent.kernels.ring import Field, ViolationRing
from kvcanary_agent.kernels.tuned import TunedChecks
from kvcanary_agent.kernels.tuned.fingerprint import Fingerprinter
from kvcanary_agent.kernels.tuned.images import Image, images_of_neighbours, images_of_parts
from kvcanary_agent.kernels.tuned.reads import CleanReads
from tests.canary.toy import LAYOUTS, Row, ToyEngine
from tests.kernels.histories import Setting, checks_by, hear

SETTINGS = st.builds(
    Setting,
    layout=st.sampled_from(sorted(LAYOUTS)),
    block_size=st.sampled_from([1, 2, 4, 5]),
    content=st.sampled_from(["full", "scrub"]),
    known_tokens=st.booleans(),
    reports_ownership=st.booleans(),
    window=st.none(),
    seed=st.integers(0, 2**32),
    steps=st.sampled_from([7, 14]),
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


# What is not looked at again


class Proof:
    """Two rows of ten tokens in blocks of four, written and verified; what the second look says is the test."""

    def __init__(self) -> None:
        self.records = Records(8, 4, torch.device("cpu"), [])
        self.checks = TunedChecks(self.records, ViolationRing(64, self.records.device), 0, lambda *_: None)
        self.table = torch.tensor([[1, 2, 3], [4, 5, 6]])
        self.seeds = torch.tensor([7, 8])
        self.known = KnownTokens(
            tokens=torch.arange(24).view(2, 12), rows=torch.arange(2), lengths=torch.tensor([12, 12])
        )
        self.held: torch.Tensor | None = None
        self.held_rows = torch.full((2,), -1)
        self.enter(0, 10)
        assert self.is_clean(10)

    def rows(self, length: int) -> Rows:
        return Rows(
            step=1,
            owners=torch.tensor([1, 2], dtype=torch.int32),
            seeds=self.seeds,
            prefix_lens=torch.full((2,), length),
            block_table=self.table,
            held=self.held,
            held_rows=self.held_rows,
            references=torch.zeros(8, dtype=torch.int32),
            first_holders=torch.full((8,), -1, dtype=torch.int32),
        )

    def enter(self, begin: int, end: int) -> None:
        positions = torch.arange(begin, end).repeat(2)
        of_row = torch.arange(2).repeat_interleave(end - begin)
        writes = Writes(
            rows=of_row,
            offsets=torch.arange(3) * (end - begin),
            tokens=self.known.tokens[of_row, positions],
            positions=positions,
            slots=self.table[of_row, positions // 4] * 4 + positions % 4,
            known=None,
        )
        self.checks.enter(self.rows(begin), writes, None, None, False)

    def is_clean(self, length: int) -> bool:
        return isinstance(self.checks.verify_reads(self.rows(length), None, self.known), CleanReads)


def test_a_row_that_goes_on_is_proven_from_where_the_last_proof_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Proof()
    monkeypatch.setattr(proof.checks._screen, "_all_sound", lambda *_: pytest.fail("looked at everything again"))
    proof.enter(10, 11)
    assert proof.is_clean(11)
    assert proof.is_clean(11)


@pytest.mark.parametrize("field", ["position", "generation", "token", "seed", "chain", "chain_after"])
def test_a_record_that_changes_after_its_proof_is_seen(field: str) -> None:
    proof = Proof()
    with torch.inference_mode():
        getattr(proof.records, field)[2 * 4 + 1] += 1
    assert not proof.is_clean(10)


def test_a_table_entry_that_changes_after_the_proof_is_seen() -> None:
    for row in range(2):
        for column in range(3):
            proof = Proof()
            proof.table[row, column] = 7
            assert not proof.is_clean(10)
            proof.table[row, column] = -1
            assert not proof.is_clean(10)


def test_rows_that_trade_places_are_seen() -> None:
    proof = Proof()
    proof.table = proof.table[[1, 0]]
    assert not proof.is_clean(10)
    proof.seeds = proof.seeds[[1, 0]]
    assert not proof.is_clean(10), "their tokens are still each other's"
    proof.known.tokens.copy_(proof.known.tokens[[1, 0]].clone())
    assert proof.is_clean(10)


def test_a_block_with_the_same_tokens_after_another_prefix_is_seen_after_the_proof() -> None:
    toy = ToyEngine(blocks=24, block_size=4, reports_ownership=False)
    same = [7, 7, 7, 7]
    toy.start("a", [1, 2, 3, 4, *same])
    toy.start("b", [5, 6, 8, 9, *same])
    toy.decode("a", "b", steps=3)
    assert toy.sink.violations == []
    toy.requests["a"].tables[0][1] = toy.requests["b"].tables[0][1]
    toy.decode("a", "b")
    assert {str(kind) for kind in toy.sink.kinds()} == {"chain"}


def test_a_table_that_leaves_the_pool_where_nothing_is_read_of_it_is_no_error() -> None:
    heard = []
    for implementation in (Checks, TunedChecks):
        with checks_by(implementation):
            toy = ToyEngine(blocks=24, block_size=4, reports_ownership=False, window=1, settings={"content": "scrub"})
        toy.start("a", range(6))
        toy.requests["a"].tokens.append(7)
        for _ in range(10):
            step, writes = toy.plan(Row(request="a"))
            step.groups[0].block_table[0, 1] = -1
            toy.canary.before_forward(step)
            toy.forward(writes)
            toy.canary.after_forward()
        heard.append({str(kind) for kind in toy.sink.kinds()})
    assert heard == [{"address"}, {"address"}]


def test_a_request_s_own_token_that_changes_after_the_proof_is_seen() -> None:
    for position in range(10):
        proof = Proof()
        proof.known.tokens[1, position] += 1
        assert not proof.is_clean(10)


def test_another_seed_is_seen() -> None:
    proof = Proof()
    proof.seeds = torch.tensor([7, 9])
    assert not proof.is_clean(10)


def test_a_block_that_is_handed_out_again_is_seen_and_one_that_nobody_reads_is_not() -> None:
    proof = Proof()
    proof.records.block_generation[7] += 1
    assert proof.is_clean(10)
    proof.records.block_generation[5] += 1
    assert not proof.is_clean(10)


def test_a_write_to_a_proven_slot_is_seen() -> None:
    proof = Proof()
    proof.known.tokens[0, 2] = 99
    proof.enter(2, 3)
    proof.known.tokens[0, 2] = 2
    assert not proof.is_clean(10)


def test_records_that_travel_with_a_copied_block_are_seen() -> None:
    proof = Proof()
    proof.records.put_into(torch.tensor([2]), proof.records.taken_from(torch.tensor([5])))
    assert not proof.is_clean(10)


def test_tokens_that_become_known_after_the_proof_are_compared() -> None:
    proof = Proof()
    all_tokens = proof.known.tokens
    for tokens in (all_tokens[:, :8], torch.where(torch.arange(12) < 8, all_tokens, -1)):
        proof.known = KnownTokens(tokens=tokens, rows=torch.arange(2), lengths=None)
        assert proof.is_clean(10)
        right = KnownTokens(tokens=all_tokens.clone(), rows=torch.arange(2), lengths=None)
        right.tokens[1, 9] += 1
        proof.known = right
        assert not proof.is_clean(10)
        right.tokens[1, 9] -= 1
        assert proof.is_clean(10)


def test_what_comes_and_goes_beside_a_row_leaves_its_proof_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Proof()
    monkeypatch.setattr(proof.checks._screen, "_all_sound", lambda *_: pytest.fail("looked at everything again"))
    monkeypatch.setattr("kvcanary_agent.kernels.tuned.reads.FEW", 10)
    both = proof.rows(10)
    first = Rows(
        step=1,
        owners=both.owners[:1],
        seeds=both.seeds[:1],
        prefix_lens=both.prefix_lens[:1],
        block_table=both.block_table[:1],
        held=None,
        held_rows=both.held_rows[:1],
        references=both.references,
        first_holders=both.first_holders,
    )
    assert isinstance(proof.checks.verify_reads(first, None, proof.known), CleanReads), "the second row leaves"
    assert proof.is_clean(10), "it comes back, ten slots to look at"
    with proof.checks._screen.changes([5 * 4]):
        pass
    assert proof.is_clean(10), "a slot of its second block was written anew: from there on, six slots"


def test_a_holder_that_loses_a_block_after_the_proof_is_seen() -> None:
    for lost in range(1, 7):
        proof = Proof()
        held = torch.zeros((3, 8), dtype=torch.bool)
        held[1, 1:4] = held[2, 4:7] = True
        proof.held, proof.held_rows = held, torch.tensor([1, 2])
        assert proof.is_clean(10)
        proof.enter(10, 11)
        assert proof.is_clean(11)
        held[1 if lost < 4 else 2, lost] = False
        assert not proof.is_clean(11)


# Whole blocks


def of_one_part(size: int) -> tuple[TunedChecks, ViolationRing, torch.Tensor]:
    """The checks of a part of eight blocks, of which the first two are written and known as a whole."""
    view = torch.randint(0, 99, (8, size, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    records = Records(8, size, torch.device("cpu"), [view])
    ring = ViolationRing(64, records.device)
    checks = TunedChecks(records, ring, 0, lambda *_: None)
    slots = torch.arange(2 * size)
    rows = Rows(
        step=1,
        owners=torch.tensor([1], dtype=torch.int32),
        seeds=torch.tensor([7]),
        prefix_lens=torch.tensor([0]),
        block_table=torch.tensor([[0, 1]]),
        held=None,
        held_rows=torch.tensor([-1]),
        references=torch.zeros(8, dtype=torch.int32),
        first_holders=torch.full((8,), -1, dtype=torch.int32),
    )
    writes = Writes(
        rows=torch.zeros_like(slots),
        offsets=torch.tensor([0, 2 * size]),
        tokens=slots,
        positions=slots,
        slots=slots,
        known=None,
    )
    checks.record_content(checks.enter(rows, writes, None, None, False))
    checks.patrol(0, 8, 0, 1)
    assert ring.drain() == ([], 0)
    assert (records.block_prints[:2] != 0).all()
    return checks, ring, view


def test_other_records_in_the_place_of_a_known_block_s_are_compared_with_its_bytes() -> None:
    checks, ring, _ = of_one_part(4)
    records = checks.records
    records.put_into(torch.tensor([1]), records.taken_from(torch.tensor([0])))
    checks.patrol(0, 8, 0, 2)
    assert sorted(entry[Field.SLOT] for entry in ring.drain()[0]) == [4, 5, 6, 7]


def test_what_another_process_has_written_is_compared_with_a_known_block_s_bytes() -> None:
    checks, ring, _ = of_one_part(4)
    records = checks.records
    enter_foreign(records, torch.tensor([1]), torch.arange(4), seed=7, owner=2, step=1)
    records.fingerprints[:, 4:8] = records.fingerprints[:, 0:4].clone()
    checks.patrol(0, 8, 0, 2)
    assert sorted(entry[Field.SLOT] for entry in ring.drain()[0]) == [4, 5, 6, 7]


@pytest.mark.parametrize("layout", ["token_major", "k_transposed"])
def test_blocks_of_unknown_contents_do_not_count_as_compared(layout: str) -> None:
    counts = []
    for implementation in (Checks, TunedChecks):
        with checks_by(implementation):
            toy = ToyEngine(layout, settings={"content": "full"})
        toy.start("a", range(10, 19))
        toy.decode("a")
        toy.canary.arriving(toy.requests["a"].tables[0][:1])
        toy.decode("a", steps=3)
        counts.append([of_pass.slots.get("content") for _, _, of_pass, _ in toy.sink.passes])
    assert counts[0] == counts[1]


def addresses(view: torch.Tensor, base: int) -> list[int]:
    """The addresses of all bytes of the first block of a view ``[blocks, ...]``, relative to ``base``, in its order."""
    at = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(view.shape[1:], view.stride()[1:], strict=True):
        at = at[..., None] + torch.arange(size) * stride
    bytes_of_word = torch.arange(view.element_size())
    words = (view.data_ptr() - base + at.view(-1) * view.element_size())[:, None] + bytes_of_word
    return [int(address) for address in words.flatten()]


@pytest.mark.parametrize("images", [images_of_parts, images_of_neighbours])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_an_image_of_a_block_holds_each_byte_once_in_the_order_of_their_addresses(
    layout: str, images: Callable[[Sequence[torch.Tensor]], list[Image]]
) -> None:
    for group in LAYOUTS[layout](7, 4):
        views = [as_words(part.view) for part in group.parts]
        found = images(views)
        assert sorted(part for image in found for part in image.parts) == list(range(len(views)))
        for image in found:
            base = views[image.parts[0]].data_ptr()
            in_image = addresses(image.view, base)
            assert in_image == sorted(a for part in image.parts for a in addresses(views[part], base))
            assert len(in_image) == image.num_bytes


def test_keys_and_values_that_fill_a_page_together_are_one_image() -> None:
    pages = torch.zeros(5, 2, 2, 4 * 8)
    k = pages[:, :, 0].view(5, 2, 8, 4).permute(0, 3, 1, 2)
    v = pages[:, :, 1].view(5, 2, 4, 8).transpose(1, 2)
    (image,) = images_of_neighbours([as_words(k), as_words(v)])
    assert image.parts == (0, 1)
    assert image.view.shape == (5, 2 * 2 * 4 * 8 // 2), "as rows of eight bytes"


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_bit_that_flips_in_a_block_known_as_a_whole_is_reported_for_each_of_its_readers(layout: str) -> None:
    for part in range(len(LAYOUTS[layout](2, 4)[0].parts)):
        toy = ToyEngine(layout, blocks=12, settings={"content": "full"})
        toy.start("a", range(10, 22))
        toy.request("b", [*range(10, 18), 5, 6])
        toy.share("b", "a", 2)
        toy.allocate("b", 1)
        toy.step(Row(request="b", count=2), Row(request="a", count=0))
        toy.poke(toy.slot("a", 5), part, mask=1)
        toy.step(Row(request="a", count=0), Row(request="b", count=0))
        assert sorted(str(violation.request) for violation in toy.sink.violations) == ["a", "b"]
