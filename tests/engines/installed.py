"""An environment of the engine's packages in which the agent is installed, as its entry points show."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.engines.processes import ROOT


def python_with_entry_points(folder: Path) -> Path:
    """The Python of a new virtual environment: this one's packages, this checkout, and its entry points."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'\[project\.entry-points\."?([\w.]+)"?\]\n((?:\w+ = "[^"]+"\n)+)', project)
    metadata = site_packages / "kvcanary_agent-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcanary-agent\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "\n".join(f"[{group}]\n" + points.replace('"', "") for group, points in found)
    )
    return folder / "bin" / "python"
