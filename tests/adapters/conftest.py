"""The stand-in engines, served in processes of their own."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.activation.processes import ROOT, Processes

STAND_INS = pathlib.Path(__file__).parent / "stand_ins"


class StandIns:
    """Serves a stand-in engine, with or without an adapter of ours."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.processes = Processes(folder)
        self.folder = folder

    def adapter(self, name: str, *changes: tuple[str, str]) -> pathlib.Path:
        """The adapter file of that name, or a copy with each (old, new) replaced."""
        if not changes:
            return STAND_INS / name
        text = (STAND_INS / name).read_text()
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        return self.processes.write(name, text)

    def serve(
        self, engine: str, *mode: str, adapter: pathlib.Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Serve through ``kvcanary_agent run`` if there is an adapter, else as it is."""
        command = [sys.executable, str(STAND_INS / "serve.py"), engine, *mode]
        if adapter is not None:
            command[1:1] = ["-m", "kvcanary_agent", "run", sys.executable]
            environ |= {"KVCANARY_ADAPTERS": str(adapter)}
        return self.processes.run(command, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **environ)

    def script(self, text: str, adapter: pathlib.Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a script that may import the stand-ins."""
        file = self.processes.write("script.py", f"import sys\nsys.path.insert(0, {str(STAND_INS)!r})\n{text}")
        return self.processes.launch("run", str(file), KVCANARY_ADAPTERS=str(adapter), OMP_NUM_THREADS="1", **environ)


def answers(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def stand_ins(tmp_path: pathlib.Path) -> StandIns:
    return StandIns(tmp_path)
