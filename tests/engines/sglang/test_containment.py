"""With KVCANARY_ON_VIOLATION=evict no later request is served from a page that was found corrupt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.sglang.harness import Engine, Session, injecting
from tests.otlp_receiver import OtlpReceiver

ASKED = [3 + 7 * at % 400 for at in range(150)]
# Two at once: faults strike while more than one request is decoded.
OTHERS = [[5 + 11 * at % 400 for at in range(70)], [9 + 13 * at % 400 for at in range(60)]]


def evictions(receiver: OtlpReceiver) -> bool:
    return receiver.latest("kvcanary.evictions") is not None


def violations(receiver: OtlpReceiver) -> bool:
    return bool(receiver.events("kvcanary.violation"))


def spoil(session: Session, folder: Path) -> tuple[list[int], list[int]]:
    """The answer to a question before and after a page of it, idle in the prefix cache, was overwritten."""
    (before,) = session.generate([ASKED])
    (folder / "request").write_text(json.dumps({"kind": "spoil_cached"}))
    session.generate(OTHERS)
    assert (folder / "report").exists()
    (after,) = session.generate([ASKED])
    return before, after


@pytest.mark.parametrize("page_size", [1, 16], ids=["token_by_token", "pages"])
@pytest.mark.parametrize("core", ["rust", "python"])
def test_a_corrupt_idle_page_is_computed_anew_for_the_next_request(
    engine: Engine, tmp_path: Path, page_size: int, core: str
) -> None:
    environment = injecting(tmp_path, KVCANARY_ON_VIOLATION="evict", SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=core)
    # The engine's own check of its books is on: nothing may be lost.
    environment["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = "1"
    with engine.session(agent=True, environment=environment, page_size=page_size) as session:
        before, after = spoil(session, tmp_path)
        session.wait_for(evictions)
        again = session.generate([ASKED, *OTHERS])[0]

        assert after == before == again
        points = session.receiver.points_of("kvcanary.evictions")
        assert {str(point.attributes["kvcanary.outcome"]): point.value for point in points} == {"evicted": 1}
        assert "not covering eviction" not in session.process.tail()


def test_without_the_setting_the_next_request_is_served_from_it(engine: Engine, tmp_path: Path) -> None:
    with engine.session(agent=True, environment=injecting(tmp_path)) as session:
        before, after = spoil(session, tmp_path)
        session.wait_for(violations)

        assert after != before
        assert session.receiver.latest("kvcanary.evictions") is None


def test_a_page_in_use_is_evicted_when_its_request_has_ended(engine: Engine, tmp_path: Path) -> None:
    environment = injecting(tmp_path, KVCANARY_ON_VIOLATION="evict")
    with engine.session(agent=True, environment=environment) as session:
        (right,) = session.generate([ASKED])
        (tmp_path / "request").write_text(json.dumps({"kind": "flip_bit", "layer": 0, "part": "k"}))
        session.generate([ASKED, *OTHERS])
        session.wait_for(evictions)
        points = session.receiver.points_of("kvcanary.evictions")
        outcomes = {str(point.attributes["kvcanary.outcome"]) for point in points}
        before = len(session.violations)
        (after,) = session.generate([ASKED])

        assert outcomes >= {"held"}
        assert after == right
        assert len(session.violations) == before
