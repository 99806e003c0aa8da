"""Healthy traffic with the agent: nothing is reported, everything is checked, every token is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engines.transformers.harness import MAX_TOKENS, PROMPTS, Engine, Session
from tests.otlp_receiver import OtlpReceiver

SMALL = {"num_blocks": 24}
TO_HOST = {"cpu_offload_space": 0.01}
GREEDY = {"do_sample": False}
STATIC = {"do_sample": False, "cache_implementation": "static"}
FOUR = PROMPTS[:4]
MODELS = ("llama", "mistral_sliding", "gemma3_hybrid")


@dataclass(frozen=True, slots=True)
class Pair:
    """The same program with and without the agent, which compares every byte."""

    with_agent: Session
    without: Session

    def answer(self, **command: Any) -> Any:
        """What both answer to a command."""
        with_agent, without = (session.do(dict(command)) for session in (self.with_agent, self.without))
        assert not isinstance(without, str), without
        assert with_agent == without
        return with_agent

    def nothing_is_wrong(self, pool: str, check: str, more_than: float) -> None:
        """More slots than so many passed a check, and none failed any."""
        self.with_agent.wait_for(lambda receiver: self.with_agent.checked(check, pool) > more_than)
        assert [violation.attributes for violation in self.with_agent.violations] == []


@pytest.fixture(scope="module")
def pair(engine: Engine) -> Iterator[Pair]:
    with ExitStack() as stack:
        full = {"KVCANARY_CONTENT": "full"}
        with_agent = stack.enter_context(engine.session(agent=True, environment=full))
        yield Pair(with_agent, stack.enter_context(engine.session(agent=False)))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("answers", "options"),
    [
        pytest.param(1, {}, id="plain"),
        pytest.param(1, {"max_batch_tokens": 48, **SMALL, **TO_HOST}, id="chunked_to_host_and_back"),
        pytest.param(1, SMALL, id="started_anew"),
        pytest.param(3, {"max_batch_tokens": 64}, id="forked"),
    ],
)
def test_continuous_batching(pair: Pair, model: str, answers: int, options: dict[str, Any]) -> None:
    before = pair.with_agent.checked("content", "kv")

    found = pair.answer(
        do="batch", model=model, prompts=PROMPTS, max_tokens=MAX_TOKENS, answers=answers, options=options
    )

    assert [len(tokens) for tokens in found] == [MAX_TOKENS] * len(found)
    pair.nothing_is_wrong("kv", "content", before + sum(map(len, PROMPTS)))


def test_blocks_that_come_back_from_host_memory_are_compared(pair: Pair) -> None:
    options = {**SMALL, **TO_HOST}
    pair.answer(do="batch", model="llama", prompts=PROMPTS, max_tokens=MAX_TOKENS, options=options)

    pair.nothing_is_wrong("kv", "transfer", 0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("options", "others"),
    [
        pytest.param(GREEDY, {}, id="greedy"),
        pytest.param({"do_sample": True, "num_return_sequences": 3}, {}, id="sampled"),
        pytest.param({"do_sample": False, "num_beams": 3}, {}, id="beams"),
        pytest.param(STATIC, {}, id="static"),
        pytest.param({**STATIC, "num_beams": 2}, {}, id="static_beams"),
        pytest.param({"do_sample": False, "prefill_chunk_size": 32}, {}, id="chunked"),
        pytest.param({"do_sample": False, "prompt_lookup_num_tokens": 3}, {"prompts": PROMPTS[1:2]}, id="lookup"),
        pytest.param(
            GREEDY, {"prompts": PROMPTS[1:2], "assistant": "llama_one_kv_head", "max_tokens": 90}, id="assisted"
        ),
    ],
)
def test_generate(pair: Pair, model: str, options: dict[str, Any], others: dict[str, Any]) -> None:
    before = pair.with_agent.checked("content", "generate")

    pair.answer(
        **{"do": "generate", "model": model, "prompts": FOUR, "max_tokens": MAX_TOKENS, **others}, options=options
    )

    pair.nothing_is_wrong("generate", "content", before + 1000)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "copied"), [("dynamic", False), ("static", False), ("bare", True)])
def test_turns_over_one_cache(pair: Pair, model: str, kind: str, copied: bool) -> None:
    before = pair.with_agent.checked("content", "generate")

    pair.answer(do="turns", model=model, prompts=FOUR, max_tokens=MAX_TOKENS, kind=kind, copied=copied)

    pair.nothing_is_wrong("generate", "content", before + 1000)


def test_a_loop_of_the_users_own_that_crops_selects_and_repeats(pair: Pair) -> None:
    before = pair.with_agent.checked("content", "generate")

    pair.answer(do="loop", model="llama", prompts=[prompt[:20] for prompt in FOUR], max_tokens=MAX_TOKENS)

    pair.nothing_is_wrong("generate", "content", before + 1000)


def test_training_and_compiled_models_are_left_alone(pair: Pair) -> None:
    pair.answer(do="train", model="llama", prompts=[prompt[:20] for prompt in FOUR])
    pair.answer(do="compiled", model="llama", prompts=FOUR, max_tokens=8)
    pair.answer(do="generate", model="llama", prompts=FOUR, max_tokens=MAX_TOKENS, options=GREEDY)

    pair.nothing_is_wrong("generate", "token", 0)


def is_not_covered(subject: str) -> Callable[[OtlpReceiver], bool]:
    return lambda receiver: receiver.latest("kvcanary.coverage", kvcanary_subject=subject) == 0


def test_what_is_not_covered_is_named_and_works(pair: Pair) -> None:
    quantised = {**GREEDY, "cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}}
    pair.answer(do="generate", model="llama", prompts=FOUR, max_tokens=MAX_TOKENS, options=quantised)
    pages_of_24 = {"page_size": 24}
    pair.answer(do="batch", model="gemma3_hybrid", prompts=FOUR, max_tokens=MAX_TOKENS, options=pages_of_24)

    for subject in ("caches with layers of class QuantoQuantizedLayer", "sliding_attention layers"):
        pair.with_agent.wait_for(is_not_covered(subject))
    assert [violation.attributes for violation in pair.with_agent.violations] == []


def test_caches_are_not_kept_alive_and_are_one_pool(pair: Pair) -> None:
    assert pair.answer(do="caches") == 0
    pair.with_agent.wait_for(lambda receiver: receiver.latest("kvcanary.pools") is not None)
    pools = {point.attributes.get("kvcanary.pool") for point in pair.with_agent.receiver.points}
    assert pools <= {None, "kv", "generate"}
