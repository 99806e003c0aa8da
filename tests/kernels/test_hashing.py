"""Chain and content hashes against an independent implementation on Python's big integers, and what they must see."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.kernels.fingerprints import byte_keys, segment_keys
from kvcanary_agent.kernels.hashing import as_words, chain_seed, mix, mix_of
from kvcanary_agent.kernels.reference.fingerprint import fingerprint

MODULUS = 2**64
TOKEN_FACTOR = 0x9E3779B97F4A7C15
POSITION_FACTOR = 0x6A09E667F3BCC909


def finalise(x: int) -> int:
    """The finaliser of SplitMix64 on an unsigned number."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31)


def plain_mix(token: int, position: int) -> int:
    return finalise((token * TOKEN_FACTOR + position * POSITION_FACTOR) % MODULUS)


def signed(octet: int) -> int:
    return octet - 256 if octet > 127 else octet


def plain_fingerprint(octets: bytes) -> int:
    """The definition, on Python's big integers."""
    of_byte, of_segment = byte_keys().tolist(), segment_keys(-(-len(octets) // 128)).tolist()
    halves: list[int] = [
        sum(
            sum(signed(octet) * keys[at] for at, octet in enumerate(octets[start : start + 128])) * of[start // 128]
            for start in range(0, len(octets), 128)
        )
        % 2**32
        for keys, of in zip(of_byte, of_segment, strict=True)
    ]
    return halves[0] + halves[1] * 2**32


def unsigned(values: torch.Tensor) -> list[int]:
    return [value % MODULUS for value in values.flatten().tolist()]


def octets_of(payload: torch.Tensor) -> bytes:
    """The bytes of one payload in row-major order."""
    return bytes(payload.contiguous().flatten().view(torch.uint8).tolist())


def fingerprints(payload: torch.Tensor) -> torch.Tensor:
    return fingerprint(as_words(payload))


def random_rows(rows: int, num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, num_bytes), dtype=torch.uint8, generator=generator)


PAYLOADS = [
    ((8, 16), torch.bfloat16),
    ((2, 8), torch.float32),
    ((3, 5), torch.float16),
    ((2, 3), torch.float64),
    ((7,), torch.uint8),
    ((2, 9), torch.float8_e4m3fn),
    ((2, 2), torch.complex64),
    ((), torch.float32),
    ((), torch.float16),
    ((1,), torch.int8),
]


def payload_from(rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of bytes as payloads of that shape and dtype, bit for bit."""
    return rows.view(dtype).reshape(rows.shape[0], *shape)


def bytes_of_shape(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.empty(shape, dtype=dtype).numel() * dtype.itemsize


@pytest.mark.parametrize(("shape", "dtype"), PAYLOADS)
def test_every_single_bit_flip_is_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    num_bytes = bytes_of_shape(shape, dtype)
    for original in (random_rows(1, num_bytes), torch.zeros(1, num_bytes, dtype=torch.uint8), ~random_rows(1, 1) | 255):
        rows = original.expand(1, num_bytes).repeat(num_bytes * 8 + 1, 1)
        for bit in range(num_bytes * 8):
            rows[bit + 1, bit // 8] ^= 1 << bit % 8
        prints = fingerprints(payload_from(rows, shape, dtype))
        assert bool((prints[1:] != prints[0]).all())


@pytest.mark.parametrize(("shape", "dtype"), PAYLOADS)
def test_it_is_the_keyed_sum_of_words_in_exact_arithmetic(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = random_rows(20, bytes_of_shape(shape, dtype), seed=1)
    assert unsigned(fingerprints(payload_from(rows, shape, dtype))) == [
        plain_fingerprint(bytes(r)) for r in rows.tolist()
    ]


@settings(deadline=None)
@given(st.lists(st.binary(min_size=13, max_size=13), min_size=1, max_size=5))
def test_a_tail_that_is_no_whole_word_counts_in_full(rows: list[bytes]) -> None:
    payload = torch.tensor([list(row) for row in rows], dtype=torch.uint8)
    assert unsigned(fingerprints(payload)) == [plain_fingerprint(row) for row in rows]


@pytest.mark.parametrize("num_bytes", range(1, 10))
def test_extreme_words_do_not_overflow_into_something_else(num_bytes: int) -> None:
    for octet in (0x00, 0xFF, 0x80, 0x7F):
        payload = torch.full((2, num_bytes), octet, dtype=torch.uint8)
        assert unsigned(fingerprints(payload)) == [plain_fingerprint(bytes([octet]) * num_bytes)] * 2


def test_all_zeros_and_all_ones_differ_from_each_other() -> None:
    prints = fingerprints(
        torch.stack([torch.zeros(256, dtype=torch.uint8), torch.full((256,), 255, dtype=torch.uint8)])
    )
    assert prints[0] == 0
    assert prints[1] != 0


@pytest.mark.parametrize("background", [0x00, 0xFF, 0x5A])
def test_any_two_flips_of_one_bit_position_are_seen_wherever_they_are(background: int) -> None:
    # Three segments: pairs within one and across two, in every class of byte position, sign bits of all types included.
    num_bytes = 3 * 128
    original = torch.full((1, num_bytes), background, dtype=torch.uint8)
    before = fingerprint(original)
    pairs = torch.combinations(torch.arange(num_bytes))
    at = torch.arange(len(pairs))
    for bit in (0, 6, 7):
        changed = original.repeat(len(pairs), 1)
        changed[at, pairs[:, 0]] ^= 1 << bit
        changed[at, pairs[:, 1]] ^= 1 << bit
        assert bool((fingerprint(changed) != before).all()), f"bit {bit}"


def test_any_change_of_two_bytes_of_a_segment_shows_because_no_two_keys_are_parallel() -> None:
    first, second = byte_keys().to(torch.int64)
    cross = first[:, None] * second[None, :] - first[None, :] * second[:, None]
    assert int((cross == 0).sum()) == 128, "a pair of keys is parallel to itself alone"
    assert bool((first % 2 != 0).all())
    assert bool((second % 2 != 0).all())


def test_no_two_segments_keys_let_two_flips_cancel_in_both_halves() -> None:
    # Single-bit changes are powers of two times an odd byte key below 128 in magnitude.
    keys = segment_keys(256).to(torch.int64) % 2**32
    assert bool((keys % 2 == 1).all())
    odd = torch.arange(1, 128, 2)
    for half in range(2):
        products = ((keys[half][:, None] * odd) % 2**25).flatten()
        keys_of = products.minimum(2**25 - products)
        collisions = len(keys_of) - len(torch.unique(keys_of))
        assert collisions < len(keys_of) ** 2 / 2**24, "no more than chance"


def test_each_bit_of_a_payload_changes_half_of_the_bits_of_its_fingerprint_on_average() -> None:
    original = random_rows(1, 256, seed=8)
    rows = original.repeat(256 * 8, 1)
    for bit in range(256 * 8):
        rows[bit, bit // 8] ^= 1 << bit % 8
    changed = fingerprint(rows) ^ fingerprint(original)
    flipped = ((changed[:, None] >> torch.arange(64)) & 1).to(torch.float32)
    # A sum has no carry below the lowest bit of a change; above it, bits are as random as the keys.
    assert 0.38 < float(flipped.mean()) < 0.55
    assert 0.40 < float(flipped[:, 16:32].mean()) < 0.60
    assert 0.40 < float(flipped[:, 48:].mean()) < 0.60


def test_random_two_bit_flips_are_seen() -> None:
    choose = random.Random(3)
    num_bits = 8 * 2048
    original = random_rows(1, num_bits // 8, seed=4)
    rows = original.repeat(4000, 1)
    for row in range(len(rows)):
        for bit in choose.sample(range(num_bits), 2):
            rows[row, bit // 8] ^= 1 << bit % 8
    assert bool((fingerprints(rows) != fingerprints(original)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sign_changes_of_one_two_and_all_numbers_are_seen(dtype: torch.dtype) -> None:
    size = 48
    original = torch.randn(size, generator=torch.Generator().manual_seed(5)).to(dtype)
    changed = []
    for flipped in [*itertools.combinations(range(size), 1), *itertools.combinations(range(size), 2), range(size)]:
        row = original.clone()
        row[list(flipped)] *= -1
        changed.append(row)
    assert bool((fingerprints(torch.stack(changed)) != fingerprints(original[None])).all())


def test_swapped_words_heads_and_halves_are_seen() -> None:
    original = torch.randn(8, 32, generator=torch.Generator().manual_seed(6))
    before = fingerprints(original[None])
    for a, b in itertools.combinations(range(8), 2):
        heads = original.clone()
        heads[[a, b]] = heads[[b, a]]
        assert fingerprints(heads[None]) != before, f"heads {a} and {b}"
    for a, b in itertools.combinations(range(32), 2):
        words = original.clone()
        words[3, [a, b]] = words[3, [b, a]]
        assert fingerprints(words[None]) != before, f"words {a} and {b}"
    assert fingerprints(original.roll(128)[None]) != before


def test_swapped_tokens_are_seen_because_each_slot_has_its_own_fingerprint() -> None:
    tokens = random_rows(4, 64, seed=7)
    prints = fingerprints(tokens)
    assert torch.equal(fingerprints(tokens[[0, 2, 1, 3]]), prints[[0, 2, 1, 3]])
    assert len(set(prints.tolist())) == 4


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logical payload twice: contiguous, and as a permuted, sliced, offset view of a larger tensor."""
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 2))
    seed = draw(st.integers(0, 1000))
    large = [offset + size * step for size, step in zip(shape, steps, strict=True)]
    storage = random_rows(1, torch.Size(large).numel() * dtype.itemsize, seed)
    storage = storage.view(dtype).reshape([large[dim] for dim in order])
    view = storage.permute([order.index(dim) for dim in range(len(shape))])
    view = view[tuple(slice(offset, None, step) for step in steps)]
    return view, view.clone(memory_format=torch.contiguous_format)


@settings(deadline=None)
@given(views())
def test_strides_do_not_matter(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    view, contiguous = pair
    prints = unsigned(fingerprints(view))
    assert prints == unsigned(fingerprints(contiguous))
    assert prints == [plain_fingerprint(octets_of(row)) for row in contiguous]


def test_no_rows_have_no_fingerprints() -> None:
    assert fingerprint(torch.zeros(0, 8, dtype=torch.uint8)).shape == (0,)


def test_keys_are_fixed_for_all_time() -> None:
    # Other ranks and other versions must agree: this is the definition, not a property.
    assert byte_keys()[:, :5].tolist() == [[-43, 73, -33, -95, -125], [31, 49, -49, -69, -67]]
    assert segment_keys(2).tolist() == [[1230662637, 562214841], [1933290861, -1532872785]]


def test_longer_payloads_extend_the_keys_of_shorter_ones() -> None:
    assert torch.equal(segment_keys(1000)[:, :10], segment_keys(10))


# Chains


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 2**31 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=20))
def test_mix_is_the_finalised_combination_in_exact_arithmetic(pairs: list[tuple[int, int]]) -> None:
    tokens, positions = torch.tensor(pairs).T
    assert unsigned(mix(tokens, positions)) == [plain_mix(token, position) for token, position in pairs]
    assert [mix_of(token, position) for token, position in pairs] == mix(tokens, positions).tolist()


def test_mix_does_not_depend_on_the_integer_type() -> None:
    tokens, positions = torch.tensor([5, 127]), torch.tensor([0, 100])
    assert torch.equal(mix(tokens.int(), positions.to(torch.int16)), mix(tokens, positions))


def test_no_two_pairs_of_token_and_position_mix_to_the_same() -> None:
    # The finaliser is a bijection. So pairs collide only if d_token * TOKEN + d_position * POSITION = 0 modulo 2^64
    # for differences that occur: vocabularies below 2^20, positions below 2^31.
    ratio = TOKEN_FACTOR * pow(POSITION_FACTOR, -1, MODULUS) % MODULUS
    ratio -= MODULUS if ratio >= MODULUS // 2 else 0
    positions = torch.arange(1, 2**20) * ratio
    assert int(positions.abs().min()) > 2**31


def chain(tokens: Sequence[int], seed: int = 0) -> int:
    sequence = torch.tensor(list(tokens), dtype=torch.int64)
    return (int(mix(sequence, torch.arange(len(sequence))).sum()) + seed) % MODULUS


def test_a_prefix_sum_gives_the_chain_before_every_position() -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    added = mix(torch.tensor(tokens), torch.arange(len(tokens)))
    seed = chain_seed("lora", 2)
    before = unsigned(added.cumsum(0) - added + seed)
    assert before == [
        (seed + sum(plain_mix(t, p) for p, t in enumerate(tokens[:at]))) % MODULUS for at in range(len(tokens))
    ]


def test_the_chain_identifies_the_ordered_prefix() -> None:
    # Every sequence of 5 tokens of a small vocabulary, all permutations and repetitions included.
    sequences = list(itertools.product(range(6), repeat=5))
    assert len({chain(sequence) for sequence in sequences}) == len(sequences)


_TOKENS = st.integers(0, 200_000)


@settings(deadline=None)
@given(st.lists(st.tuples(_TOKENS, _TOKENS), min_size=1, max_size=12))
def test_chains_of_one_length_are_equal_only_for_equal_prefixes(pairs: list[tuple[int, int]]) -> None:
    a, b = zip(*pairs, strict=True)
    assert (chain(a) == chain(b)) == (a == b)


@pytest.mark.parametrize(
    ("a", "b"),
    [((None, 0), (None, 1)), ((None, 0), ("", 0)), (("a", 0), ("b", 0)), (("=", 1), ("", 1)), (("x", 1), ("1:x", 1))],
)
def test_seeds_differ_by_namespace_and_epoch(a: tuple[str | None, int], b: tuple[str | None, int]) -> None:
    assert chain_seed(*a) != chain_seed(*b)


def test_a_seed_is_a_fixed_digest_that_fits_into_64_signed_bits() -> None:
    digest = hashlib.blake2b(b"3:=lora", digest_size=8, person=b"kvcanary-chain").digest()
    assert chain_seed("lora", 3) == int.from_bytes(digest, "little", signed=True)
    assert all(-(2**63) <= chain_seed(str(n), n) < 2**63 for n in range(200))


def test_a_namespace_that_is_not_valid_unicode_has_a_seed() -> None:
    assert chain_seed("\udcff", 0) != chain_seed("\udcfe", 0)
