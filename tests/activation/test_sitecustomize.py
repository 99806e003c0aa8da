"""The environment-variable door: what Python does at its start stays as it was, and the agent is in."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.activation.processes import ROOT, TEMPLATE, Processes
from tests.activation.pythons import interpreter

IS_IN = "import sys; print(any(type(finder).__name__ == 'TargetFinder' for finder in sys.meta_path))"


def outcome(result: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_a_true_value_lets_the_agent_in(processes: Processes, value: str) -> None:
    assert outcome(processes.door("-c", IS_IN, KVCANARY_ENABLED=value)) == (0, "True\n", "")


@pytest.mark.parametrize("value", ["", "0", "False", "no", "off"])
def test_otherwise_nothing_is_hooked_and_nothing_of_the_agent_is_loaded(processes: Processes, value: str) -> None:
    look = f"{IS_IN}; print([name for name in sys.modules if 'kvcanary' in name])"
    assert outcome(processes.door("-c", look, KVCANARY_ENABLED=value)) == (0, "False\n[]\n", "")


def test_a_value_that_is_neither_is_one_line_and_the_program_runs(processes: Processes) -> None:
    status, printed, said = outcome(processes.door("-c", IS_IN, KVCANARY_ENABLED="maybe"))
    assert (status, printed) == (0, "False\n")
    assert said.startswith("kvcanary-agent: not active in this process: KVCANARY_ENABLED='maybe'")
    assert said.count("\n") == 1


def test_at_the_start_one_module_is_loaded_besides_sitecustomize(processes: Processes) -> None:
    look = "import sys; print(*sorted(sys.modules))"
    plain = set(processes.python("-c", look).stdout.split())
    assert set(processes.door("-c", look).stdout.split()) - plain == {
        "sitecustomize",
        "kvcanary_agent",
    }


def test_the_folder_leaves_sys_path_and_stays_in_the_environment(processes: Processes) -> None:
    look = "import os, sys; print(sys.path)"
    assert processes.door("-c", look).stdout == processes.python("-c", look).stdout
    assert processes.door("-c", "import os; print(os.environ['PYTHONPATH'])").stdout == f"{TEMPLATE}\n"


def test_the_modules_found_beside_the_template_are_ordinary_ones(processes: Processes) -> None:
    look = (
        "import kvcanary_agent.activation.patching as patching, sys\n"
        "for module in (sys.modules['kvcanary_agent'], sys.modules['kvcanary_agent.activation'], patching):\n"
        "    assert module.__spec__.loader is module.__loader__ and module.__cached__ == module.__spec__.cached\n"
        "    print(module.__file__, module.__package__, type(module.__loader__).__name__)\n"
        "assert sys.modules['kvcanary_agent'].activation.patching is patching"
    )
    folder = ROOT / "kvcanary_agent"
    assert outcome(processes.door("-W", "ignore", "-c", look)) == (
        0,
        (
            f"{folder}/__init__.py kvcanary_agent SourceFileLoader\n"
            f"{folder}/activation/__init__.py kvcanary_agent.activation SourceFileLoader\n"
            f"{folder}/activation/patching.py kvcanary_agent.activation SourceFileLoader\n"
        ),
        "",
    )


@pytest.mark.parametrize("enabled", ["1", "0"])
def test_the_users_own_sitecustomize_runs_as_the_module_of_that_name(processes: Processes, enabled: str) -> None:
    theirs = processes.write(
        "theirs/sitecustomize.py", "import sys; print('theirs', __name__, __spec__.name); mine = 1\n"
    )
    look = "import sitecustomize, sys; print(sitecustomize.__file__, sitecustomize.mine, sys.path[1])"
    path = f"{TEMPLATE}:{theirs.parent}"
    assert outcome(processes.door("-c", look, PYTHONPATH=path, KVCANARY_ENABLED=enabled)) == (
        0,
        f"theirs sitecustomize sitecustomize\n{theirs} 1 {theirs.parent}\n",
        "",
    )


@pytest.mark.parametrize(
    "body",
    [
        "import no_such_module",
        "raise ImportError('theirs')",
        "raise ImportError('theirs', name='sitecustomize')",
        "raise RuntimeError('theirs')",
        "import sys; sys.modules['sitecustomize'] = sys",
        "import sys; del sys.modules['sitecustomize']",
        "1 +",
    ],
)
def test_what_the_users_own_sitecustomize_does_wrong_looks_as_it_does_without_the_agent(
    processes: Processes, body: str
) -> None:
    theirs = processes.write("theirs/sitecustomize.py", f"{body}\n").parent
    look = "import sys; print(sys.modules.get('sitecustomize'))"
    with_agent = processes.door("-c", look, PYTHONPATH=f"{TEMPLATE}:{theirs}")
    assert outcome(with_agent) == outcome(processes.python("-c", look, PYTHONPATH=str(theirs)))


def test_a_sitecustomize_of_the_user_that_exits_ends_python_as_it_does_without_the_agent(processes: Processes) -> None:
    theirs = processes.write("theirs/sitecustomize.py", "raise SystemExit(5)\n").parent
    with_agent = processes.door("-c", "print('ran')", PYTHONPATH=f"{TEMPLATE}:{theirs}")
    without = processes.python("-c", "print('ran')", PYTHONPATH=str(theirs))
    assert (with_agent.returncode, with_agent.stdout) == (without.returncode, without.stdout)
    assert with_agent.stderr.splitlines()[-1] == without.stderr.splitlines()[-1] == "SystemExit: 5"


def test_an_error_in_the_users_own_sitecustomize_does_not_keep_the_agent_out(processes: Processes) -> None:
    theirs = processes.write("theirs/sitecustomize.py", "raise RuntimeError('theirs')\n").parent
    assert processes.door("-c", IS_IN, PYTHONPATH=f"{TEMPLATE}:{theirs}").stdout == "True\n"


def test_the_package_beside_the_template_wins_over_any_other_copy(processes: Processes) -> None:
    processes.write("kvcanary_agent/__init__.py", "raise RuntimeError('the wrong one')\n")
    look = "import kvcanary_agent; print(kvcanary_agent.__file__)"
    result = processes.door("-c", look, PYTHONPATH=f"{TEMPLATE}:{processes.folder}")
    assert outcome(result) == (0, f"{ROOT}/kvcanary_agent/__init__.py\n", "")


def test_of_two_copies_of_the_template_the_first_on_the_path_is_in_use_and_in_once(processes: Processes) -> None:
    copy = processes.folder / "copy"
    for name in ("kvcanary_agent", "sitecustomize_template"):
        shutil.copytree(ROOT / name, copy / name)
    look = (
        "import kvcanary_agent, sys; print(kvcanary_agent.__file__)\n"
        "print(sum(type(finder).__name__ == 'TargetFinder' for finder in sys.meta_path), sys.path)"
    )
    path_without = processes.python("-c", "import sys; print(sys.path)").stdout.strip()
    for first, second in [(ROOT, copy), (copy, ROOT)]:
        path = f"{first}/sitecustomize_template:{second}/sitecustomize_template:{first}/sitecustomize_template"
        result = processes.door("-c", look, PYTHONPATH=path)
        assert outcome(result) == (0, f"{first}/kvcanary_agent/__init__.py\n1 {path_without}\n", "")


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (None, "FileNotFoundError"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("raise SystemExit(9)", "SystemExit: 9"),
        ("def install(): raise OSError('full')", "OSError: full"),
    ],
)
def test_an_agent_that_cannot_start_is_one_line_and_the_program_runs(
    processes: Processes, package: str | None, reason: str
) -> None:
    shutil.copytree(TEMPLATE, processes.folder / "sitecustomize_template")
    if package is not None:
        processes.write("kvcanary_agent/__init__.py", f"{package}\n")
    look = "import sys; print('ran', getattr(sys.modules.get('kvcanary_agent'), 'install', None) is not None)"
    status, printed, said = outcome(processes.door("-c", look, PYTHONPATH=f"{processes.folder}/sitecustomize_template"))
    # What failed half-way is not left in sys.modules.
    assert (status, printed) == (0, f"ran {'install' in str(package)}\n")
    assert said.startswith(f"kvcanary-agent: not active in this process: {reason}")
    assert said.count("\n") == 1


def test_a_closed_standard_error_does_not_matter(processes: Processes) -> None:
    command = f"{sys.executable} -c 'print(1)' 2>&-"
    result = processes.run(["sh", "-c", command], PYTHONPATH=str(TEMPLATE), KVCANARY_ENABLED="maybe")
    assert outcome(result) == (0, "1\n", "")


def test_the_template_folder_holds_one_file() -> None:
    assert [path.name for path in TEMPLATE.iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]


def test_a_read_only_installation_works(processes: Processes) -> None:
    copy = processes.folder / "copy"
    for name in ("kvcanary_agent", "sitecustomize_template"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    folders = [path for path in copy.rglob("*") if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert outcome(processes.door("-c", IS_IN, PYTHONPATH=f"{copy}/sitecustomize_template")) == (0, "True\n", "")
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.parametrize(
    "program",
    [
        "print('out'); import sys; print('err', file=sys.stderr); sys.exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import asyncio, json, logging, threading, unittest; print(threading.active_count())",
        "raise ValueError('of the program')",
        "import no_such_module",
        "import sys; print(sys.argv, sys.flags, sys.path, len(sys.path_hooks), sys.warnoptions)",
        "import os; child = os.fork(); print(child == 0, flush=True) if child else os._exit(0); os.waitpid(child, 0)",
        "1 +",
    ],
)
def test_without_an_engine_a_process_behaves_and_ends_as_without_the_agent(processes: Processes, program: str) -> None:
    assert outcome(processes.door("-c", program)) == outcome(processes.python("-c", program))


@pytest.mark.parametrize("options", [["-I"], ["-E"], ["-S"]])
def test_a_python_that_ignores_pythonpath_is_left_alone(processes: Processes, options: list[str]) -> None:
    assert outcome(processes.door(*options, "-c", IS_IN)) == (0, "False\n", "")


def test_the_working_directory_is_not_searched_for_the_agents_sake(processes: Processes) -> None:
    trap = "raise RuntimeError('imported from the working directory')\n"
    for name in ("kvcanary_agent", "sitecustomize", "_frozen_importlib", "settings", "adapters"):
        processes.write(f"{name}.py", trap)
    script = processes.write("elsewhere/script.py", f"{IS_IN}\n")
    assert outcome(processes.door(str(pathlib.Path(script)))) == (0, "True\n", "")


def test_the_users_own_usercustomize_runs_too(processes: Processes) -> None:
    # A virtual environment does without it.
    python = interpreter(".".join(map(str, sys.version_info[:2])))
    assert python is not None
    ask = "import site; print(site.getusersitepackages())"
    environ = {"PYTHONUSERBASE": str(processes.folder / "base")}
    folder = pathlib.Path(processes.run([python, "-c", ask], **environ).stdout.strip())
    processes.write(str(folder / "usercustomize.py"), "print('theirs')\n")
    result = processes.run([python, "-c", IS_IN], PYTHONPATH=str(TEMPLATE), KVCANARY_ENABLED="1", **environ)
    assert outcome(result) == (0, "theirs\nTrue\n", "")
