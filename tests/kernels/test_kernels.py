"""The Triton kernels without a GPU: interpreted, and compiled for three NVIDIA generations and one of AMD's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
INTERPRETED = Path(__file__).with_name("interpreted")


def run(*command: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environ["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command], cwd=ROOT, env=environ, capture_output=True, text=True
    )


def test_interpreted_they_do_what_the_reference_does() -> None:
    result = run("pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED), interpret=True)
    assert result.returncode == 0, result.stdout[-5000:]


@pytest.mark.parametrize(("backend", "arch"), [("cuda", "80"), ("cuda", "90"), ("cuda", "100"), ("hip", "gfx942")])
def test_they_compile_without_spilling_and_leave_room_for_four_programs_on_a_processor(backend: str, arch: str) -> None:
    result = run("tests.kernels.ahead_of_time", backend, arch, interpret=False)
    assert result.returncode == 0, result.stderr[-5000:]
    usage = json.loads(result.stdout.splitlines()[-1])
    assert len(usage) == 8
    for name, figures in usage.items():
        assert figures["spills"] == 0, name
        # Of the 65,536 registers of a processor, four programs of 128 threads may have 128 each.
        assert 0 < figures["registers"] <= 128, name
