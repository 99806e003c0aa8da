"""N-gram speculation: drafts are written ahead of what is accepted, and overwritten where they are rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.processes import checked
from tests.engines.sglang.harness import HERE, MAX_TOKENS, PROMPTS, READ_AT_LEAST, Engine, Session, injecting

DRAFTS = 4
ADAPTER = HERE / "speculation_on_cpu.py"
MOVING = {"SGLANG_NATIVE_MOVE_KV_CACHE": "1"}
SPECULATIVE: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": DRAFTS}


@dataclass(frozen=True, slots=True)
class Speculating:
    """An engine that speculates, and the folder in which it takes requests for faults."""

    session: Session
    folder: Path


@pytest.fixture(scope="module", params=[1, 16], ids=["token_by_token", "pages"])
def speculating(
    request: pytest.FixtureRequest, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Speculating]:
    folder = tmp_path_factory.mktemp("faults")
    environment = injecting(folder, ADAPTER, KVCANARY_DRILL="content@1000000000", **MOVING)
    # Each draft follows the one before.
    options = {**SPECULATIVE, "speculative_ngram_max_bfs_breadth": 1, "page_size": request.param}
    with engine.session(agent=True, environment=environment, **options) as session:
        yield Speculating(session, folder)


def test_drafts_are_checked_without_a_false_report(speculating: Speculating) -> None:
    session = speculating.session
    answers = session.generate(PROMPTS)
    turn = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    session.generate(turn)
    # More than the pool holds at once.
    session.generate([[3 + i, *range(50, 250), *[60 + i] * 150] for i in range(16)])
    session.do({"do": "abort", "prompts": PROMPTS, "max_tokens": 2 * MAX_TOKENS})
    assert session.do({"do": "flush"})

    assert session.generate(PROMPTS) == answers

    session.wait_for(checked("chain", READ_AT_LEAST // DRAFTS))
    assert [violation.attributes for violation in session.violations] == []
    assert session.receiver.latest("kvcanary.coverage", kvcanary_subject="pool kv") == 1
    assert "not covering" not in session.process.tail()


def test_some_drafts_are_accepted_and_some_rejected(speculating: Speculating) -> None:
    command = {"do": "count_verifications", "prompts": PROMPTS, "max_tokens": MAX_TOKENS}

    steps = speculating.session.do(command)

    # The prompt's own step gives the first token.
    assert (MAX_TOKENS - 1) / DRAFTS * len(PROMPTS) < sum(steps) < (MAX_TOKENS - 1) * len(PROMPTS)


@pytest.mark.parametrize(
    ("drill", "kinds"), [("content", {"content", "nonfinite"}), ("block_table_swap", {"position"})]
)
def test_a_fault_is_seen_by_the_step_that_verifies_drafts(
    speculating: Speculating, drill: str, kinds: set[str]
) -> None:
    session, receiver = speculating.session, speculating.session.receiver
    assert session.do({"do": "flush"})
    reported, drills = len(session.violations), len(receiver.events("kvcanary.drill"))
    (speculating.folder / "request").write_text(json.dumps({"kind": "drill", "drill": drill}))

    session.generate(PROMPTS)

    session.wait_for(lambda receiver: len(receiver.events("kvcanary.violation")) > reported)
    (struck,) = receiver.events("kvcanary.drill")[drills:]
    found = [violation.attributes for violation in session.violations[reported:]]
    first = min(each["kvcanary.step"] for each in found)
    assert first == struck.attributes["kvcanary.step"]
    assert {each["kvcanary.kind"] for each in found if each["kvcanary.step"] == first} & kinds


def test_a_tree_of_drafts_is_named_as_not_covered(engine: Engine) -> None:
    environment = {"KVCANARY_ADAPTERS": f"sglang,{ADAPTER}", **MOVING}
    # Without the option, the engine makes a tree.
    with engine.session(agent=True, environment=environment, **SPECULATIVE) as session:
        answers = session.generate(PROMPTS)

        assert [len(answer) for answer in answers] == [MAX_TOKENS] * len(PROMPTS)
        session.wait_for(lambda receiver: receiver.latest("kvcanary.coverage", kvcanary_subject="KV pool") == 0)
        assert "not covering KV pool of sglang: speculative_eagle_topk=" in "".join(session.process.output)
