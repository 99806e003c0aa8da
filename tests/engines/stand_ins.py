"""Versions of an engine that nobody has: a module of its own in its place, in a program that runs with the agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.engines.processes import ROOT


def run_with_stand_in(folder: Path, module: str, source: str) -> str:
    """What a program prints that imports a stand-in for an engine's module and prints what its ``serve()`` returns.

    Args:
        folder: An empty one.
        module: The engine's module, ``package.module``.
        source: Of the stand-in.
    """
    *packages, name = module.split(".")
    package = folder
    for each in packages:
        package = package / each
        package.mkdir()
        (package / "__init__.py").touch()
    (package / f"{name}.py").write_text(source)
    program = folder / "program.py"
    program.write_text(
        f"import logging; logging.basicConfig()\nimport {module} as engine_module\nprint(engine_module.serve())\n"
    )
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
    return finished.stdout


def the_only_warning(output: str) -> str:
    """The one line that the agent has written."""
    (warning,) = (line for line in output.splitlines() if "kvcanary" in line)
    return warning
