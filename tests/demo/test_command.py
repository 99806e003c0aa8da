"""The demonstration, run as a user runs it, and every way in which it can fail."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvcanary_agent

ROOT = Path(kvcanary_agent.__file__).parents[1]
TIMEOUT_S = 120


def _default_signals() -> None:
    # A test runner started in the background may have this ignored, which the demonstration would inherit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def demo(*arguments: str, **environ: str) -> Iterator["subprocess.Popen[str]"]:
    """A running demonstration, in a process group of its own; whatever is left of the group is killed at the end."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY_", "PYTHON", "OTEL_"))
    }
    with subprocess.Popen(
        [sys.executable, "-m", "kvcanary_agent", "demo", *arguments],
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_default_signals,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def outcome(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a whole run."""
    with demo(*arguments, **environ) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err


def joined(text: str) -> str:
    """`text` without its line breaks and indentation."""
    return " ".join(text.split())


def pid_of_the_server(process: "subprocess.Popen[str]") -> int:
    """The server's pid, as soon as the demonstration shows it."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"pid (\d+), ready", line)
        if found:
            return int(found[1])
    raise AssertionError("the server was never ready")


def pid_of_the_starting_server(process: "subprocess.Popen[str]") -> int:
    """The server's pid, as soon as the launcher has become the server."""
    while True:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if words[1:2] and words[1].endswith(b"server.py"):
                return int(child)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def run() -> tuple[int, str, str]:
    """A run in a shell whose settings would switch the agent off, or fail the requests, if they were heeded."""
    return outcome(KVCANARY_ENABLED="0", KVCANARY_MODE="raise")


def test_a_run_succeeds(run: tuple[int, str, str]) -> None:
    status, out, err = run
    assert (status, err) == (0, ""), out
    assert "As expected" in out


def test_requests_without_a_fault_are_checked_and_nothing_is_reported(run: tuple[int, str, str]) -> None:
    served = re.search(r"ok {2}40 requests, ([\d,]+) tokens, ([\d,]+) checks of slots, 0 violations", run[1])
    assert served
    assert int(served[2].replace(",", "")) > 10_000


def test_the_inverted_byte_is_reported_where_it_is(run: tuple[int, str, str]) -> None:
    act = joined(run[1].split("\n2. ")[1].split("\n3. ")[0])
    done = re.search(r"done: request victim, (\S+), value of position (\d+), slot (\d+) \(block (\d+)\)", act)
    assert done
    layer, position, slot, block = done.groups()
    assert f"request victim, position {position} where block {block}, slot {slot} {layer}, part v writer victim" in act
    assert "kind content, at step" in act
    assert "cause stray_write (confidence" in act


def test_the_block_that_is_handed_out_twice_is_reported_with_both_requests(run: tuple[int, str, str]) -> None:
    act = joined(run[1].split("\n3. ")[1].split("\nMetrics")[0])
    done = re.search(r"done: block (\d+) of request alice is now also bob's", act)
    assert done
    assert "kind ownership, at step" in act
    assert f"request bob where block {done[1]}, slot {int(done[1]) * 8} writer alice" in act


def test_the_metrics_are_those_that_the_readme_names(run: tuple[int, str, str]) -> None:
    table = run[1].split("\nMetrics")[1]
    for name in ("checks", "violations", "step.duration", "coverage", "records.memory"):
        assert f"\n    kvcanary.{name}" in table
    assert re.search(r"\n      content +[\d,]+ +[1-9][\d,]*\n", table)
    assert re.search(r"\n      ownership +[1-9]\d*\n", table)
    assert re.search(r"\n      verify +\d+ +\d+\.\d\d ms\n", table)


def test_the_command_shown_is_the_command_that_ran(run: tuple[int, str, str]) -> None:
    shown = joined(run[1].replace("\\\n", ""))
    assert "$ env -u KVCANARY_ENABLED -u KVCANARY_MODE KVCANARY_CONTENT=full " in shown
    assert re.search(r"python\S* -m kvcanary_agent run \S*kvcanary_agent/demo/server.py http://127.0.0.1", shown)


def test_the_incident_files_are_named_with_the_command_that_shows_them(run: tuple[int, str, str]) -> None:
    shown = joined(run[1].split("\nIncident files")[1].replace("\\\n", ""))
    commands = re.findall(r"\$ python -m kvcanary_agent report (\S+\.json)", shown)
    causes = [json.loads(Path(file).read_text())["diagnosis"][0]["cause"] for file in commands]
    assert causes == ["stray_write", "double_allocation"]


def test_a_pipe_gets_plain_text_of_80_columns(run: tuple[int, str, str]) -> None:
    assert "\x1b" not in run[1]
    assert "\r" not in run[1]
    assert max(len(line) for line in run[1].splitlines() if " /" not in line) <= 80


def test_a_flip_that_the_users_settings_hide_is_a_failure_that_says_so() -> None:
    status, out, _ = outcome(KVCANARY_CONTENT="off")

    assert status == 1
    end = joined(out.split("\nNot as expected\n")[1])
    assert re.fullmatch(
        r"FAILED a content violation of layers\.3, part v, slot \d+, request victim is expected, but the agent "
        r"reported nothing \(the server runs with KVCANARY_CONTENT=off\)",
        end,
    )


def test_an_agent_that_is_not_in_the_server_is_not_taken_for_one_that_finds_nothing() -> None:
    status, out, _ = outcome(KVCANARY_ADAPTERS="vllm")

    assert status == 1
    assert "FAILED the agent is expected to check every step, but it checked no slot" in joined(out)


EARLY_FAULT = """\
from kvcanary_agent.activation.patching import patch_method

targets = ["kvcanary_agent.demo.engine"]
struck = False

def around_step(call, engine, /):
    global struck
    from kvcanary_agent.demo.corruption import flip_byte
    struck = struck or flip_byte(engine, position=5) is not None
    return call()

def patch(module):
    patch_method(module.Engine, "step", around_step)
"""


def test_a_violation_before_any_fault_is_a_failure(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text(EARLY_FAULT)

    status, out, _ = outcome(KVCANARY_ADAPTERS=f"demo,{adapter}")

    assert status == 1
    assert re.search(r"FAILED 40 requests, .*; no violation is expected, but \d+ were counted", joined(out))


def test_a_server_that_does_not_start_is_a_failure_with_its_own_words() -> None:
    status, _, err = outcome(KVCANARY_CONTENT="some")

    assert status == 1
    assert "the server did not start: pid " in err
    assert "exit status 2\n  | kvcanary-agent: KVCANARY_CONTENT='some': accepted are scrub, full, off" in err


def test_a_server_that_dies_is_a_failure_that_names_its_end() -> None:
    with demo() as process:
        server = pid_of_the_server(process)
        os.kill(server, signal.SIGKILL)
        _, err = process.communicate(timeout=TIMEOUT_S)

        assert process.returncode == 1
        assert err.startswith(f"\nkvcanary-agent demo: the server died: pid {server}, killed by SIGKILL\n")
        assert not is_running(server)


def test_a_server_that_is_stuck_is_killed_at_the_end() -> None:
    with demo() as process:
        server = pid_of_the_server(process)
        os.kill(server, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)

        assert process.returncode == 130
        assert not is_running(server)


def test_ctrl_c_reaches_the_whole_group_and_leaves_nothing_behind() -> None:
    with demo() as process:
        server = pid_of_the_server(process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)

        assert process.returncode == 130
        assert err == "\nkvcanary-agent demo: interrupted; the server is stopped\n"
        assert not is_running(server)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_it_alone_stops_the_server_that_is_still_starting(number: signal.Signals, status: int) -> None:
    with demo() as process:
        server = pid_of_the_starting_server(process)
        process.send_signal(number)
        process.communicate(timeout=TIMEOUT_S)

        assert process.returncode == status
        assert not is_running(server)


def test_a_reader_that_goes_away_ends_it_without_a_traceback() -> None:
    with demo() as process:
        server = pid_of_the_server(process)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr.read() == ""
        assert not is_running(server)


def test_help_says_what_it_does_and_starts_nothing() -> None:
    status, out, err = outcome("--help")

    assert (status, err) == (0, "")
    assert "usage: kvcanary-agent demo" in out
    assert "KVCANARY_CONTENT" in out
