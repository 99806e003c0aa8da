"""The line that every operator sees: always there, bounded, and exported once."""

from __future__ import annotations

import logging
import re

import pytest

from kvcanary_agent.canary.violation import Kind
from kvcanary_agent.telemetry.diagnosis import Burst, diagnose
from kvcanary_agent.telemetry.log_lines import LINES, LINES_PER_PLACE, WINDOW_S, ViolationLines
from tests.telemetry.conftest import StartChild
from tests.telemetry.samples import changed_bytes, finish_pass, open_pool, violation


class Clock:
    """Seconds that pass when told to."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(clock: Clock) -> ViolationLines:
    return ViolationLines(clock)


def write(lines: ViolationLines, times: int = 1, **changes: int) -> None:
    found = violation(Kind.TOKEN, **changes)
    for _ in range(times):
        lines.write("demo", found, diagnose(found, Burst([found])), already_exported=False)


def test_a_line_names_kind_engine_pool_block_requests_and_cause(
    lines: ViolationLines, caplog: pytest.LogCaptureFixture
) -> None:
    write(lines)
    ((name, level, line),) = caplog.record_tuples
    assert (name, level) == ("kvcanary_agent", logging.ERROR)
    for fact in ("token", "demo", "pool kv", "block 4", "req-reader", "req-writer", "step 9", "[double_allocation]"):
        assert fact in line


def test_the_same_place_is_logged_a_few_times_only(lines: ViolationLines, caplog: pytest.LogCaptureFixture) -> None:
    write(lines, times=50)
    assert len(caplog.messages) == LINES_PER_PLACE
    assert "counted, not logged" in caplog.messages[-1]


def test_other_places_are_logged_as_well(lines: ViolationLines, caplog: pytest.LogCaptureFixture) -> None:
    write(lines, times=50)
    write(lines, block=5)
    assert len(caplog.messages) == LINES_PER_PLACE + 1


def test_all_places_together_are_bounded(lines: ViolationLines, caplog: pytest.LogCaptureFixture) -> None:
    for block in range(10 * LINES):
        write(lines, block=block)
    assert len(caplog.messages) == LINES


def test_the_next_window_says_how_many_were_left_out_and_logs_again(
    lines: ViolationLines, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    write(lines, times=50)
    clock.now += WINDOW_S
    write(lines)
    _, _, _, summary, line = caplog.messages
    assert re.search(rf"\b{50 - LINES_PER_PLACE} more violations", summary)
    assert "double allocation" in line


def test_a_window_that_left_nothing_out_says_nothing(
    lines: ViolationLines, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    write(lines)
    assert lines.seconds_to_summary() is None
    clock.now += WINDOW_S
    write(lines)
    assert len(caplog.messages) == 2


def test_the_summary_is_due_when_the_window_ends(lines: ViolationLines, clock: Clock) -> None:
    write(lines, times=50)
    clock.now += 20
    assert lines.seconds_to_summary() == pytest.approx(WINDOW_S - 20)


def test_what_was_left_out_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    telemetry, pool = open_pool()
    finish_pass(pool, *[changed_bytes(slot=slot) for slot in range(20)])
    assert telemetry.shutdown(timeout_s=10)
    assert f"{20 - LINES_PER_PLACE} more violations" in caplog.messages[-1]


def test_the_line_reaches_stderr_where_logging_is_not_set_up(start_child: StartChild) -> None:
    program = """
from tests.telemetry.samples import finish_pass, open_pool, violation
telemetry, pool = open_pool()
finish_pass(pool, violation())
"""
    out, errors = start_child(program).communicate(timeout=60)
    assert out == ""
    assert errors.startswith("kvcanary: token violation in demo pool kv: block 4")
    assert errors.count("\n") == 1


BRIDGED = """
import logging, sys, warnings
warnings.simplefilter("ignore")
from opentelemetry import _logs
from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler
from opentelemetry.sdk._logs.export import InMemoryLogExporter, SimpleLogRecordProcessor
from tests.telemetry.samples import finish_pass, open_pool, violation
exporter = InMemoryLogExporter()
provider = LoggerProvider()
provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
{set_provider}
logging.basicConfig(handlers=[LoggingHandler(logger_provider=provider), logging.StreamHandler(sys.stdout)])
telemetry, pool = open_pool()
finish_pass(pool, violation())
telemetry.flush(10)
print([record.log_record.event_name for record in exporter.get_finished_logs()])
"""


def test_a_host_that_exports_its_log_lines_gets_the_violation_once(start_child: StartChild) -> None:
    out, errors = start_child(BRIDGED.format(set_provider="_logs.set_logger_provider(provider)")).communicate(
        timeout=60
    )
    line, exported = out.splitlines()
    assert "double allocation" in line, errors
    assert exported == "['kvcanary.violation']"


def test_a_host_that_exports_its_log_lines_only_gets_the_line(start_child: StartChild) -> None:
    out, errors = start_child(BRIDGED.format(set_provider="")).communicate(timeout=60)
    line, exported = out.splitlines()
    assert "double allocation" in line, errors
    assert exported == "[None]"
