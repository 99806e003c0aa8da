"""Other releases of transformers, from the package index, kept in the cache beside the engines' environments.

A release is unpacked, not installed: it runs in the environment of ``environment.sh transformers`` when its folder
comes first on ``PYTHONPATH``, if the packages that are there suit it. This file's hash names the folder of all of them.
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


def unpacked(version: str) -> Path:
    """A folder to put on ``PYTHONPATH``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcanary-agent"
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache / f"transformers-releases-{digest}" / version
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
                target = Path(unfinished, "release")
                with zipfile.ZipFile(_download(version, Path(unfinished))) as wheel:
                    wheel.extractall(target)
                target.rename(folder)
    return folder


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, f"transformers=={version}", "--dest", folder], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
