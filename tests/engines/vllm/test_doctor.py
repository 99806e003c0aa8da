"""The doctor finds what the adapter patches in the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_every_class_that_the_adapter_patches_is_found() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvcanary_agent", "doctor", "--json"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    (engine,) = [engine for engine in json.loads(result.stdout)["engines"] if engine["name"] == "vllm"]
    assert (result.returncode, engine["problems"]) == (0, [])
    assert all(engine["targets"].values())
    assert set(engine["patches"].values()) == {"patched"}
