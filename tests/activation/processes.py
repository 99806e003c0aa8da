"""Real processes in a folder of their own, a stand-in engine for them, and an adapter that says what it does."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[2]
TEMPLATE = ROOT / "sitecustomize_template"

ENGINE = """\
class Base:
    def step(self, number):
        return number + 1

class Runner(Base):
    pass
"""

ADAPTER = """\
import sys

targets = ["stand_in_engine"]

def around(call, self, /, *args, **kwargs):
    print("around", flush=True)
    return call(*args, **kwargs)

def patch(module):
    from kvcanary_agent.activation.patching import patch_method
    print("patched" if patch_method(module.Runner, "step", around) else "patched already", flush=True)
"""


class Processes:
    """Starts Python in `folder`, with neither PYTHONPATH nor any setting of ours unless a test gives one."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY_", "PYTHON", "OTEL_"))
        }
        return {**inherited, **changes}

    def write(self, name: str, text: str) -> pathlib.Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def python(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, *arguments], **environ)

    def door(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Python through the environment-variable door: the template folder alone on PYTHONPATH, nothing installed."""
        return self.python(*arguments, **{"PYTHONPATH": str(TEMPLATE), "KVCANARY_ENABLED": "1", **environ})

    def launch(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "kvcanary_agent", *arguments, **{"PYTHONPATH": str(ROOT), **environ})

    def run(self, command: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(environ),
            capture_output=True,
            text=True,
            timeout=120,
            # A test runner started in the background may have had these ignored, which programs would inherit.
            preexec_fn=_default_signals,
        )


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
