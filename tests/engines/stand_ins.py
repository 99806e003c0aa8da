"""Programs that import a stand-in for one module of an engine: a version of it that nobody has seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.engines.processes import ROOT


def serve_with(folder: Path, module: str, source: str) -> tuple[list[str], str]:
    """Run a program under the agent that imports a stand-in and prints what its ``serve()`` returns.

    Args:
        folder: An empty one, for the program.
        module: The module's full name, as in the engine.
        source: Of the module.

    Returns:
        What the agent said, line by line, and the last line.
    """
    package = folder.joinpath(*module.split(".")[:-1])
    package.mkdir(parents=True)
    for parent in (package, *package.parents):
        if parent == folder:
            break
        (parent / "__init__.py").touch()
    package.joinpath(f"{module.rpartition('.')[2]}.py").write_text(source)
    program = folder / "program.py"
    program.write_text(f"import logging; logging.basicConfig()\nimport {module} as stand_in\nprint(stand_in.serve())\n")
    finished = subprocess.run(
        [sys.executable, "-m", "kvcanary_agent", "run", program],
        cwd=ROOT,
        env={**os.environ, "OTEL_SDK_DISABLED": "true"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    lines = finished.stdout.splitlines()
    return [line for line in lines if "kvcanary" in line], lines[-1]
