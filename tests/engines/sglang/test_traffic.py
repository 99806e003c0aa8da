"""Healthy traffic with the agent: nothing is reported, everything is checked, every token is the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engines.processes import checked, passed_slots
from tests.engines.sglang.harness import MAX_TOKENS, PROMPTS, READ_AT_LEAST, Engine, Session

FULL = {"KVCANARY_CONTENT": "full"}
CHUNKED = {"chunked_prefill_size": 64, "enable_mixed_chunk": True}
RETRACTING = {"SGLANG_TEST_RETRACT": "1"}


@dataclass(frozen=True, slots=True)
class Pair:
    """The same engine with and without the agent."""

    with_agent: Session
    without: Session
    retracts: bool

    def both(self, command: dict[str, Any]) -> tuple[Any, Any]:
        """The answers of both engines, with the agent first."""
        with ThreadPoolExecutor(2) as pool:
            with_agent, without = pool.map(lambda session: session.do(command), (self.with_agent, self.without))
        return with_agent, without


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(({}, {}), id="token_by_token"),
        pytest.param(
            ({"model": "gemma3_hybrid", "page_size": 16, "disable_overlap_schedule": True, **CHUNKED}, RETRACTING),
            id="pages_chunked_mixed_retracting",
        ),
        pytest.param(({"disable_radix_cache": True, **CHUNKED}, RETRACTING), id="no_prefix_cache_retracting"),
    ],
)
def pair(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Pair]:
    options, environment = request.param
    with ExitStack() as stack:
        sessions = [
            engine.session(agent=agent, environment={**environment, **(FULL if agent else {})}, **options)
            for agent in (True, False)
        ]
        with ThreadPoolExecutor(2) as both_at_once:
            with_agent, without = both_at_once.map(stack.enter_context, sessions)
        yield Pair(with_agent, without, retracts=environment is RETRACTING)


def test_concurrent_requests_are_checked_and_answered_as_without_the_agent(pair: Pair) -> None:
    with_agent, without = pair.both({"do": "generate", "prompts": PROMPTS, "max_tokens": MAX_TOKENS})

    assert with_agent == without
    pair.with_agent.wait_for(checked("chain", READ_AT_LEAST))
    for check in ("address", "ownership", "unwritten", "position", "token", "content"):
        assert passed_slots(pair.with_agent.receiver, check) >= READ_AT_LEAST, check


def test_a_second_turn_reuses_the_prefix(pair: Pair) -> None:
    with_agent, without = pair.both({"do": "generate", "prompts": PROMPTS, "max_tokens": MAX_TOKENS})
    turn = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(PROMPTS, without, strict=True)]

    second = pair.both({"do": "generate", "prompts": turn, "max_tokens": MAX_TOKENS})

    assert with_agent == without
    assert second[0] == second[1]


def test_requests_after_a_flush_start_anew(pair: Pair) -> None:
    assert pair.both({"do": "flush"}) == (True, True)

    with_agent, without = pair.both({"do": "generate", "prompts": PROMPTS, "max_tokens": MAX_TOKENS})

    assert with_agent == without


def test_aborted_requests_leave_the_others_as_they_are(pair: Pair) -> None:
    with_agent, without = pair.both({"do": "abort", "prompts": PROMPTS, "max_tokens": 2 * MAX_TOKENS})

    assert with_agent == without
    assert len(with_agent) == len(PROMPTS) // 2


def test_more_requests_than_the_pool_holds_evict_each_other(pair: Pair) -> None:
    many = [[3 + i, *range(50, 250), *[60 + i] * 150] for i in range(16)]

    with_agent, without = pair.both({"do": "generate", "prompts": many, "max_tokens": MAX_TOKENS})

    assert with_agent == without


def test_requests_with_different_salts_do_not_share(pair: Pair) -> None:
    salts = ["a", "b"] * (len(PROMPTS) // 2)

    with_agent, without = pair.both({"do": "generate", "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "salts": salts})

    assert with_agent == without


def test_requests_are_retracted_where_that_is_asked_for(pair: Pair) -> None:
    pair.both({"do": "generate", "prompts": PROMPTS, "max_tokens": MAX_TOKENS})

    assert (pair.with_agent.retractions > 0) == (pair.without.retractions > 0) == pair.retracts


def test_nothing_was_reported(pair: Pair) -> None:
    """The last one of an engine: about everything before it."""
    before = passed_slots(pair.with_agent.receiver, "chain")
    pair.with_agent.generate(PROMPTS)
    pair.with_agent.wait_for(checked("chain", int(before) + 1))

    assert [violation.attributes for violation in pair.with_agent.violations] == []
    assert pair.with_agent.receiver.latest("kvcanary.coverage", kvcanary_subject="pool kv") == 1
    assert "not covering" not in pair.with_agent.process.tail()
