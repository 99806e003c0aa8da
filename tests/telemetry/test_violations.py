"""Spans and log records of a violation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.context import attach, detach
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from kvcanary_agent.canary.violation import CheckCounts
from kvcanary_agent.telemetry import PoolTelemetry, Telemetry
from kvcanary_agent.telemetry.pool import TRACED
from tests.otlp_receiver import HttpOtlpReceiver
from tests.telemetry.samples import changed_bytes, finish_pass, open_pool, violation

Opened = tuple[Telemetry, PoolTelemetry]


@pytest.fixture
def opened(receiver: HttpOtlpReceiver) -> Iterator[Opened]:
    telemetry, pool = open_pool()
    yield telemetry, pool
    assert telemetry.shutdown(timeout_s=10)


def test_a_pass_is_a_span_with_the_times_given(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    pool.pass_finished("sweep", 7, 1_000, 5_000, CheckCounts(slots={"content": (10, 0), "token": (5, 0)}), ())
    assert telemetry.flush(10)
    (span,) = receiver.spans
    assert (span.name, span.kind, span.status) == ("kvcanary.sweep", 1, 0)
    assert (span.start_ns, span.end_ns) == (1_000, 5_000)
    assert span.attributes == {
        "kvcanary.engine": "demo",
        "kvcanary.engine.version": "1.2",
        "kvcanary.pool": "kv",
        "kvcanary.rank": 1,
        "kvcanary.step": 7,
        "kvcanary.checks": 15,
        "kvcanary.outcome": "ok",
    }


def test_a_violation_is_an_event_on_its_pass_and_an_error(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    finish_pass(pool, violation(), changed_bytes(slot=30, block=7, offset=2))
    assert telemetry.flush(10)
    (span,) = receiver.spans
    assert (span.status, span.status_message) == (2, "2 violations: content, token")
    assert span.attributes["kvcanary.outcome"] == "violation"
    token, content = span.events
    assert token.name == content.name == "kvcanary.violation"
    assert {
        "kvcanary.kind": "token",
        "kvcanary.request": "req-reader",
        "kvcanary.writer": "req-writer",
        "kvcanary.block": 4,
        "kvcanary.slot": 17,
        "kvcanary.position": 1,
        "kvcanary.cause": "double_allocation",
    }.items() <= token.attributes.items()
    assert (content.attributes["kvcanary.layer"], content.attributes["kvcanary.part"]) == ("model.layers.3.attn", "k")


def test_a_violation_is_a_log_record_with_the_diagnosis_as_body(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    pool.violation(violation())
    assert telemetry.flush(10)
    (log,) = receiver.events("kvcanary.violation")
    assert (log.severity_number, log.severity_text, log.scope) == (17, "ERROR", "kvcanary_agent")
    assert "double allocation" in log.body
    assert log.attributes["kvcanary.block_history"] == ["req-reader", "req-writer"]
    assert log.attributes["kvcanary.engine"] == "demo"


@pytest.mark.parametrize("found", [(), (violation(),)], ids=["ok", "violation"])
def test_a_pass_is_a_child_of_the_steps_own_span(opened: Opened, receiver: HttpOtlpReceiver, found: tuple[()]) -> None:
    telemetry, pool = opened
    of_step = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    token = attach(set_span_in_context(NonRecordingSpan(of_step)))
    finish_pass(pool, *found)
    detach(token)
    assert telemetry.flush(10)
    (span,) = receiver.spans
    assert int.from_bytes(span.trace_id, "big") == 0xABC
    assert int.from_bytes(span.parent_id, "big") == 0xDEF


def test_a_sampler_that_drops_spans_drops_neither_log_records_nor_metrics(
    receiver: HttpOtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    telemetry, pool = open_pool()
    finish_pass(pool, violation())
    assert telemetry.shutdown(timeout_s=10)
    assert not receiver.spans
    assert receiver.events("kvcanary.violation")
    assert receiver.latest("kvcanary.violations") == 1


def test_a_drill_is_counted_and_a_log_record_of_its_own(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    pool.drill("content", 5, "one bit of layers.0.k")
    assert telemetry.flush(10)
    (record,) = receiver.events("kvcanary.drill")
    assert record.attributes["kvcanary.kind"] == "content"
    assert record.attributes["kvcanary.step"] == 5
    assert "one bit of layers.0.k" in str(record.body)
    assert receiver.latest("kvcanary.drills") == 1


def test_a_diagnosis_looks_at_all_that_was_found_with_it(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    finish_pass(pool, changed_bytes(slot=28, block=7, offset=0), changed_bytes(slot=29, block=7, offset=1))
    assert telemetry.flush(10)
    causes = [record.attributes["kvcanary.cause"] for record in receiver.events("kvcanary.violation")]
    assert causes == ["block_overwritten", "block_overwritten"]


def test_what_is_wrong_with_a_traced_request_is_part_of_its_trace(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    pool.traced("req-reader", {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"})
    finish_pass(pool, violation(), violation(slot=18), violation(slot=19, request="req-other"))
    assert telemetry.flush(10)
    (span,) = receiver.spans
    assert span.links == (((0xABC).to_bytes(16, "big"), (0xDEF).to_bytes(8, "big")),)
    of_reader = [log.trace_id for log in receiver.logs if log.attributes["kvcanary.request"] == "req-reader"]
    of_other = [log.trace_id for log in receiver.logs if log.attributes["kvcanary.request"] == "req-other"]
    assert of_reader == [(0xABC).to_bytes(16, "big")] * 2
    assert of_other == [b""]


def test_a_request_that_has_the_name_of_a_traced_one_is_not_taken_for_it(
    opened: Opened, receiver: HttpOtlpReceiver
) -> None:
    telemetry, pool = opened
    pool.traced("req-reader", {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"})
    pool.traced("req-reader", {})
    finish_pass(pool, violation())
    assert telemetry.flush(10)
    assert [log.trace_id for log in receiver.logs] == [b""]


def test_traces_of_requests_long_ago_are_forgotten_and_headers_that_make_no_sense_are_ignored(
    opened: Opened, receiver: HttpOtlpReceiver
) -> None:
    telemetry, pool = opened
    pool.traced("req-reader", {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"})
    for number in range(TRACED):
        pool.traced(f"req-{number}", {"traceparent": "not a trace"})
    finish_pass(pool, violation(), violation(slot=18, request="req-0"))
    assert telemetry.flush(10)
    assert [log.trace_id for log in receiver.logs] == [b"", b""]
    assert receiver.spans[0].links == ()
