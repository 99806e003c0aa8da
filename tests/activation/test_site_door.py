"""The door in site-packages: put there and taken away by a command, and by nothing else."""

import json
import pathlib
import subprocess
import sys

import pytest

from kvcanary_agent.activation import site_door
from tests.activation.processes import ROOT, TEMPLATE, Processes

IS_IN = "import sys; print(sum(type(finder).__name__ == 'TargetFinder' for finder in sys.meta_path))"


class Environment:
    """A virtual environment in which the agent is installed, as an editable installation is."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", processes.folder / "venv"], check=True)
        (self.site_packages,) = processes.folder.glob("venv/lib/python*/site-packages")
        self.installation = self.site_packages / "_agent.pth"
        self.installation.write_text(f"{ROOT}\n")
        self.file = self.site_packages / "kvcanary_agent.pth"

    def python(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.processes.run([str(self.processes.folder / "venv/bin/python"), *arguments], **environ)

    def agent(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "kvcanary_agent", *arguments)


@pytest.fixture
def environment(processes: Processes) -> Environment:
    return Environment(processes)


@pytest.fixture
def enabled(environment: Environment) -> Environment:
    done = environment.agent("enable", "--site")
    assert (done.returncode, done.stderr) == (0, "")
    assert str(environment.file) in done.stdout
    return environment


def test_every_process_of_the_environment_has_the_agent_until_it_is_disabled(enabled: Environment) -> None:
    for option in ("-I", "-E", "-P" if sys.version_info >= (3, 11) else "-s"):
        assert enabled.python(option, "-c", IS_IN).stdout == "1\n", option
    python = enabled.processes.folder / "venv/bin/python"
    empty = enabled.processes.run(["env", "-i", str(python), "-c", IS_IN])
    assert (empty.stdout, empty.stderr) == ("1\n", "")
    done = enabled.agent("disable")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in enabled.site_packages.iterdir()) == ["_agent.pth"]
    assert enabled.python("-c", IS_IN).stdout == "0\n"


def test_doctor_says_whether_the_door_is_open(enabled: Environment) -> None:
    def door() -> str:
        return str(json.loads(enabled.agent("doctor", "--json").stdout)["doors"]["enable --site"])

    assert door() == ""
    enabled.agent("disable")
    assert door().startswith("closed")
    enabled.file.write_text("import os\n")
    assert "is not from kvcanary-agent enable" in door()


def test_without_site_there_is_no_door_that_could_work(enabled: Environment) -> None:
    assert enabled.python("-S", "-c", IS_IN).stdout == "0\n"


def test_enabling_twice_and_disabling_twice_is_no_error(enabled: Environment) -> None:
    assert enabled.agent("enable", "--site").returncode == 0
    assert enabled.agent("disable").returncode == 0
    again = enabled.agent("disable")
    assert (again.returncode, again.stdout) == (0, f"{enabled.file} does not exist: nothing to do\n")


@pytest.mark.parametrize("off", ["0", "off"])
def test_the_environment_variable_keeps_the_agent_out(enabled: Environment, off: str) -> None:
    result = enabled.python("-c", "import sys; print('kvcanary_agent' in sys.modules)", KVCANARY_ENABLED=off)
    assert result.stdout == "True\n"  # the door itself
    assert enabled.python("-c", IS_IN, KVCANARY_ENABLED=off).stdout == "0\n"


def test_a_value_that_is_neither_on_nor_off_is_one_line_and_no_agent(enabled: Environment) -> None:
    result = enabled.python("-c", IS_IN, KVCANARY_ENABLED="maybe")
    assert (result.returncode, result.stdout) == (0, "0\n")
    assert result.stderr.startswith("kvcanary-agent: not active in this process: KVCANARY_ENABLED='maybe'")
    assert result.stderr.count("\n") == 1


def test_with_the_other_doors_open_too_the_agent_is_in_once(enabled: Environment) -> None:
    theirs = enabled.processes.write("theirs/sitecustomize.py", "print('theirs')\n").parent
    result = enabled.python("-c", IS_IN, PYTHONPATH=f"{TEMPLATE}:{theirs}", KVCANARY_ENABLED="1")
    assert (result.stdout, result.stderr) == ("theirs\n1\n", "")
    launched = enabled.agent("run", "-c", IS_IN)
    assert (launched.stdout, launched.stderr) == ("1\n", "")


def test_run_with_the_agent_switched_off_keeps_it_out(enabled: Environment) -> None:
    launched = enabled.python("-m", "kvcanary_agent", "run", "-c", IS_IN, KVCANARY_ENABLED="0")
    assert (launched.stdout, launched.stderr) == ("0\n", "")


def test_after_the_agent_is_uninstalled_without_disabling_python_starts_as_ever(
    enabled: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled.installation.unlink()
    enabled.file.write_text(enabled.file.read_text().replace(str(ROOT), "/no/such/folder"))
    result = enabled.python("-c", IS_IN)
    assert (result.returncode, result.stdout, result.stderr) == (0, "0\n", "")


@pytest.mark.parametrize("command", [["enable", "--site"], ["disable"]])
@pytest.mark.parametrize("theirs", ["print('theirs')\n", "", None])
def test_a_file_of_that_name_that_is_not_ours_is_left_alone(
    environment: Environment, command: list[str], theirs: str | None
) -> None:
    if theirs is None:
        environment.file.symlink_to("/no/such/target")
    else:
        environment.file.write_text(theirs)
    done = environment.agent(*command)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvcanary-agent: {environment.file} is not from kvcanary-agent enable")
    assert done.stderr.count("\n") == 1
    assert environment.file.is_symlink() if theirs is None else environment.file.read_text() == theirs


def test_an_agent_that_is_not_installed_there_is_refused_and_nothing_is_left(environment: Environment) -> None:
    environment.installation.unlink()
    done = environment.python("-m", "kvcanary_agent", "enable", "--site", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (1, "")
    assert "a Python that starts here does not load it; install kvcanary-agent in this environment first" in done.stderr
    assert list(environment.site_packages.iterdir()) == []


def test_a_read_only_site_packages_is_one_line_that_names_the_other_doors() -> None:
    # Not even the superuser makes files there.
    with pytest.raises(site_door.SiteDoorError, match=r"cannot write /sys/kvcanary_agent.pth: .*kvcanary-agent run"):
        site_door.open_door("/sys")


def test_from_python_3_15_on_it_is_a_start_file(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    package = str(pathlib.Path(site_door.__file__).parents[1])
    monkeypatch.setattr(site_door, "_agent_of_a_new_process", lambda: package)
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    site_door.open_door(str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.name == "kvcanary_agent.start"
    assert file.read_text().splitlines()[1:] == ["kvcanary_agent.activation.site_door:start"]


@pytest.mark.parametrize("command", [["enable"], ["enable", "--all"], ["disable", "now"]])
def test_other_arguments_are_the_usage(processes: Processes, command: list[str]) -> None:
    result = processes.launch(*command)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", site_door.USAGE)
    assert processes.launch(command[0], "--help").stdout == site_door.USAGE
