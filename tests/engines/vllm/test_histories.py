"""Tokens are known on the device where vLLM's V1 runner has none there: on GPUs, and under asynchronous scheduling."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcanary_agent.adapters.vllm.histories import Histories
from kvcanary_agent.canary import Canary, ForwardStep, GroupStep, Kind, KVGroup, KVLayout, KVPart
from kvcanary_agent.kernels import plan
from kvcanary_agent.kernels.reference.tokens import known_at
from kvcanary_agent.settings import Settings
from tests.canary.toy import RecordingSink

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


def test_a_block_with_other_tokens_at_the_same_positions_is_told_by_its_tokens() -> None:
    cache = torch.zeros(6, 4, 8)
    part = KVPart(layer="layer", part="kv", view=cache)
    layout = KVLayout(engine="engine", groups=(KVGroup(name="full", block_size=4, parts=(part,), null_block=0),))
    sink = RecordingSink()
    canary = Canary(layout, Settings(), sink)
    histories = Histories(torch.device("cpu"), UNLIMITED)
    prompts = {"a": [5, 6, 7, 8], "b": [5, 6, 9, 10]}
    for request, prompt in prompts.items():
        histories.start(request, prompt)

    def run(tokens: dict[str, list[int]], computed: int, table: list[list[int]]) -> None:
        described = step(tokens, dict.fromkeys(tokens, computed))
        positions, rows = described.positions, torch.repeat_interleave(described.query_offsets.diff())
        tables = torch.tensor(table)
        slots = tables[rows, positions // 4] * 4 + positions % 4
        described = replace(
            described,
            groups=[GroupStep(block_table=tables, write_slots=slots)],
            known_tokens=histories.known_tokens(described.requests, described.prefix_lens),
        )
        canary.before_forward(described)
        cache.view(-1, 8)[slots] = torch.rand(len(slots), 8)
        canary.after_forward()
        histories.written(described, computed + len(positions))

    run(prompts, 0, [[1, 3], [2, 4]])
    run({"a": [11], "b": [12]}, 4, [[1, 3], [2, 4]])
    assert sink.violations == []

    run({"a": [13], "b": [14]}, 5, [[1, 3], [1, 4]])
    canary.sweep()
    assert {(found.request, found.kind, found.slot) for found in sink.violations} >= {("b", Kind.TOKEN, 6)}
