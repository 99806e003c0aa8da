"""Beside the canary that SGLang brings along, both do their work, and neither sees anything wrong with the other."""

from __future__ import annotations

from tests.engines.processes import checked
from tests.engines.sglang.harness import HERE, MAX_TOKENS, PROMPTS, READ_AT_LEAST, Engine


def test_both_canaries_check_the_same_engine(engine: Engine) -> None:
    environment = {"KVCANARY_ADAPTERS": f"sglang,{HERE / 'builtin_canary_on_cpu.py'}", "KVCANARY_CONTENT": "full"}

    with engine.session(
        agent=True,
        environment=environment,
        log_level="info",
        kv_canary="log",
        kv_canary_real_data="all",
        kv_canary_sweep_interval=8,
    ) as session:
        answers = session.generate(PROMPTS)
        again = session.generate(PROMPTS)
        session.wait_for(checked("chain", READ_AT_LEAST))
        output = session.process.tail()

        assert [len(answer) for answer in answers] == [MAX_TOKENS] * len(PROMPTS)
        assert again == answers
        assert session.violations == []
        assert session.receiver.latest("kvcanary.coverage", kvcanary_subject="pool kv") == 1
    started = "".join(session.process.output)
    assert "install_canary: " in started
    assert "kv-canary" not in output or "violation" not in output.replace("violations so far", "")
