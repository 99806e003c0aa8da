"""The engine: outputs do not depend on batching, chunking, sharing, forking or preemption."""

from collections.abc import Iterator
from collections.abc import Sequence as List
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.demo.block_manager import NULL_BLOCK
from kvcanary_agent.demo.config import EngineConfig, ModelConfig
from kvcanary_agent.demo.engine import Engine
from kvcanary_agent.demo.model import Batch, Transformer

MODEL = ModelConfig(num_layers=2)
MAX_LEN = 40
WEIGHTS = Transformer(MODEL, max_positions=MAX_LEN, device="cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine(*, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, max_batched_tokens: int = 64) -> Engine:
    return Engine(
        EngineConfig(
            model=MODEL,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_model_len=MAX_LEN,
        )
    )


@cache
def reference_ranking(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens likeliest to follow, best first: every position recomputed, one head at a time, no pool, no batch."""

    def normalise(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(len(x), dtype=torch.float64)[:, None]
        pair = torch.arange(MODEL.head_dim // 2, dtype=torch.float64)
        angle = position / 10000.0 ** (2 * pair / MODEL.head_dim)
        even, odd = x[:, 0::2], x[:, 1::2]
        rotated = torch.empty_like(x)
        rotated[:, 0::2] = even * angle.cos() - odd * angle.sin()
        rotated[:, 1::2] = even * angle.sin() + odd * angle.cos()
        return rotated

    def stored(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).to(torch.float64)

    dim, length = MODEL.head_dim, len(token_ids)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = WEIGHTS.embedding[list(token_ids)]
    for layer in WEIGHTS.layers:
        heads = (normalise(x) @ layer.qkv).split_with_sizes([dim] * (layer.qkv.shape[1] // dim), dim=1)
        attended = []
        for head in range(MODEL.num_heads):
            kv_head = head // (MODEL.num_heads // MODEL.num_kv_heads)
            key = stored(rotate(heads[MODEL.num_heads + kv_head]))
            value = stored(heads[MODEL.num_heads + MODEL.num_kv_heads + kv_head])
            scores = rotate(heads[head]) @ key.T / dim**0.5
            attended.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
        x = x + torch.cat(attended, dim=1) @ layer.out
        gate = normalise(x) @ layer.gate
        x = x + (gate * gate.sigmoid() * (normalise(x) @ layer.up)) @ layer.down
    ranking: list[int] = (normalise(x[-1]) @ WEIGHTS.head).argsort(descending=True)[:8].tolist()
    return tuple(ranking)


def reference(prompt: list[int], max_tokens: int, n: int = 1) -> tuple[tuple[int, ...], ...]:
    outputs = []
    for rank in range(n):
        token_ids = (*prompt, reference_ranking(tuple(prompt))[rank])
        while len(token_ids) < len(prompt) + max_tokens:
            token_ids += reference_ranking(token_ids)[:1]
        outputs.append(token_ids[len(prompt) :])
    return tuple(outputs)


# Prompts that begin alike, so that prefixes are shared, partly or wholly.
prompts = st.builds(
    lambda start, end: [7, 7, 7, 1, 2, 3, 4, 5, 6, 7, 8, 9][:start] + end,
    st.integers(0, 12),
    st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=1, max_size=8),
)
requests = st.tuples(prompts, st.integers(1, 14), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(
    workload=st.lists(requests, min_size=1, max_size=7),
    arrivals=st.lists(st.integers(0, 4), min_size=7, max_size=7),
    block_size=st.sampled_from([1, 4, 8]),
    spare_blocks=st.integers(0, 4),
    max_num_seqs=st.integers(3, 6),
    max_batched_tokens=st.integers(1, 24),
)
def test_outputs_equal_recomputation_without_a_cache_whatever_the_workload(
    workload: list[tuple[list[int], int, int]],
    arrivals: list[int],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    max_batched_tokens: int,
) -> None:
    tight = engine(
        num_blocks=1 + MAX_LEN // block_size + spare_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
    )
    outputs: dict[str, tuple[tuple[int, ...], ...]] = {}
    for (prompt, max_tokens, n), steps_until_next in zip(workload, arrivals, strict=False):
        tight.add_request(prompt, max_tokens=max_tokens, n=n)
        for _ in range(steps_until_next):
            outputs.update((output.request_id, output.outputs) for output in tight.step())
    while not tight.is_idle:
        outputs.update((output.request_id, output.outputs) for output in tight.step())

    assert [outputs[f"request-{index}"] for index in range(len(workload))] == [
        reference(prompt, max_tokens, n) for prompt, max_tokens, n in workload
    ]
    assert tight.block_manager.num_free == tight.config.num_blocks - 1


def test_a_request_that_runs_out_of_blocks_preempts_and_all_outputs_stay_right() -> None:
    tight = engine(num_blocks=11)
    contested = [[index] * 10 for index in range(4)]

    outputs = tight.generate(contested, max_tokens=20)

    assert tight.scheduler.num_preemptions > 0
    assert [output.outputs for output in outputs] == [reference(prompt, 20) for prompt in contested]


def forwarded(running: Engine) -> list[Batch]:
    """The batches of all forwards from now on."""
    batches: list[Batch] = []
    forward = running.runner.forward

    def recording_forward(batch: Batch) -> torch.Tensor:
        batches.append(batch)
        return forward(batch)

    running.runner.forward = recording_forward  # type: ignore[method-assign]  # observed as an adapter would
    return batches


def test_a_prefix_that_another_request_computed_is_not_computed_again() -> None:
    shared = engine()
    prompt = list(range(11))
    shared.generate([prompt], max_tokens=1)
    batches = forwarded(shared)

    shared.generate([[*prompt, 99]], max_tokens=1)

    assert batches[0].prefix_lens.tolist() == [8]
    assert batches[0].token_ids.tolist() == [8, 9, 10, 99]


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    chunked = engine(max_batched_tokens=6)
    batches = forwarded(chunked)

    chunked.generate([list(range(14))], max_tokens=1)

    assert [batch.prefix_lens.tolist() for batch in batches] == [[0], [6], [12]]
    assert [len(batch.token_ids) for batch in batches] == [6, 6, 2]


def test_decoding_goes_on_while_another_prompt_is_prefilled() -> None:
    mixed = engine()
    mixed.add_request([1, 2, 3], max_tokens=4)
    mixed.step()
    mixed.add_request([4, 5, 6, 7, 8], max_tokens=1)
    batches = forwarded(mixed)

    mixed.step()

    assert batches[0].query_offsets.tolist() == [0, 1, 6]


def test_every_token_of_a_batch_is_written_where_its_block_table_says() -> None:
    observed = engine(num_blocks=24, max_batched_tokens=16)
    batches = forwarded(observed)

    observed.generate([[index] * (index + 1) for index in range(6)], max_tokens=12, n=2)

    for batch in batches:
        assert batch.block_tables.dtype == batch.prefix_lens.dtype == batch.query_offsets.dtype == torch.int32
        assert batch.token_ids.dtype == batch.positions.dtype == batch.slot_mapping.dtype == torch.int64
        assert len(batch.request_ids) == len(batch.block_tables) == len(batch.prefix_lens)
        for row, table in enumerate(batch.block_tables.tolist()):
            first, end = batch.query_offsets[row : row + 2].tolist()
            positions = batch.positions[first:end].tolist()
            prefix_len = int(batch.prefix_lens[row])
            assert positions == list(range(prefix_len, prefix_len + end - first))
            assert batch.slot_mapping[first:end].tolist() == [table[p // 4] * 4 + p % 4 for p in positions]
            num_blocks = positions[-1] // 4 + 1
            assert NULL_BLOCK not in table[:num_blocks]
            assert set(table[num_blocks:]) <= {NULL_BLOCK}
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping)


def test_continuations_share_their_prompt_and_copy_only_its_last_partial_block() -> None:
    parallel = engine()
    copied: list[tuple[int, int]] = []
    copy_blocks = parallel.runner.copy_blocks

    def recording_copy_blocks(pairs: List[tuple[int, int]]) -> None:
        copied.extend(pairs)
        copy_blocks(pairs)

    parallel.runner.copy_blocks = recording_copy_blocks  # type: ignore[method-assign]  # observed as an adapter would
    batches = forwarded(parallel)

    [output] = parallel.generate([[5] * 10], max_tokens=3, n=3)

    assert output.outputs == reference([5] * 10, 3, n=3)
    assert batches[1].request_ids == ("request-0", "request-0/1", "request-0/2")
    shared_blocks = batches[0].block_tables[0, :2].tolist()
    assert batches[1].block_tables[:, :2].tolist() == [shared_blocks] * 3
    assert [source for source, _ in copied] == [batches[0].block_tables[0, 2].item()] * 2


def test_what_free_blocks_and_the_null_block_hold_is_never_used() -> None:
    poisoned = engine()
    poisoned.runner.pool.data.fill_(float("nan"))

    outputs = poisoned.generate([[1, 2, 3], [4, 5, 6, 7, 8, 9]], max_tokens=5)

    assert [output.outputs for output in outputs] == [reference([1, 2, 3], 5), reference([4, 5, 6, 7, 8, 9], 5)]


def test_an_aborted_request_gives_back_its_blocks_and_leaves_the_others_alone() -> None:
    aborting = engine(max_num_seqs=3)
    aborting.add_request([1, 2, 3], max_tokens=20, n=2, request_id="running")
    aborting.add_request([4, 5, 6], max_tokens=20, n=3, request_id="waiting")
    aborting.add_request([7, 8, 9], max_tokens=4, request_id="kept")
    for _ in range(3):
        aborting.step()

    aborting.abort("running")
    aborting.abort("waiting")
    aborting.abort("unknown")

    outputs = []
    while not aborting.is_idle:
        outputs += aborting.step()
    assert [(output.request_id, output.outputs) for output in outputs] == [("kept", reference([7, 8, 9], 4))]
    assert aborting.block_manager.num_free == aborting.config.num_blocks - 1


def test_after_abort_all_no_old_block_is_shared() -> None:
    failed = engine()
    failed.add_request([3] * 9, max_tokens=9)
    failed.step()
    failed.abort_all()
    batches = forwarded(failed)

    failed.generate([[3] * 9], max_tokens=1)

    assert batches[0].prefix_lens.tolist() == [0]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "request_id", "message"),
    [
        ([], 1, 1, None, "prompt must be"),
        ([MODEL.vocab_size], 1, 1, None, "prompt must be"),
        ([1], 0, 1, None, "max_tokens"),
        ([1] * MAX_LEN, 1, 1, None, f"at most {MAX_LEN}"),
        ([1], 1, 0, None, "n is 0"),
        ([1], 1, 9, None, "n is 9"),
        ([1], 1, 1, "taken", "not finished"),
        ([1], 1, 1, "a/1", 'contains "/"'),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    prompt: list[int], max_tokens: int, n: int, request_id: str | None, message: str
) -> None:
    refusing = engine()
    refusing.add_request([1], max_tokens=1, request_id="taken")

    with pytest.raises(ValueError, match=message):
        refusing.add_request(prompt, max_tokens=max_tokens, n=n, request_id=request_id)


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="raise num_blocks or lower max_model_len"):
        EngineConfig(num_blocks=5, block_size=4, max_model_len=17)
