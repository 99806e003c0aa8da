"""What an agent costs that has nothing to do: ``python -m tests.agents.startup_cost`` prints a Markdown table.

Run it with the Python of ``environment.sh ../agents``. Times are processor time, which other processes disturb least:
medians of interleaved runs of a program that does nothing; modules and threads are those it has.
"""

from __future__ import annotations

import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from tests.activation.processes import ROOT, TEMPLATE
from tests.agents.test_neighbours import NEIGHBOURS, SETTINGS

RUNS = 25
PYTHON = sys.executable
COUNT = "import sys; print(len(sys.modules), len(sys._current_frames()))"

# 2,000 empty modules, and the time that an import statement takes for each of them.
IMPORTS = """\
import sys, time
sys.path.insert(0, {folder!r})
start = time.process_time()
for number in range(2000):
    __import__(f"empty_{{number}}")
print((time.process_time() - start) / 2000 * 1e6)
"""
# A patched method outside of a step: its around finds no pool that it knows, as for dummy runs and warm-up.
CALLS = """\
import sys, time
class Engine:
    def step(self): pass
engine = Engine()
def seconds():
    start = time.process_time()
    for _ in range(200_000): engine.step()
    return (time.process_time() - start) / 200_000
plain = min(seconds() for _ in range(5))
sys.path.insert(0, {root!r})
from kvcanary_agent.activation.patching import wrap_method
pools = {{}}
def around(call, self, /, *args, **kwargs):
    if pools.get(id(self)) is None:
        return call(*args, **kwargs)
wrap_method(Engine, "step", around)
print((min(seconds() for _ in range(5)) - plain) * 1e6)
"""


# The command that pip, since its version 25.2, puts beside the interpreter for an entry point: without importing re.
COMMAND = """\
#!{python}
import sys
from kvcanary_agent.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY_", "PYTHON", "OTEL_"))}
    return {**kept, **changes}


def commands(command: pathlib.Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """What is compared, with `command` as ``kvcanary-agent``: the words before ``-c CODE``, and the environment."""
    door = environment(PYTHONPATH=str(TEMPLATE))
    checkout = environment(PYTHONPATH=str(ROOT))
    listed = {
        "python": ([PYTHON], environment()),
        "sitecustomize_template, KVCANARY_ENABLED=0": ([PYTHON], door),
        "sitecustomize_template, KVCANARY_ENABLED=1": ([PYTHON], {**door, "KVCANARY_ENABLED": "1"}),
        "kvcanary-agent run": ([str(command), "run"], checkout),
        "python -m of a package that does nothing else": (
            [PYTHON, "-m", "empty_package"],
            environment(PYTHONPATH=str(command.parent)),
        ),
        "python -m kvcanary_agent run": ([PYTHON, "-m", "kvcanary_agent", "run"], checkout),
    }
    for name, (words, _) in NEIGHBOURS.items():
        program = str(pathlib.Path(PYTHON).with_name(words[0]))
        listed[name] = ([program, *words[1:], PYTHON], environment(**SETTINGS))
    return listed


def write_programs(folder: pathlib.Path) -> pathlib.Path:
    """Write the installed command, which is returned, and a package that only starts Python with its arguments."""
    package = folder / "empty_package"
    package.mkdir()
    (package / "__init__.py").touch()
    become = "import os, sys; os.execve(sys.executable, [sys.executable, *sys.argv[1:]], dict(os.environ))"
    (package / "__main__.py").write_text(f"{become}\n")
    command = folder / "kvcanary-agent"
    command.write_text(COMMAND.format(python=PYTHON))
    command.chmod(0o755)
    return command


def run(words: list[str], environ: dict[str, str], code: str) -> float:
    """Seconds of processor time that the program takes, from its start to its end."""
    pid = os.posix_spawn(words[0], [*words, "-c", code], environ)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, words
    return usage.ru_utime + usage.ru_stime


def counts(words: list[str], environ: dict[str, str]) -> tuple[int, int]:
    """Modules and threads of the program."""
    asked = subprocess.run([*words, "-c", COUNT], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    modules, threads = asked.stdout.split()
    return int(modules), int(threads)


def interleaved(cases: dict[str, tuple[list[str], dict[str, str]]], runs: int) -> dict[str, float]:
    """Median seconds of each. In another order in each round: who comes after a large program finds caches cold."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    shuffled = random.Random(0)
    for number in range(runs + 1):
        for name in shuffled.sample(list(cases), len(cases)):
            words, environ = cases[name]
            taken = run(words, environ, "pass")
            if number:  # the first one writes bytecode
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def microseconds(code: str, environ: dict[str, str], runs: int = 5) -> float:
    """The median of what the program prints."""
    printed = [
        float(subprocess.run([PYTHON, "-c", code], env=environ, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(runs)
    ]
    return statistics.median(printed)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        cases = commands(write_programs(folder))
        seconds = interleaved(cases, RUNS)
        plain = seconds["python"]
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"Python {version}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}; plain: {plain * 1e3:.1f} ms\n")
        print("| | times plain Python | modules | threads |\n|---|---|---|---|")
        for case_name, case in cases.items():
            modules, threads = counts(*case)
            print(f"| {case_name} | {seconds[case_name] / plain:.2f} | {modules} | {threads} |")
        for number in range(2000):
            (folder / f"empty_{number}.py").touch()
        code = IMPORTS.format(folder=str(folder))
        door = cases["sitecustomize_template, KVCANARY_ENABLED=1"][1]
        pairs = [(microseconds(code, cases["python"][1], 1), microseconds(code, door, 1)) for _ in range(7)]
        print(f"\nan import: {statistics.median(on - off for off, on in pairs[1:]):+.2f} us")
    print(f"a call of a patched method: {microseconds(CALLS.format(root=str(ROOT)), environment()):+.2f} us")


if __name__ == "__main__":
    main()
