"""Pages that leave the pool for host memory and come back from there are those that were copied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.processes import passed_slots
from tests.engines.sglang.harness import HERE, PROMPTS, Engine, Session, injecting
from tests.otlp_receiver import OtlpReceiver

HIERARCHICAL = {
    "enable_hierarchical_cache": True,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    # Smaller than what is asked for, and a host memory that holds all of it.
    "max_total_tokens": 2048,
    "hicache_ratio": 8.0,
}
# Enough to drive everything else out of the pool.
MANY = [[3 + i, *range(50, 250), *[60 + i] * 150] for i in range(16)]


@dataclass(frozen=True, slots=True)
class Tiered:
    """An engine with a hierarchical cache, and the folder in which it takes requests for faults."""

    session: Session
    folder: Path

    def brought_back(self) -> float:
        """How many slots came back from host memory so far, and were right."""
        return passed_slots(self.session.receiver, "transfer")


@pytest.fixture(scope="module", params=[(1, "write_through"), (16, "write_back")], ids=["token_by_token", "pages"])
def tiered(
    request: pytest.FixtureRequest, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiered]:
    page_size, policy = request.param
    folder = tmp_path_factory.mktemp("faults")
    environment = injecting(folder, HERE / "hierarchical_cache_on_cpu.py")
    options = {**HIERARCHICAL, "page_size": page_size, "hicache_write_policy": policy}
    with engine.session(agent=True, environment=environment, **options) as session:
        yield Tiered(session, folder)


def test_what_comes_back_is_checked_without_a_false_report(tiered: Tiered) -> None:
    session = tiered.session
    first = session.generate(PROMPTS)
    session.generate(MANY)
    before = tiered.brought_back()

    assert session.generate(PROMPTS) == first

    session.wait_for(lambda receiver: tiered.brought_back() >= before + sum(map(len, PROMPTS)) // 2)
    # Nodes of the tree that were copied as one come back in parts.
    turn = [[*prompt[: len(prompt) // 2], 7, 8, 9] for prompt in PROMPTS]
    session.generate(MANY)
    session.generate(turn)
    session.generate([*PROMPTS, *turn], salts=["a"] * 16)
    assert session.do({"do": "flush"})
    assert session.generate(PROMPTS) == first
    assert [violation.attributes for violation in session.violations] == []
    assert session.receiver.latest("kvcanary.coverage", kvcanary_subject="pool kv") == 1
    assert "not covering" not in session.process.tail()


def test_what_has_changed_in_host_memory_is_reported_when_it_comes_back(tiered: Tiered) -> None:
    session = tiered.session
    assert session.do({"do": "flush"})
    session.generate(PROMPTS)
    session.generate(MANY)
    (tiered.folder / "request").write_text(json.dumps({"kind": "host_bits", "layer": -1}))
    session.generate([[7] * 5, [8] * 5])
    done = json.loads((tiered.folder / "report").read_text())
    assert session.violations == []

    session.generate(PROMPTS)

    def reported(receiver: OtlpReceiver) -> bool:
        return bool(receiver.events("kvcanary.violation"))

    session.wait_for(reported)
    found = [violation.attributes for violation in session.violations]
    assert {(each["kvcanary.kind"], each["kvcanary.layer"], each["kvcanary.part"]) for each in found} == {
        ("transfer", done["layer"], "v")
    }
    assert found[0]["kvcanary.cause"] == "transfer_incomplete"
