"""An exporter that hangs, refuses or raises costs the model's steps nothing, and the process's end a bounded time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from kvcanary_agent.telemetry import PoolTelemetry
from tests.otlp_receiver import HttpOtlpReceiver
from tests.telemetry.conftest import StartChild
from tests.telemetry.samples import changed_bytes, finish_pass, open_pool, violation


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """Connections are accepted by the kernel's backlog, and nobody ever answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def refusing_endpoint() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


EXPORTER_TIMEOUT_S = 60
"""What one step would take that waited for the exporter."""


def seconds_of_steps(pool: PoolTelemetry, steps: int = 200) -> float:
    start = time.monotonic()
    for step in range(steps):
        finish_pass(pool, changed_bytes(step=step, slot=step))
    return time.monotonic() - start


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_steps_are_not_slowed_by_an_exporter_that_hangs(
    silent_endpoint: str, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", silent_endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(EXPORTER_TIMEOUT_S))
    telemetry, pool = open_pool()
    finish_pass(pool, violation())
    assert not telemetry.flush(0.5), "the exporter was to hang"
    assert seconds_of_steps(pool) < EXPORTER_TIMEOUT_S / 2
    start = time.monotonic()
    assert not telemetry.shutdown(timeout_s=0.5)
    assert time.monotonic() - start < EXPORTER_TIMEOUT_S / 2


def test_steps_are_not_slowed_by_an_exporter_that_is_refused(
    refusing_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", refusing_endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(EXPORTER_TIMEOUT_S))
    telemetry, pool = open_pool()
    assert seconds_of_steps(pool) < EXPORTER_TIMEOUT_S / 2
    telemetry.shutdown(timeout_s=1)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_the_end_of_the_process_is_held_up_for_a_bounded_time(
    silent_endpoint: str, start_child: StartChild, protocol: str
) -> None:
    program = """
from tests.telemetry.samples import finish_pass, open_pool, violation
telemetry, pool = open_pool()
finish_pass(pool, violation())
print("at its end", flush=True)
"""
    child = start_child(
        program,
        OTEL_EXPORTER_OTLP_ENDPOINT=silent_endpoint,
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_EXPORTER_OTLP_TIMEOUT="600",
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "at its end\n"
    assert child.wait(EXPORTER_TIMEOUT_S) == 0


def test_a_signal_that_hangs_does_not_hold_up_the_others(
    receiver: HttpOtlpReceiver, silent_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{silent_endpoint}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "5")
    telemetry, pool = open_pool()
    finish_pass(pool, violation())
    assert receiver.wait_for(lambda received: received.logs and received.points_of("kvcanary.violations"), 4)
    telemetry.shutdown(timeout_s=0.1)


def test_an_exporter_that_raises_is_logged_once(
    receiver: HttpOtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    def fail(*args: object) -> None:
        raise OSError("broken pipe")

    monkeypatch.setattr(TracerProvider, "force_flush", fail)
    telemetry, pool = open_pool()
    for step in range(3):
        finish_pass(pool, step=step)
        assert telemetry.flush(10)
    assert telemetry.shutdown(timeout_s=10)
    assert [message for message in caplog.messages if "broken pipe" in message] == [
        "kvcanary: exporting traces failed: OSError: broken pipe; the server goes on, later failures are silent"
    ]
    assert receiver.points
