"""The folder of the tiny models that a suite of a real engine serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def made(*names: str) -> Path:
    """A folder with these models of `make_models`, written by the engine's own libraries if it is not there yet."""
    script = Path(__file__).with_name("make_models.py")
    finished = subprocess.run([sys.executable, script, *names], check=True, stdout=subprocess.PIPE, text=True)
    return Path(finished.stdout.strip())
