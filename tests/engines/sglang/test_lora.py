"""Requests of several LoRA adapters share a pool, but no prefixes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.processes import checked
from tests.engines.sglang.harness import HERE, MAX_TOKENS, PROMPTS, READ_AT_LEAST, Engine, injecting
from tests.otlp_receiver import OtlpReceiver

ADAPTERS = ["a", None, "b", None, "b", "a", None, "a"]


def test_adapters_are_told_apart_and_a_prefix_of_another_one_is_a_namespace(engine: Engine, tmp_path: Path) -> None:
    with engine.session(
        agent=True,
        environment=injecting(tmp_path, HERE / "lora_on_cpu.py"),
        enable_lora=True,
        lora_backend="torch_native",
        lora_paths=[f"{name}={engine.models / f'lora_{name}'}" for name in "ab"],
        max_loras_per_batch=3,
    ) as session:
        command = {"do": "generate", "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "adapters": ADAPTERS}
        answers = session.do(command)
        # The same prompts, under other adapters and then under the first ones again.
        others = session.do({**command, "adapters": ADAPTERS[1:] + ADAPTERS[:1]})
        assert others != answers
        assert session.do(command) == answers
        session.wait_for(checked("chain", READ_AT_LEAST))
        assert [violation.attributes for violation in session.violations] == []

        prompt = [*range(300, 400), 1]
        both = {**command, "prompts": [prompt, prompt], "adapters": ["a", "b"]}
        session.do(both)
        (tmp_path / "request").write_text(json.dumps({"kind": "wrong_namespace_hit"}))
        session.do(both)

        def reported(receiver: OtlpReceiver) -> bool:
            return bool(receiver.events("kvcanary.violation"))

        session.wait_for(reported)
        done = json.loads((tmp_path / "report").read_text())
        found = [violation.attributes for violation in session.violations]
        assert {each["kvcanary.kind"] for each in found} == {"namespace"}
        assert {each["kvcanary.slot"] for each in found} == set(done["slots"])
