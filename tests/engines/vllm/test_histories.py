"""Tokens are known on the device where vLLM's V1 runner has none there: on GPUs, and under asynchronous scheduling."""

from __future__ import annotations

from pathlib import Path

import torch

from kvcanary_agent.adapters.vllm.histories import Histories
from kvcanary_agent.canary.step import ForwardStep
from kvcanary_agent.kernels import plan
from kvcanary_agent.kernels.reference.tokens import known_at
from tests.engines.vllm.harness import Engine
from tests.engines.vllm.test_faults import injected, injecting, violations

UNLIMITED = 1 << 30


def step(tokens: dict[str, list[int]], computed: dict[str, int]) -> ForwardStep:
    """A step that has these tokens as its input, after what each request has computed."""
    lengths = [len(new) for new in tokens.values()]
    return ForwardStep(
        requests=tuple(tokens),
        prefix_lens=torch.tensor(list(computed.values()), dtype=torch.int32),
        query_offsets=torch.tensor([0, *lengths]).cumsum(0),
        token_ids=torch.tensor([token for new in tokens.values() for token in new], dtype=torch.int32),
        positions=torch.cat([torch.arange(computed[r], computed[r] + len(new)) for r, new in tokens.items()]),
        groups=(),
    )


def known(histories: Histories, request: str, computed: int, positions: int) -> list[int]:
    """What is known at the first positions of a request that has computed so many: -1 unknown, -2 no such position."""
    found = histories.known_tokens([request], torch.tensor([computed]))
    tokens = plan.KnownTokens(tokens=found.tokens, rows=found.rows, lengths=found.lengths)
    return known_at(tokens, torch.tensor(0), torch.arange(positions)).tolist()


def test_a_prompt_is_known_from_the_start_and_a_generated_token_once_it_was_input() -> None:
    histories = Histories(torch.device("cpu"), UNLIMITED)
    histories.start("a", [5, 6, 7])

    assert known(histories, "a", 0, 5) == [5, 6, 7, -2, -2]
    histories.written(step({"a": [5, 6, 7]}, {"a": 0}), 3)
    histories.written(step({"a": [8]}, {"a": 3}), 4)
    assert known(histories, "a", 4, 5) == [5, 6, 7, 8, -2]


def test_a_rejected_draft_is_never_known() -> None:
    histories = Histories(torch.device("cpu"), UNLIMITED)
    histories.start("a", [5])
    histories.written(step({"a": [5, 90, 91]}, {"a": 0}), 3)

    assert known(histories, "a", 2, 4) == [5, 90, -2, -2]
    histories.written(step({"a": [70]}, {"a": 2}), 3)
    assert known(histories, "a", 3, 4) == [5, 90, 70, -2]


def test_the_next_request_of_a_name_or_of_a_row_starts_anew() -> None:
    histories = Histories(torch.device("cpu"), UNLIMITED)
    histories.start("a", [5, 6, 7])
    histories.start("a", [8])
    assert known(histories, "a", 3, 3) == [8, -1, -1]

    histories.finish(["a", "never seen"])
    histories.start("b", [9])
    assert known(histories, "b", 3, 3) == [9, -1, -1]


def test_many_and_long_requests_are_all_known() -> None:
    histories = Histories(torch.device("cpu"), UNLIMITED)
    prompts = {f"r{i}": list(range(i, i + 30 * i)) for i in range(1, 70)}
    for request, prompt in prompts.items():
        histories.start(request, prompt)

    for request, prompt in prompts.items():
        assert known(histories, request, 0, len(prompt)) == prompt


def test_what_does_not_fit_is_unknown() -> None:
    histories = Histories(torch.device("cpu"), 64 << 10)
    histories.start("long", list(range(5000)))
    for i in range(40):
        histories.start(f"r{i}", [i])

    assert histories.num_bytes <= 64 << 10
    found = known(histories, "long", 0, 5001)
    assert found[:100] == list(range(100))
    assert found[4999:] == [-1, -2]
    assert known(histories, "r39", 0, 1) == [39]


def test_an_asynchronous_v1_step_knows_the_tokens_of_its_requests(engine: Engine, tmp_path: Path) -> None:
    report = tmp_path / "faults"
    environment = injecting([{"kind": "foreign_block", "after_step": 4}], report)

    run = engine.watch(async_scheduling=True, environment=environment, until=violations(1))

    (fault,) = injected(report)
    first = min((v.attributes for v in run.violations), key=lambda found: found["kvcanary.step"])
    assert first["kvcanary.kind"] == "token"
    assert first["kvcanary.step"] == 5
    assert first["kvcanary.slot"] in fault["slots"]
