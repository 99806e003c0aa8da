"""Reports wait in a bounded queue; the steps' thread never waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kvcanary_agent.canary.violation import CheckCounts
from kvcanary_agent.telemetry.reporter import MAX_PENDING
from tests.otlp_receiver import HttpOtlpReceiver
from tests.telemetry.samples import changed_bytes, finish_pass, open_pool, violation


class BlockedHandler(logging.Handler):
    """A log handler that writes to a pipe nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.go_on.wait(60)


@pytest.fixture
def blocked() -> Iterator[BlockedHandler]:
    handler = BlockedHandler()
    logger = logging.getLogger("kvcanary_agent")
    logger.addHandler(handler)
    yield handler
    handler.go_on.set()
    logger.removeHandler(handler)


def test_violations_beyond_the_queue_are_counted_as_violations_and_as_lost(
    receiver: HttpOtlpReceiver, blocked: BlockedHandler
) -> None:
    telemetry, pool = open_pool()
    pool.violation(violation())
    assert blocked.entered.wait(10)
    for slot in range(MAX_PENDING + 50):
        pool.violation(changed_bytes(slot=slot))
    blocked.go_on.set()
    assert telemetry.shutdown(timeout_s=60)
    assert receiver.latest("kvcanary.violations.lost") == 50
    assert receiver.latest("kvcanary.violations", kvcanary_kind="content") == MAX_PENDING + 50
    assert len(receiver.logs) <= MAX_PENDING + 1


def test_a_log_handler_that_blocks_does_not_block_the_steps(
    receiver: HttpOtlpReceiver, blocked: BlockedHandler
) -> None:
    telemetry, pool = open_pool()
    finish_pass(pool, violation())
    assert blocked.entered.wait(10)
    for step in range(100):  # while the handler blocks, which only this thread ends
        finish_pass(pool, violation(step=step), step=step)
    assert not telemetry.flush(0.1)
    blocked.go_on.set()
    assert telemetry.shutdown(timeout_s=10)


class BrokenHandler(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        raise OSError("no space left on device")


def test_a_log_handler_that_raises_keeps_nothing_from_being_exported(receiver: HttpOtlpReceiver) -> None:
    logger, handler = logging.getLogger("kvcanary_agent"), BrokenHandler()
    logger.addHandler(handler)
    try:
        telemetry, pool = open_pool()
        finish_pass(pool, violation(slot=1))
        finish_pass(pool, violation(slot=2))
        assert telemetry.shutdown(timeout_s=10)
    finally:
        logger.removeHandler(handler)
    assert [log.attributes["kvcanary.slot"] for log in receiver.logs] == [1, 2]
    assert [len(span.events) for span in receiver.spans] == [1, 1]


def test_a_report_that_fails_is_logged_once_and_the_next_one_goes_out(
    receiver: HttpOtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcanary_agent.telemetry import reporter
    from kvcanary_agent.telemetry.diagnosis import Burst, diagnose

    def fail_for_slot_17(found: object, burst: object) -> object:
        if found == violation():
            raise RuntimeError("no idea")
        return diagnose(violation(slot=18), Burst([]))

    monkeypatch.setattr(reporter, "diagnose", fail_for_slot_17)
    telemetry, pool = open_pool()
    for found in (violation(), violation(), violation(slot=18)):
        pool.violation(found)
    assert telemetry.shutdown(timeout_s=10)
    assert len([message for message in caplog.messages if "no idea" in message]) == 1
    assert [log.attributes["kvcanary.slot"] for log in receiver.logs] == [18]


def test_a_sink_whose_telemetry_cannot_start_says_so_once_and_still_logs_violations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcanary_agent.telemetry import exporting

    attempts = []

    def fail(*args: object) -> None:
        attempts.append(1)
        raise RuntimeError("no OpenTelemetry here")

    monkeypatch.setattr(exporting, "Exporting", fail)
    telemetry, pool = open_pool()
    for step in range(3):
        finish_pass(pool, violation(), counts=CheckCounts(slots={"token": (1, 1)}), step=step)
    assert telemetry.shutdown(timeout_s=1)
    assert len(attempts) == 1
    assert "no OpenTelemetry here" in caplog.messages[0]
    failures = [message for message in caplog.messages if " failed: " in message]
    violations = [message for message in caplog.messages if "token violation in demo pool kv" in message]
    assert (len(failures), len(violations)) == (3, 3)
    assert len(caplog.messages) == 6
