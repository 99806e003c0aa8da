"""What arrives at a real OTLP receiver, and when."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.otlp_receiver import HttpOtlpReceiver, OtlpReceiver
from tests.telemetry.conftest import StartChild
from tests.telemetry.samples import open_pool

REPORT_AND_WAIT = """
from tests.telemetry.samples import finish_pass, open_pool, violation
telemetry, pool = open_pool()
finish_pass(pool, violation())
print("reported", flush=True)
input()
"""

REPORT_AND_END = """
from tests.telemetry.samples import finish_pass, open_pool
telemetry, pool = open_pool()
finish_pass(pool)
"""


def all_three_signals(received: OtlpReceiver) -> bool:
    return bool(
        received.events("kvcanary.violation")
        and any(span.events for span in received.spans_named("kvcanary.verify"))
        and received.points_of("kvcanary.violations", kvcanary_kind="token")
    )


def test_a_violation_leaves_as_log_record_span_event_and_metric_though_the_process_is_then_killed(
    each_receiver: OtlpReceiver, start_child: StartChild
) -> None:
    child = start_child(REPORT_AND_WAIT, **each_receiver.environment())
    try:
        assert each_receiver.wait_for(all_three_signals, timeout_s=60)
    finally:
        child.send_signal(signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL


def test_a_new_pool_and_its_coverage_are_exported_without_waiting_for_the_interval(receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = open_pool()
    pool.records_memory(1_000, 200_000)
    pool.coverage("attention", True)
    assert receiver.wait_for(
        lambda received: received.latest("kvcanary.pools") == received.latest("kvcanary.coverage") == 1
    )
    assert telemetry.shutdown(timeout_s=10)


def test_coverage_that_is_lost_later_is_exported_without_waiting_for_the_interval(receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = open_pool()
    pool.coverage("attention", True)
    assert telemetry.flush(10)
    pool.coverage("attention", False, "switched off after KeyError")
    assert receiver.wait_for(lambda received: received.latest("kvcanary.coverage") == 0)
    assert telemetry.shutdown(timeout_s=10)


def test_what_is_left_leaves_when_the_process_ends(receiver: HttpOtlpReceiver, start_child: StartChild) -> None:
    child = start_child(REPORT_AND_END)
    assert child.wait(60) == 0
    assert receiver.spans_named("kvcanary.verify")
    assert receiver.points_of("kvcanary.step.duration")


def test_a_private_meter_provider_exports_at_the_standard_interval(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    start_child(REPORT_AND_END + "input()", OTEL_METRIC_EXPORT_INTERVAL="50")
    assert receiver.wait_for(lambda received: len(received.points_of("kvcanary.step.duration")) >= 2, timeout_s=60)


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise SystemExit(3)"])
def test_the_exit_status_is_the_programs_own(receiver: HttpOtlpReceiver, start_child: StartChild, ending: str) -> None:
    child: subprocess.Popen[str] = start_child(f"{REPORT_AND_END}\nimport sys\n{ending}")
    assert child.wait(60) == 3
