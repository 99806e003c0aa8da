"""The V2 model runner: nothing is reported, everything is checked, every token is the same; faults are named."""

from __future__ import annotations

from tests.engines.vllm.harness import READ_AT_LEAST, Engine, checked, passed_slots

UNCHUNKED = {"max_num_batched_tokens": 2048}
CHUNKED = {"max_num_batched_tokens": 64}


def test_healthy_requests_are_checked_and_answered_as_without_the_agent(engine: Engine) -> None:
    without_agent = engine.generate(v2=True, **UNCHUNKED)

    run = engine.watch(
        v2=True,
        **UNCHUNKED,
        environment={"KVCANARY_CONTENT": "full"},
        until=checked("content", 2 * READ_AT_LEAST),
    )

    assert run.result == without_agent
    assert run.violations == []
    assert "Using V2 Model Runner" in run.output
    for check in ("address", "unwritten", "position", "token", "chain"):
        assert passed_slots(run.receiver, check) >= 2 * READ_AT_LEAST, check
