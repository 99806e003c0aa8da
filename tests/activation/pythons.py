"""The Python versions that the agent supports, as far as this machine has them."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

VERSIONS = ("3.10", "3.11", "3.12", "3.13")


@functools.cache
def interpreter(version: str) -> str | None:
    """The executable of this version, without any virtual environment around it; None if none starts.

    Looked for as ``python3.X`` on PATH. A shim of pyenv starts the chosen versions only; the others lie beside it.
    """
    program = f"python{version}"
    for candidate in _candidates(program):
        asked = subprocess.run(
            [candidate, "-I", "-c", "import sys; print(sys._base_executable, '%d.%d' % sys.version_info[:2])"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        executable, _, found = asked.stdout.strip().rpartition(" ")
        if asked.returncode == 0 and found == version:
            return executable
    return None


def _candidates(program: str) -> Iterator[pathlib.Path]:
    if sys.version_info[:2] == tuple(int(part) for part in program.removeprefix("python").split(".")):
        yield pathlib.Path(sys.executable)
    for folder in os.get_exec_path():
        if os.access(found := pathlib.Path(folder, program), os.X_OK):
            yield found
            yield from sorted(found.parent.parent.glob(f"versions/{program.removeprefix('python')}.*/bin/{program}"))
