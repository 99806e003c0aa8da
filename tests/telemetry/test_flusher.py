"""When a flusher exports."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvcanary_agent.telemetry import flusher as flusher_module
from kvcanary_agent.telemetry.flusher import MIN_GAP_S, Flusher


class Export:
    """An exporter that notes when it starts and holds on until ``release`` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.release.set()
        self._changed = threading.Condition()
        self.starts: list[float] = []
        self.shut_down = threading.Event()

    def __call__(self) -> None:
        with self._changed:
            self.starts.append(time.monotonic())
            self._changed.notify_all()
        self.release.wait(30)

    def wait_for_starts(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.starts) >= count, 30)


@pytest.fixture
def export() -> Export:
    return Export()


@pytest.fixture
def flusher(export: Export) -> Iterator[Flusher]:
    flusher = Flusher("traces", export, export.shut_down.set)
    yield flusher
    export.release.set()
    flusher.close()
    assert flusher.join(time.monotonic() + 30)


def soon() -> float:
    return time.monotonic() + 30


def test_the_first_request_is_served_at_once(flusher: Flusher, export: Export) -> None:
    asked = time.monotonic()
    assert flusher.wait(flusher.request(), soon())
    assert export.starts[0] - asked < MIN_GAP_S / 2


def test_a_burst_of_requests_is_one_export_now_and_one_after_the_gap(flusher: Flusher, export: Export) -> None:
    assert flusher.wait(flusher.request(), soon())
    tickets = [flusher.request() for _ in range(100)]
    assert flusher.wait(tickets[-1], soon())
    assert len(export.starts) == 2
    assert export.starts[1] - export.starts[0] >= MIN_GAP_S


def test_an_urgent_request_does_not_wait_for_the_gap(
    flusher: Flusher, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher_module, "MIN_GAP_S", 600.0)
    assert flusher.wait(flusher.request(), soon())
    assert flusher.wait(flusher.request(urgent=True), soon())
    assert len(export.starts) == 2


def test_requests_during_an_export_are_served_by_another_one(flusher: Flusher, export: Export) -> None:
    export.release.clear()
    first = flusher.request()
    assert export.wait_for_starts(1)
    second = flusher.request(urgent=True)
    export.release.set()
    assert flusher.wait(first, soon())
    assert flusher.wait(second, soon())
    assert len(export.starts) == 2


def test_who_waits_for_a_hanging_export_waits_until_the_deadline_only(flusher: Flusher, export: Export) -> None:
    export.release.clear()
    assert not flusher.wait(flusher.request(), time.monotonic() + 0.1)


def test_it_exports_at_the_interval_without_a_request(export: Export) -> None:
    flusher = Flusher("metrics", export, export.shut_down.set, interval_s=0.01)
    assert export.wait_for_starts(2)
    flusher.close()
    assert flusher.join(soon())


def test_an_interval_shorter_than_the_gap_is_kept(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher_module, "MIN_GAP_S", 600.0)
    flusher = Flusher("metrics", export, export.shut_down.set, interval_s=0.01)
    assert export.wait_for_starts(3)
    flusher.close()
    assert flusher.join(soon())


def test_closing_serves_what_is_requested_and_then_shuts_down(export: Export) -> None:
    flusher = Flusher("logs", export, export.shut_down.set)
    flusher.request()
    flusher.close()
    assert flusher.join(soon())
    assert len(export.starts) == 1
    assert export.shut_down.is_set()


def test_an_export_that_raises_is_over_and_the_next_one_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    def fail() -> None:
        attempts.append(1)
        raise OSError("refused")

    flusher = Flusher("logs", fail, lambda: None)
    for _ in range(2):
        assert flusher.wait(flusher.request(urgent=True), soon())
    flusher.close()
    assert flusher.join(soon())
    assert len(attempts) == 2
    assert caplog.messages == [
        "kvcanary: exporting logs failed: OSError: refused; the server goes on, later failures are silent"
    ]
