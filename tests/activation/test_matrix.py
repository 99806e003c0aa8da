"""The agent is in exactly the processes that the README says: each host, way to start a child, option, door, Python.

A selection in which every two values of two dimensions meet runs by default; ``--full-matrix`` runs every case.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import random
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from tests.activation.processes import ADAPTER, ENGINE, ROOT, TEMPLATE, Processes
from tests.activation.pythons import VERSIONS, interpreter

# What the program does is the same for every host: it runs one step of the engine, and has a child do the same.
PROGRAM = """\
import os, subprocess, sys, multiprocessing
sys.path.insert(0, {folder!r})

def step():
    import stand_in_engine
    print(str(os.getpid()) == os.environ["MAIN_PROCESS"], stand_in_engine.Runner().step(1), flush=True)

def child_of(starter):
    if starter == "subprocess":
        subprocess.run([sys.executable, {folder!r} + "/child.py"], check=True)
    elif starter == "os.fork":
        child = os.fork()
        if child == 0:
            step()
            os._exit(0)
        os.waitpid(child, 0)
    elif starter == "concurrent.futures":
        import concurrent.futures
        with concurrent.futures.ProcessPoolExecutor(1) as pool:
            pool.submit(step).result()
    else:
        method = None if starter == "multiprocessing.Process" else starter
        process = multiprocessing.get_context(method).Process(target=step)
        process.start()
        process.join()

def main():
    os.environ["MAIN_PROCESS"] = str(os.getpid())
    step()
    child_of(sys.argv[-1])
"""
CHILD = "import program; program.step()\n"
MAIN = "import sys; sys.path.insert(0, {folder!r})\nimport program\nif __name__ == '__main__': program.main()\n"

HOSTS = ("script", "-m", "-c", "console script", "zipapp", "editable")
STARTERS = ("fork", "spawn", "forkserver", "subprocess", "os.fork", "multiprocessing.Process", "concurrent.futures")
OPTIONS = ("", "-P", "-s", "-I", "-E", "-S")
DOORS = ("run", "environment", "site")
DIMENSIONS = (HOSTS, STARTERS, OPTIONS, DOORS, VERSIONS)

Case = tuple[str, ...]


def exists(case: Sequence[str]) -> bool:
    """Whether Python itself, without any agent, can be started so."""
    host, _, option, _, version = case
    if option == "-P" and version == "3.10":
        return False  # not an option yet
    if option in ("-I", "-P") and host == "-m":
        return False  # does not look into the working directory
    return not (option == "-S" and host == "editable")  # nothing is installed there


def pairwise() -> list[Case]:
    """Cases such that every pair of values of two dimensions that can occur together does; always the same ones."""
    every = [case for case in itertools.product(*DIMENSIONS) if exists(case)]
    random.Random(0).shuffle(every)
    missing = {pair for case in every for pair in pairs(case)}
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(missing.intersection(pairs(case))))
        chosen.append(best)
        missing.difference_update(pairs(best))
    return sorted(chosen)


def pairs(case: Case) -> Iterator[tuple[tuple[int, str], ...]]:
    return itertools.combinations(enumerate(case), 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full-matrix", default=False)
        cases = [case for case in itertools.product(*DIMENSIONS) if exists(case)] if full else pairwise()
        metafunc.parametrize("case", cases, ids=["-".join(filter(None, case)) for case in cases])


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Processes]:
    """What `environment` has made."""
    return {}


def environment(
    made: dict[tuple[str, bool], Processes], version: str, site: bool, tmp_path_factory: pytest.TempPathFactory
) -> Processes:
    """A virtual environment of this version, with the engine, the program, and the agent if the door needs it there."""
    base = interpreter(version)
    if base is None:
        pytest.skip(f"python{version} is not on PATH")
    if (version, site) not in made:
        folder = tmp_path_factory.mktemp(f"python{version}")
        processes = Processes(folder)
        processes.write("stand_in_engine.py", ENGINE)
        processes.write("adapter.py", ADAPTER)
        processes.write("program.py", PROGRAM.format(folder=str(folder)))
        processes.write("child.py", CHILD)
        processes.write("serve.py", MAIN.format(folder=str(folder)))
        processes.write("app/__main__.py", MAIN.format(folder=str(folder)))
        subprocess.run([base, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        python = folder / "venv/bin/python"
        # An editable installation is a file that names a folder.
        processes.write(f"venv/lib/python{version}/site-packages/theirs.pth", f"{folder}/editable\n")
        processes.write("editable/their_package/server.py", MAIN.format(folder=str(folder)))
        console = processes.write("venv/bin/serve", f"#!{python}\n{MAIN.format(folder=str(folder))}")
        console.chmod(0o755)
        subprocess.run([base, "-m", "zipapp", folder / "app", "-o", folder / "app.pyz"], check=True)
        if site:
            processes.write(f"venv/lib/python{version}/site-packages/_agent.pth", f"{ROOT}\n")
            enabled = processes.run([str(python), "-m", "kvcanary_agent", "enable", "--site"])
            assert (enabled.returncode, enabled.stderr) == (0, ""), enabled.stderr
        made[version, site] = processes
    return made[version, site]


def command(folder: pathlib.Path, host: str, option: str) -> list[str]:
    python = [str(folder / "venv/bin/python"), *([option] if option else [])]
    if host == "console script":
        return [*(python if option else []), str(folder / "venv/bin/serve")]
    return (
        python
        + {
            "script": ["serve.py"],
            "-m": ["-m", "serve"],
            "-c": ["-c", f"import sys; sys.path.insert(0, {str(folder)!r}); import program; program.main()"],
            "zipapp": ["app.pyz"],
            "editable": ["-m", "their_package.server"],
        }[host]
    )


def watched(case: Case) -> tuple[bool, bool]:
    """Whether the agent is in the program, and in its child: what the README says."""
    _, starter, option, door, _ = case
    ignored = ("-S",) if door == "site" else ("-I", "-E", "-S")
    parent = option not in ignored
    # Python hands its options down to the children of multiprocessing, and nobody to those of subprocess.
    return parent, parent or starter == "subprocess"


def test_the_agent_is_in_exactly_the_processes_that_the_door_reaches(
    case: Case,
    environments: dict[tuple[str, bool], Processes],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    host, starter, option, door, version = case
    processes = environment(environments, version, door == "site", tmp_path_factory)
    words = [*command(processes.folder, host, option), starter]
    environ = {"KVCANARY_ADAPTERS": str(processes.folder / "adapter.py")}
    if door == "run":
        launcher = [str(processes.folder / "venv/bin/python"), "-m", "kvcanary_agent", "run", "--"]
        result = processes.run([*launcher, *words], PYTHONPATH=str(ROOT), **environ)
    elif door == "environment":
        result = processes.run(words, PYTHONPATH=str(TEMPLATE), KVCANARY_ENABLED="1", **environ)
    else:
        result = processes.run(words, **environ)
    parent, child = watched(case)
    forked = starter in ("fork", "os.fork") or (
        starter in ("multiprocessing.Process", "concurrent.futures")  # the default is fork up to Python 3.13
    )
    expected = [*(["patched", "around"] if parent else []), "True 2"]
    # A forked child has the patched class of its parent.
    expected += [*(["patched"] if child and not forked else []), *(["around"] if child else []), "False 2"]
    assert (result.returncode, result.stderr, result.stdout.splitlines()) == (0, "", expected)


def test_the_selection_meets_every_pair_and_stays_small() -> None:
    selection = pairwise()
    every = {pair for case in itertools.product(*DIMENSIONS) if exists(case) for pair in pairs(case)}
    assert {pair for case in selection for pair in pairs(case)} == every
    assert len(selection) < 60, json.dumps(selection)
