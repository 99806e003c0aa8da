"""``run``: the program is the process, with nothing changed but two environment variables."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcanary_agent.activation.launcher import instrumented, interpreter_options
from tests.activation.processes import ROOT, TEMPLATE, Processes

SHOW = """\
import json, os, sys
print(json.dumps([sys.argv, os.environ.get("PYTHONPATH"), "TargetFinder" in str(sys.meta_path)]))
"""


def shown(result: subprocess.CompletedProcess[str]) -> tuple[list[str], str, bool]:
    assert result.stderr == ""
    assert result.returncode == 0
    argv, python_path, hooked = json.loads(result.stdout)
    return argv, python_path, hooked


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_a_script_a_module_and_code_run_with_their_own_arguments(processes: Processes, separator: list[str]) -> None:
    script = processes.write("show.py", SHOW)
    assert shown(processes.launch("run", *separator, "show.py", "--help", "-x"))[0] == ["show.py", "--help", "-x"]
    assert shown(processes.launch("run", *separator, "-m", "show", "run"))[0] == [str(script), "run"]
    assert shown(processes.launch("run", *separator, "-c", SHOW, "a b"))[0] == ["-c", "a b"]


def test_a_folder_with_a_main_file_and_a_python_file_without_suffix_run(processes: Processes) -> None:
    processes.write("app/__main__.py", SHOW)
    processes.write("tool", f"#!/usr/bin/env python3\n{SHOW}\n")
    assert shown(processes.launch("run", "app", "1"))[0] == ["app", "1"]
    assert shown(processes.launch("run", "./tool", "2"))[0] == ["./tool", "2"]


def test_a_program_on_path_and_an_executable_run(processes: Processes) -> None:
    program = processes.write("bin/show-it", f'#!/bin/sh\nexec {sys.executable} -c "$CODE" "$0" "$@"\n')
    program.chmod(0o755)
    environ = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "CODE": SHOW}
    argv, _, hooked = shown(processes.launch("run", "show-it", "1", **environ))
    assert (pathlib.Path(argv[1]).name, argv[2], hooked) == ("show-it", "1", True)
    assert shown(processes.launch("run", "bin/show-it", **environ))[2] is True


def test_pythonpath_gets_one_folder_in_front_and_keeps_the_rest(processes: Processes) -> None:
    theirs = f"{ROOT}{os.pathsep}{os.pathsep}relative{os.pathsep}{TEMPLATE}"
    _, python_path, hooked = shown(processes.launch("run", "-c", SHOW, PYTHONPATH=theirs))
    assert python_path == f"{TEMPLATE}{os.pathsep}{ROOT}{os.pathsep}{os.pathsep}relative"
    assert hooked


@pytest.mark.parametrize("environ", [{}, {"PYTHONPATH": ""}])
def test_without_a_pythonpath_there_is_no_empty_entry_which_would_be_the_working_directory(
    environ: dict[str, str],
) -> None:
    assert instrumented(environ) == {"PYTHONPATH": str(TEMPLATE), "KVCANARY_ENABLED": "1"}


def test_relative_adapter_files_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    changed = instrumented({}, ("vllm", "./mine.py", "a.b:c"))
    assert changed["KVCANARY_ADAPTERS"] == f"vllm,{tmp_path}/mine.py,a.b:c"


def test_an_adapter_file_that_is_not_there_is_one_line_and_exit_2(processes: Processes) -> None:
    run = processes.launch("run", "-c", "print('started')", KVCANARY_ADAPTERS="./nosuch.py")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "kvcanary-agent: KVCANARY_ADAPTERS names './nosuch.py', but there is no such file\n"


def test_the_interpreters_options_are_passed_on(processes: Processes) -> None:
    show = "import sys; print(sys.orig_argv[1:-2], sys.flags.optimize, sys.stdout.write_through)"
    arguments = ["-u", "-O", "-W", "ignore", "-X", "utf8", "-m", "kvcanary_agent", "run", "-c", show]
    result = processes.python(*arguments, PYTHONPATH=str(ROOT))
    assert result.stdout == "['-u', '-O', '-Wignore', '-Xutf8'] 1 True\n"


@pytest.mark.parametrize(
    ("orig_argv", "options"),
    [
        (["python", "-m", "kvcanary_agent", "-u"], []),
        (["python", "/usr/bin/kvcanary-agent", "-u"], []),
        (["python", "-uBm", "kvcanary_agent"], ["-u", "-B"]),
        (["python", "-OW", "error", "-Xdev", "script"], ["-O", "-Werror", "-Xdev"]),
        (["python", "--check-hash-based-pycs", "never", "-s", "-"], ["--check-hash-based-pycs", "never", "-s"]),
        (["python"], []),
    ],
)
def test_options_are_what_stands_before_the_module_or_script(orig_argv: list[str], options: list[str]) -> None:
    assert interpreter_options(orig_argv) == options


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_a_python_that_would_ignore_the_agent_is_refused(processes: Processes, option: str) -> None:
    call = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kvcanary_agent.__main__ import main; sys.exit(main())"
    result = processes.python(option, "-c", call, "run", "-c", "print('ran')")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert f"Python was started with {option}, which keeps the agent out" in result.stderr


def test_the_exit_code_is_the_programs(processes: Processes) -> None:
    assert processes.launch("run", "-c", "raise SystemExit(41)").returncode == 41


def test_the_process_id_is_the_programs_and_a_signal_reaches_it(processes: Processes) -> None:
    serve = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcanary_agent", "run", "-c", serve],
        env=processes.environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM


def test_an_adapter_file_that_is_no_python_is_one_line_and_exit_2(processes: Processes, tmp_path: Path) -> None:
    adapter = tmp_path / "mine.py"
    adapter.write_text("x = 1\ntargets = ('engine',\n")
    run = processes.launch("run", "-c", "print('started')", KVCANARY_ADAPTERS=str(adapter))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(
        f"kvcanary-agent: KVCANARY_ADAPTERS names {str(adapter)!r}, which is no Python, line 2: "
    )


@pytest.mark.parametrize("name", ["KVCANARY_INCIDENT_DIR", "KVCANARY_STATUS_DIR"])
def test_a_folder_is_there_when_the_program_starts_or_it_does_not_start(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    wanted = tmp_path / "new" / "folder"
    assert processes.launch("run", "-c", "print('started')", **{name: str(wanted)}).stdout == "started\n"
    assert wanted.is_dir()
    file = tmp_path / "file"
    file.touch()
    run = processes.launch("run", "-c", "print('started')", **{name: str(file)})
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"kvcanary-agent: {name}={str(file)!r} cannot be a folder: File exists\n"


@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGXFSZ])
def test_a_program_dies_of_a_closed_pipe_and_a_full_file_as_without_the_launcher(
    processes: Processes, number: signal.Signals
) -> None:
    result = processes.launch("run", "sh", "-c", f"kill -{int(number)} $$; echo survived")
    assert (result.returncode, result.stdout) == (-number, "")


def test_run_without_a_command_is_the_usage(processes: Processes) -> None:
    result = processes.launch("run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: kvcanary-agent run")
    help_text = processes.launch("run", "--help")
    assert (help_text.returncode, help_text.stderr) == (0, "")
    assert help_text.stdout == result.stderr


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["no-such-program"], 127, "no-such-program: command not found"),
        (["./no-such-program"], 127, "./no-such-program: no such file"),
        (["missing.py"], 127, "missing.py: no such file"),
        (["notes"], 127, "notes: command not found (for the file in this folder: ./notes)"),
        (["./notes"], 126, "./notes: is not executable"),
        (["./folder"], 126, "./folder: is a folder without a __main__.py"),
        (["./garbage"], 126, "./garbage: Exec format error"),
        (["--verbose", "x.py"], 2, "run: unknown option --verbose; see kvcanary-agent run --help"),
        (["-m"], 2, "run: -m needs an argument"),
        (["--"], 2, "run: there is no command after --"),
    ],
)
def test_what_cannot_run_is_one_line_and_the_status_a_shell_gives(
    processes: Processes, command: list[str], status: int, said: str
) -> None:
    processes.write("notes", "no program\n")
    processes.write("garbage", "\0\1\2").chmod(0o755)
    processes.write("folder/file", "")
    result = processes.launch("run", *command)
    assert (result.returncode, result.stdout, result.stderr) == (status, "", f"kvcanary-agent: {said}\n")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KVCANARY_MODE", "loud", "KVCANARY_MODE='loud': accepted are log, raise"),
        ("KVCANARY_MODES", "log", "KVCANARY_MODES is not a setting; did you mean KVCANARY_MODE?"),
    ],
)
def test_a_wrong_setting_is_one_line_before_anything_runs(
    processes: Processes, variable: str, value: str, said: str
) -> None:
    result = processes.launch("run", "-c", "print('ran')", **{variable: value})
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"kvcanary-agent: {said}\n")


def test_switched_off_in_the_environment_the_program_runs_as_it_would_alone(processes: Processes) -> None:
    _, python_path, hooked = shown(processes.launch("run", "-c", SHOW, KVCANARY_ENABLED="0"))
    assert (python_path, hooked) == (str(ROOT), False)


def test_the_launcher_imports_nothing_but_the_bootstrap(processes: Processes) -> None:
    result = processes.python("-X", "importtime", "-m", "kvcanary_agent", "run", "./none", PYTHONPATH=str(ROOT))
    assert result.returncode == 127
    loaded = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line]
    assert loaded[loaded.index("runpy") + 1 :] == ["kvcanary_agent"]
