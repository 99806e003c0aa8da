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

from kvcanary_agent.kernels.hashing import as_words, chain_seed, fingerprint, mix, word_keys

CPU = torch.device("cpu")
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


def plain_fingerprint(octets: bytes) -> int:
    octets += bytes(-len(octets) % 4)
    words = [int.from_bytes(octets[at : at + 4], "little", signed=True) for at in range(0, len(octets), 4)]
    keys = [finalise(index * TOKEN_FACTOR % MODULUS) | 1 for index in range(1, len(words) + 1)]
    return sum(word * key for word, key in zip(words, keys, strict=True)) % MODULUS


def unsigned(values: torch.Tensor) -> list[int]:
    return [value % MODULUS for value in values.flatten().tolist()]


def octets_of(payload: torch.Tensor) -> bytes:
    """The bytes of one payload in row-major order."""
    return bytes(payload.contiguous().flatten().view(torch.uint8).tolist())


def fingerprints(payload: torch.Tensor) -> torch.Tensor:
    words = -(-payload[0].numel() * payload.element_size() // 4)
    return fingerprint(as_words(payload), word_keys(words, CPU))


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


def test_every_two_flips_of_the_same_bit_in_two_words_are_seen() -> None:
    words = 64
    original = random_rows(1, words * 4, seed=2).view(torch.int32)
    keys = word_keys(words, CPU)
    before = fingerprint(original, keys)
    pairs = torch.combinations(torch.arange(words))
    at = torch.arange(len(pairs))
    for bit in range(32):
        mask = torch.tensor(1 << bit).to(torch.int32)
        changed = original.repeat(len(pairs), 1)
        changed[at, pairs[:, 0]] ^= mask
        changed[at, pairs[:, 1]] ^= mask
        assert bool((fingerprint(changed, keys) != before).all()), f"bit {bit}"


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
    assert fingerprint(torch.zeros(0, 8, dtype=torch.uint8), word_keys(2, CPU)).shape == (0,)


def test_keys_are_those_of_the_definition() -> None:
    assert unsigned(word_keys(300, CPU)) == [finalise(i * TOKEN_FACTOR % MODULUS) | 1 for i in range(1, 301)]


def test_keys_are_odd_and_no_two_agree_up_to_sign_in_the_bits_that_two_flips_of_a_sign_bit_leave() -> None:
    words = 8192
    keys = unsigned(word_keys(words, CPU))
    assert all(key % 2 for key in keys)
    up_to_sign = {min(key % 2**33, -key % 2**33) for key in keys}
    assert len(up_to_sign) == words


def test_longer_payloads_extend_the_keys_of_shorter_ones() -> None:
    assert torch.equal(word_keys(1000, CPU)[:10], word_keys(10, CPU))


# Chains


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 2**31 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=20))
def test_mix_is_the_finalised_combination_in_exact_arithmetic(pairs: list[tuple[int, int]]) -> None:
    tokens, positions = torch.tensor(pairs).T
    assert unsigned(mix(tokens, positions)) == [plain_mix(token, position) for token, position in pairs]


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
