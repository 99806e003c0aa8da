"""Faults in the caches of real models: each is reported, where it is, and with its cause."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.transformers.harness import MAX_TOKENS, PROMPTS, Engine, Session

FOUR = PROMPTS[:4]


@pytest.fixture(scope="module")
def session(engine: Engine) -> Iterator[Session]:
    with engine.session(agent=True, environment={"KVCANARY_CONTENT": "full"}) as running:
        yield running


def found_in(session: Session, **command: Any) -> list[dict[str, Any]]:
    """The violations that a command with a fault has led to."""
    before = len(session.violations)
    answer = session.do({"model": "llama", "prompts": FOUR, "max_tokens": MAX_TOKENS, **command})
    assert not isinstance(answer, str), answer
    session.wait_for(lambda receiver: len(receiver.events("kvcanary.violation")) > before)
    return [violation.attributes for violation in session.violations[before:]]


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("layer", [0, -1])
def test_a_flipped_bit_in_a_page(session: Session, layer: int, part: str) -> None:
    fault = {"kind": "page_bit", "at": 5, "layer": layer, "part": part}

    found = found_in(session, do="batch", options={}, fault=fault)

    assert {each["kvcanary.kind"] for each in found} == {"content"}
    assert {(each["kvcanary.layer"], each["kvcanary.part"]) for each in found} == {(f"layers.{layer % 3}", part)}


def test_swapped_pages(session: Session) -> None:
    found = found_in(session, do="batch", options={}, fault={"kind": "swap_pages", "at": 5})

    assert {each["kvcanary.kind"] for each in found} & {"position", "chain", "token"}


def test_pages_handed_out_while_they_are_in_use(session: Session) -> None:
    found = found_in(session, do="batch", options={"max_batch_tokens": 128}, fault={"kind": "free_in_use", "at": 5})

    assert "ownership" in {each["kvcanary.kind"] for each in found}


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("layer", [0, -1])
def test_a_flipped_bit_in_a_row(session: Session, options: dict[str, Any], layer: int, part: str) -> None:
    fault = {"kind": "row_bit", "at": 5, "layer": layer, "part": part}

    found = found_in(session, do="generate", options={"do_sample": False, **options}, fault=fault)

    assert len(found) == 1
    assert (found[0]["kvcanary.kind"], found[0]["kvcanary.part"]) == ("content", part)
    assert (found[0]["kvcanary.layer"], found[0]["kvcanary.position"]) == (f"layers.{layer % 3}", 3)
    assert str(found[0]["kvcanary.request"]).endswith(".row-0")


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("model", ["mistral_sliding", "gemma3_hybrid"])
def test_a_flipped_bit_in_a_window(session: Session, model: str, options: dict[str, Any]) -> None:
    fault = {"kind": "row_bit", "at": 5, "layer": 0, "part": "v"}

    found = found_in(session, do="generate", model=model, options={"do_sample": False, **options}, fault=fault)

    assert [(each["kvcanary.kind"], each["kvcanary.layer"]) for each in found] == [("content", "layers.0")]
    assert int(found[0]["kvcanary.position"]) > 3


def test_rows_that_change_places(session: Session) -> None:
    fault = {"kind": "swap_rows", "at": 5, "layer": 1}

    found = found_in(session, do="generate", options={"do_sample": False}, fault=fault)

    assert [each["kvcanary.layer"] for each in found] == ["layers.1"] * 2


def test_a_layer_whose_beams_are_not_reordered(session: Session) -> None:
    fault = {"kind": "keep_rows", "at": 2, "layer": 1}

    found = found_in(session, do="generate", options={"do_sample": False, "num_beams": 4}, fault=fault)

    assert {(each["kvcanary.kind"], each["kvcanary.layer"]) for each in found} == {("content", "layers.1")}


def test_beams_that_are_reordered_otherwise_than_their_tokens(session: Session) -> None:
    fault = {"kind": "other_rows", "at": 2}

    found = found_in(session, do="generate", options={"do_sample": False, "num_beams": 4}, fault=fault)

    assert {each["kvcanary.kind"] for each in found} == {"token"}


@pytest.mark.parametrize("do", ["batch", "generate"])
def test_a_drill_is_reported(engine: Engine, do: str) -> None:
    environment = {"KVCANARY_CONTENT": "full", "KVCANARY_DRILL": "content@5"}
    with engine.session(agent=True, environment=environment) as session:
        found = found_in(session, do=do, options={})

        assert {each["kvcanary.kind"] for each in found} == {"content"}
        session.wait_for(lambda receiver: receiver.latest("kvcanary.drills"))


@pytest.mark.parametrize(
    ("do", "fault"),
    [
        ("batch", {"kind": "page_bit", "at": 5, "layer": 0, "part": "k"}),
        ("generate", {"kind": "row_bit", "at": 5, "layer": 0, "part": "k"}),
    ],
)
def test_in_raise_mode_the_call_fails(engine: Engine, do: str, fault: dict[str, Any]) -> None:
    environment = {"KVCANARY_CONTENT": "full", "KVCANARY_MODE": "raise"}
    with engine.session(agent=True, environment=environment) as session:
        command = {"model": "llama", "prompts": FOUR, "max_tokens": MAX_TOKENS, "options": {}, "fault": fault}

        answer = session.do({"do": do, **command})

        assert "KVCanaryError" in answer or "AssertionError" in answer
        session.wait_for(lambda receiver: receiver.events("kvcanary.violation"))
