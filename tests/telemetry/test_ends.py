"""However a process ends, its end is the host's own, and what was seen before it has been exported."""

from __future__ import annotations

import signal

import pytest

from tests.otlp_receiver import HttpOtlpReceiver
from tests.telemetry.conftest import StartChild

PROGRAM = """
import os, signal, sys, time
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
from tests.telemetry.samples import finish_pass, open_pool, violation
telemetry, pool = open_pool()
finish_pass(pool, violation())
assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
print("seen", flush=True)
"""


def told(receiver: HttpOtlpReceiver) -> bool:
    return receiver.wait_for(lambda received: received.events("kvcanary.violation"), 60)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(41)", 41),
        ("raise ValueError('of the program')", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
    ],
)
def test_what_was_seen_just_before_an_orderly_end_is_exported(
    receiver: HttpOtlpReceiver, start_child: StartChild, end: str, status: int
) -> None:
    # SIGINT may be ignored where tests run in the background, and would be in the child.
    program = PROGRAM.replace("import os", "import signal; signal.signal(2, signal.default_int_handler); import os", 1)
    child = start_child(program + end)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == status, errors
    assert told(receiver)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os._exit(42)", 42),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.execv('/bin/sh', ['sh', '-c', 'exit 43'])", 43),
    ],
)
def test_an_end_without_exit_handlers_loses_nothing_that_was_seen_a_moment_ago(
    receiver: HttpOtlpReceiver, start_child: StartChild, end: str, status: int
) -> None:
    child = start_child(f"{PROGRAM}\ninput()\n{end}")
    assert told(receiver)  # while the host does nothing at all
    _, errors = child.communicate("\n", timeout=120)
    assert child.returncode == status, errors


def test_an_engine_killed_by_its_parent_has_exported_what_it_saw(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    engine = "\n".join(f"    {line}" for line in PROGRAM.splitlines())
    program = f"""
import multiprocessing, sys

def engine():
{engine}
    input_closed.wait()

input_closed = multiprocessing.get_context("fork").Event()
process = multiprocessing.get_context("fork").Process(target=engine)
process.start()
sys.stdin.readline()
process.kill()
process.join()
sys.exit(process.exitcode + 100)
"""
    parent = start_child(program)
    assert told(receiver)
    _, errors = parent.communicate("\n", timeout=120)
    assert parent.returncode == 100 - signal.SIGKILL, errors


def test_a_log_handler_that_blocks_does_not_hold_up_the_end(start_child: StartChild) -> None:
    program = """
import logging, threading
class Blocks(logging.Handler):
    def emit(self, record):
        entered.set()
        threading.Event().wait()
entered = threading.Event()
logging.getLogger().addHandler(Blocks())
from tests.telemetry.samples import finish_pass, open_pool, violation
telemetry, pool = open_pool()
finish_pass(pool, violation())
entered.wait()
print("at its end", flush=True)
"""
    child = start_child(program)
    out, errors = child.communicate(timeout=120)
    assert (child.returncode, out) == (0, "at its end\n"), errors
