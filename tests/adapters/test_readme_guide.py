"""The guide of the README: its table covers the demo engine as the demo engine's own adapter does."""

from __future__ import annotations

import re

from tests.activation.processes import ROOT
from tests.adapters.conftest import StandIns

SERVER = """
from random import Random
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.corruption import flip_byte
from kvcanary_agent.demo.engine import Engine

engine, random = Engine(EngineConfig(num_blocks=14, max_model_len=64, max_batched_tokens=16)), Random(3)
common = [random.randrange(512) for _ in range(24)]
for _ in range(20):
    own = [random.randrange(512) for _ in range(random.randrange(1, 20))]
    prompt = common[: random.randrange(25)] + own
    engine.add_request(prompt, max_tokens=random.randrange(1, 16), n=random.choice((1, 3)))
while not engine.is_idle:
    engine.step()
print("healthy,", "preempted" if engine.scheduler.num_preemptions else "not preempted", flush=True)
for act in (lambda: flip_byte(engine), lambda: engine.block_manager.free(engine.scheduler.running[0])):
    engine.add_request(common, max_tokens=20)
    for _ in range(3):
        engine.step()
    act()
    try:
        engine.step()
    except Exception as error:
        print(type(error).__name__, *sorted({str(violation.kind) for violation in error.violations}), flush=True)
    engine.abort_all()
"""


def readme_table() -> str:
    found = re.search(r"<!-- ci: table -->\n```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None, "README.md has no block marked <!-- ci: table -->"
    return found[1]


def test_the_table_of_the_guide_covers_the_demo_engine(stand_ins: StandIns) -> None:
    table = stand_ins.processes.write("engine.toml", readme_table())
    result = stand_ins.script(SERVER, table, KVCANARY_MODE="raise", KVCANARY_CONTENT="full")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[:2] == ["healthy, preempted", "KVCanaryError content"]
    assert "watching pool kv of demo-by-table: " in result.stderr
    assert "not covering" not in result.stderr
