"""Faults put into a running engine are reported with their kind, their place and what probably caused them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcanary_agent.settings import DRILLS
from tests.engines.processes import checked, passed_slots
from tests.engines.sglang.harness import PROMPTS, Engine, Session, injecting
from tests.otlp_receiver import Attributes, OtlpReceiver

# What each drill is reported as, and the causes that it may be put down to.
DRILLED = {
    # One bit may make a number of none.
    "content": ({"content", "nonfinite"}, {"stray_write"}),
    # A page may be a single slot.
    "idle_block": ({"content"}, {"block_overwritten", "stray_write"}),
    "nonfinite": ({"nonfinite"}, {"nonfinite_in_null_block"}),
    "block_table_swap": ({"position"}, {"block_table_swapped"}),
    "foreign_block": ({"position"}, {"foreign_block"}),
    "slot_mapping": ({"address"}, {"slot_mapping_wrong"}),
    "lost_write": ({"lost_write"}, {"write_dropped"}),
}
# Prompts that leave other tokens than those of `PROMPTS` in all slots that a few of them are given later.
OTHERS = [[3 + (7 * at + 31 * row) % 500 for at in range(300)] for row in range(4)]


class FaultyEngine:
    """An engine into which faults can be put while it serves, one after the other."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._request, self._report = folder / "request", folder / "report"

    def suffer(
        self,
        fault: dict[str, Any],
        requests: list[list[int]] = PROMPTS,
        *,
        cached: list[list[int]] | None = None,
        before: list[list[int]] | None = None,
        salts: list[str] | None = None,
    ) -> tuple[dict[str, Any], list[Attributes]]:
        """Serve requests until the fault has struck: what it did, and what was reported from then on.

        Args:
            fault: See `fault_injector.py`.
            requests: Prompts.
            cached: Prompts that are in the prefix cache when it strikes; the same ones if not given.
            before: Prompts whose slots are used again by those.
            salts: One for each prompt; none if not given.
        """
        session = self._session
        # What an earlier fault has damaged must not be met again.
        assert session.do({"do": "flush"})
        if before is not None:
            session.generate(before)
            assert session.do({"do": "flush"})
        session.generate(cached or requests, salts=salts)
        reported = len(session.violations)
        self._report.unlink(missing_ok=True)
        self._request.write_text(json.dumps(fault))
        session.generate(requests, salts=salts)
        if not self._report.exists():
            session.generate(requests, salts=salts)
        assert self._report.exists(), f"{fault} found nothing that it could strike"

        def arrived(receiver: OtlpReceiver) -> bool:
            return len(receiver.events("kvcanary.violation")) > reported

        session.wait_for(arrived)
        return json.loads(self._report.read_text()), [found.attributes for found in session.violations[reported:]]

    def drill(self, kind: str) -> list[Attributes]:
        """What is reported at the step that meets a fault which the agent itself has injected."""
        drills = len(self._session.receiver.events("kvcanary.drill"))
        _, found = self.suffer({"kind": "drill", "drill": kind}, PROMPTS[:2], before=OTHERS)
        (struck,) = self._session.receiver.events("kvcanary.drill")[drills:]
        assert struck.attributes["kvcanary.kind"] == kind
        first = min(each["kvcanary.step"] for each in found)
        # The patrol compares one of the six parts at each step.
        assert 0 <= first - struck.attributes["kvcanary.step"] <= (5 if kind == "idle_block" else 0)
        return [each for each in found if each["kvcanary.step"] == first]

    def after_new_weights(self, model: str, *, flush: bool) -> list[Attributes]:
        """Serve the same requests before and after the weights are loaded anew: what was reported after it."""
        session = self._session
        assert session.do({"do": "flush"})
        session.generate(PROMPTS)
        before = len(session.violations)
        assert session.do({"do": "update_weights", "model": model, "flush": flush})
        chains = passed_slots(session.receiver, "chain")
        session.generate(PROMPTS)
        session.wait_for(checked("chain", int(chains) + 1))
        return [found.attributes for found in session.violations[before:]]


@pytest.fixture(scope="module", params=[1, 16], ids=["token_by_token", "pages"])
def faulty_engine(
    request: pytest.FixtureRequest, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyEngine]:
    folder = tmp_path_factory.mktemp("faults")
    # A drill that never comes, so that the canary is one which can be told to.
    environment = injecting(folder, KVCANARY_DRILL="content@1000000000")
    with engine.session(agent=True, environment=environment, page_size=request.param) as session:
        yield FaultyEngine(session, folder)


def of_kind(found: list[Attributes], *kinds: str) -> list[Attributes]:
    return [each for each in found if each["kvcanary.kind"] in kinds]


@pytest.mark.parametrize("layer", [0, -1], ids=["first_layer", "last_layer"])
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_flipped_bit_is_named_by_slot_layer_and_part(faulty_engine: FaultyEngine, layer: int, part: str) -> None:
    done, found = faulty_engine.suffer({"kind": "flip_bit", "layer": layer, "part": part})

    assert {
        (each["kvcanary.kind"], each["kvcanary.slot"], each["kvcanary.layer"], each["kvcanary.part"]) for each in found
    } == {("content", done["slots"][0], done["layer"], part)}
    # One after the other, the faults of this test hit the same slot.
    assert found[0]["kvcanary.cause"] in {"stray_write", "block_overwritten"}


def test_bytes_copied_from_another_slot_are_content(faulty_engine: FaultyEngine) -> None:
    done, found = faulty_engine.suffer({"kind": "copy_slot"})

    assert {(each["kvcanary.kind"], each["kvcanary.slot"]) for each in found} == {("content", done["slots"][0])}
    assert len({(each["kvcanary.layer"], each["kvcanary.part"]) for each in found}) == 6


def test_swapped_entries_of_the_token_table_are_seen_at_the_next_step(faulty_engine: FaultyEngine) -> None:
    done, found = faulty_engine.suffer({"kind": "swap_entries"})

    first = min(found, key=lambda each: each["kvcanary.step"])
    assert first["kvcanary.slot"] in done["slots"]
    # Within a page, the table then no longer says where the newest token goes.
    assert (first["kvcanary.kind"], first["kvcanary.cause"]) in {
        ("position", "block_table_swapped"),
        ("address", "slot_mapping_wrong"),
    }


def test_swapped_rows_of_the_token_table_are_foreign_tokens(faulty_engine: FaultyEngine) -> None:
    done, found = faulty_engine.suffer({"kind": "swap_rows"})

    foreign = of_kind(found, "token", "chain")
    assert foreign
    assert {each["kvcanary.slot"] for each in foreign} <= set(done["slots"])


def test_a_page_freed_while_a_request_reads_it_is_ownership(faulty_engine: FaultyEngine) -> None:
    done, found = faulty_engine.suffer({"kind": "free_in_use"})

    reads = of_kind(found, "ownership")
    assert reads
    assert {each["kvcanary.slot"] for each in reads} >= set(done["slots"])
    assert reads[0]["kvcanary.cause"] == "freed_while_in_use"


def test_a_page_freed_twice_is_ownership_at_once(faulty_engine: FaultyEngine) -> None:
    done, found = faulty_engine.suffer({"kind": "free_twice"})

    (first, *_) = of_kind(found, "ownership")
    assert first["kvcanary.slot"] == done["slots"][0]
    assert first["kvcanary.cause"] == "double_free"


def test_a_page_handed_out_twice_is_ownership_at_once(faulty_engine: FaultyEngine) -> None:
    done, found = faulty_engine.suffer({"kind": "hand_out_twice"})

    (first, *_) = of_kind(found, "ownership")
    assert first["kvcanary.slot"] == done["slots"][0]
    assert first["kvcanary.cause"] == "double_allocation"


def test_a_write_to_another_requests_slot_is_an_address(faulty_engine: FaultyEngine) -> None:
    done, found = faulty_engine.suffer({"kind": "wrong_write"})

    (first, *_) = of_kind(found, "address")
    assert first["kvcanary.slot"] == done["slots"][0]
    assert first["kvcanary.cause"] == "slot_mapping_wrong"


@pytest.mark.parametrize("layer", [0, -1], ids=["first_layer", "last_layer"])
def test_the_patrol_finds_a_bit_that_no_request_reads(faulty_engine: FaultyEngine, layer: int) -> None:
    done, found = faulty_engine.suffer({"kind": "idle_bit", "layer": layer}, PROMPTS[:2], cached=PROMPTS)

    patrolled = [each for each in found if "kvcanary.request" not in each]
    assert {(each["kvcanary.kind"], each["kvcanary.slot"], each["kvcanary.layer"]) for each in patrolled} == {
        ("content", done["slots"][0], done["layer"])
    }


def test_a_hit_of_other_tokens_in_the_prefix_cache_is_a_wrong_hit(faulty_engine: FaultyEngine) -> None:
    one, other = [*range(300, 400), 1], [*range(400, 500), 1]
    done, found = faulty_engine.suffer({"kind": "wrong_hit"}, [one, other])

    foreign = of_kind(found, "token")
    assert {each["kvcanary.slot"] for each in foreign} == set(done["slots"])
    assert foreign[0]["kvcanary.cause"] == "wrong_prefix_hit"


def test_a_hit_of_the_same_tokens_under_another_extra_key_is_a_namespace(faulty_engine: FaultyEngine) -> None:
    prompt = [*range(300, 400), 1]
    done, found = faulty_engine.suffer({"kind": "wrong_namespace_hit"}, [prompt, prompt], salts=["a", "b"])

    assert {each["kvcanary.kind"] for each in found} == {"namespace"}
    assert {each["kvcanary.slot"] for each in found} == set(done["slots"])
    assert found[0]["kvcanary.cause"] == "prefix_shared_across_namespaces"


@pytest.mark.parametrize("layer", [0, -1], ids=["first_layer", "last_layer"])
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_write_that_does_not_land_in_one_layer_is_lost(faulty_engine: FaultyEngine, layer: int, part: str) -> None:
    fault = {"kind": "lose_write", "layer": layer, "part": part}
    done, found = faulty_engine.suffer(fault, PROMPTS[:2], before=OTHERS)

    (first, *_) = of_kind(found, "lost_write")
    assert (first["kvcanary.slot"], first["kvcanary.layer"], first["kvcanary.part"]) == (
        done["slots"][0],
        done["layer"],
        part,
    )
    assert first["kvcanary.cause"] == "write_dropped"


@pytest.mark.parametrize("kind", DRILLS)
def test_a_drill_is_reported_as_what_it_is_at_the_step_that_meets_it(faulty_engine: FaultyEngine, kind: str) -> None:
    found = faulty_engine.drill(kind)

    wanted, causes = DRILLED[kind]
    assert of_kind(found, *wanted)[0]["kvcanary.cause"] in causes


def test_a_cached_page_that_was_freed_is_seen_when_the_engine_is_idle(faulty_engine: FaultyEngine) -> None:
    done, found = faulty_engine.suffer({"kind": "free_cached"}, PROMPTS[:2], cached=PROMPTS)

    entries = of_kind(found, "index")
    assert {each["kvcanary.slot"] for each in entries} >= set(done["slots"])
    assert entries[0]["kvcanary.cause"] == "prefix_index_wrong"


def test_a_prefix_that_outlives_a_change_of_weights_is_an_epoch(faulty_engine: FaultyEngine, engine: Engine) -> None:
    found = faulty_engine.after_new_weights(str(engine.models / "llama"), flush=False)

    assert {each["kvcanary.kind"] for each in found} == {"epoch"}
    assert found[0]["kvcanary.cause"] == "cache_survived_weight_update"


def test_a_change_of_weights_that_empties_the_cache_is_not_reported(
    faulty_engine: FaultyEngine, engine: Engine
) -> None:
    assert faulty_engine.after_new_weights(str(engine.models / "llama"), flush=True) == []


def test_in_raise_mode_the_engine_ends_without_an_answer_and_says_why(engine: Engine, tmp_path: Path) -> None:
    environment = injecting(tmp_path, KVCANARY_MODE="raise")
    with engine.session(agent=True, environment=environment) as session:
        (tmp_path / "request").write_text(json.dumps({"kind": "flip_bit", "layer": 0, "part": "k"}))

        with pytest.raises(AssertionError, match="no line with 'RESULT '"):
            session.generate(PROMPTS)

        # The scheduler is killed: what it had to say has left it before.
        session.wait_for(lambda receiver: receiver.events("kvcanary.violation"))
        assert "KVCanaryError" in session.process.finish()
