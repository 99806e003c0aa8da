"""A model whose sliding layers have a pool of their own, from which what has left the window is freed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.processes import checked
from tests.engines.sglang.harness import PROMPTS, READ_AT_LEAST, Engine, Session


@pytest.fixture(scope="module", params=[1, 16], ids=["token_by_token", "pages"])
def session(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Session]:
    options = {"page_size": request.param, "chunked_prefill_size": 64, "enable_mixed_chunk": request.param == 1}
    environment = {"KVCANARY_CONTENT": "full", "SGLANG_TEST_RETRACT": "1"}
    with engine.session(agent=True, model="olmo3_hybrid", environment=environment, **options) as session:
        yield session


def test_both_pools_are_checked_without_a_false_report(session: Session) -> None:
    answers = session.generate(PROMPTS)
    turn = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    session.generate(turn)
    assert session.do({"do": "flush"})
    session.generate(PROMPTS, max_tokens=120)

    # The window's pool is read, too, beside the reads of full attention.
    session.wait_for(checked("chain", int(1.2 * READ_AT_LEAST)))
    assert [violation.attributes for violation in session.violations] == []
    assert "not covering" not in session.process.tail()
    assert session.retractions > 0
