"""Which providers are used: the host's, private ones as the OTEL_* variables say, or none."""

from __future__ import annotations

import logging
import math

import pytest

from kvcanary_agent.telemetry import providers
from tests.otlp_receiver import HttpOtlpReceiver
from tests.telemetry.conftest import StartChild
from tests.telemetry.samples import finish_pass, open_pool, violation

IMPORTED = """
import sys
def imported():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "opentelemetry")
"""

HOST_PROVIDERS = """
from opentelemetry import trace, metrics, _logs
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, InMemoryLogExporter

spans, reader, logs = InMemorySpanExporter(), InMemoryMetricReader(), InMemoryLogExporter()

def set_tracer_provider():
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(spans))
    trace.set_tracer_provider(provider)

def set_meter_provider():
    metrics.set_meter_provider(MeterProvider([reader]))

def set_logger_provider():
    provider = LoggerProvider()
    provider.add_log_record_processor(BatchLogRecordProcessor(logs))
    _logs.set_logger_provider(provider)

def metric_names():
    data = reader.get_metrics_data()
    return {
        metric.name
        for of_resource in (data.resource_metrics if data else ())
        for of_scope in of_resource.scope_metrics
        for metric in of_scope.metrics
    }

def seen():
    return bool(spans.get_finished_spans()), "kvcanary.violations" in metric_names(), bool(logs.get_finished_logs())

from tests.telemetry.samples import finish_pass, open_pool, violation
"""


def output(start_child: StartChild, program: str, **environment: str) -> str:
    out, errors = start_child(program, **environment).communicate(timeout=60)
    assert out, errors
    return out.strip()


def test_opentelemetry_is_imported_with_the_first_pool_and_not_before(start_child: StartChild) -> None:
    program = f"""{IMPORTED}
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry import Telemetry
telemetry = Telemetry(Settings())
telemetry.patched("demo", "Scheduler", "patched")
telemetry.coverage("demo", "attention", False, "renamed")
telemetry.flush(1)
before = imported()
telemetry.open_pool("demo", "1.2", "kv", 0, 1)
print(before, "opentelemetry.trace" in imported(), "opentelemetry.sdk" in imported())
"""
    assert output(start_child, program) == "[] True False"


def test_no_thread_starts_before_the_first_pool(start_child: StartChild) -> None:
    program = """
import threading
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry import Telemetry
telemetry = Telemetry(Settings())
telemetry.patched("demo", "Scheduler", "patched")
print(threading.active_count())
"""
    assert output(start_child, program, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9") == "1"


def test_the_hosts_providers_are_used(receiver: HttpOtlpReceiver, start_child: StartChild) -> None:
    program = f"""{HOST_PROVIDERS}
set_tracer_provider(), set_meter_provider(), set_logger_provider()
telemetry, pool = open_pool()
finish_pass(pool, violation())
telemetry.flush(10)
print(seen())
"""
    assert output(start_child, program) == "(True, True, True)"
    assert not [*receiver.spans, *receiver.points, *receiver.logs]


def test_each_signal_chooses_for_itself(receiver: HttpOtlpReceiver, start_child: StartChild) -> None:
    program = f"""{HOST_PROVIDERS}
set_meter_provider()
telemetry, pool = open_pool()
finish_pass(pool, violation())
telemetry.flush(10)
print(seen())
"""
    assert output(start_child, program) == "(False, True, False)"
    assert receiver.spans
    assert receiver.logs
    assert not receiver.points


def test_private_providers_leave_the_global_ones_for_the_host(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    program = f"""{HOST_PROVIDERS}
telemetry, pool = open_pool()
finish_pass(pool)
set_tracer_provider(), set_meter_provider(), set_logger_provider()
print(type(trace.get_tracer_provider()), type(metrics.get_meter_provider()), type(_logs.get_logger_provider()))
"""
    assert output(start_child, program) == (
        "<class 'opentelemetry.sdk.trace.TracerProvider'> <class 'opentelemetry.sdk.metrics._internal.MeterProvider'> "
        "<class 'opentelemetry.sdk._logs._internal.LoggerProvider'>"
    )


def test_a_host_that_sets_its_providers_after_the_first_pool_gets_what_follows(start_child: StartChild) -> None:
    program = f"""{HOST_PROVIDERS}
telemetry, pool = open_pool()
set_tracer_provider(), set_meter_provider(), set_logger_provider()
finish_pass(pool, violation())
telemetry.flush(10)
print(seen())
"""
    assert output(start_child, program) == "(True, True, True)"


def test_a_disabled_sdk_is_not_even_imported(receiver: HttpOtlpReceiver, start_child: StartChild) -> None:
    program = f"""{IMPORTED}
from tests.telemetry.samples import finish_pass, open_pool, violation
telemetry, pool = open_pool()
finish_pass(pool, violation())
print(telemetry.flush(10), "opentelemetry.sdk" in imported())
"""
    assert output(start_child, program, OTEL_SDK_DISABLED="True") == "True False"
    assert not [*receiver.spans, *receiver.points, *receiver.logs]


def test_without_exporters_nothing_is_built_and_nothing_fails(caplog: pytest.LogCaptureFixture) -> None:
    telemetry, pool = open_pool()
    finish_pass(pool, violation())
    assert telemetry.shutdown(timeout_s=10)
    (line,) = caplog.messages
    assert "double allocation" in line


def test_a_signal_can_be_switched_off(receiver: HttpOtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    telemetry, pool = open_pool()
    finish_pass(pool, violation())
    assert telemetry.shutdown(timeout_s=10)
    assert not receiver.spans
    assert receiver.logs
    assert receiver.points


def test_an_endpoint_for_one_signal_exports_that_signal_only(
    receiver: HttpOtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{receiver.endpoint}/v1/metrics")
    telemetry, pool = open_pool()
    finish_pass(pool, violation())
    assert telemetry.shutdown(timeout_s=10)
    assert receiver.points
    assert not [*receiver.spans, *receiver.logs]


def test_several_exporters_of_a_signal_all_work(receiver: HttpOtlpReceiver, start_child: StartChild) -> None:
    program = """
from tests.telemetry.samples import finish_pass, open_pool
telemetry, pool = open_pool()
finish_pass(pool)
"""
    assert '"name": "kvcanary.verify"' in output(start_child, program, OTEL_TRACES_EXPORTER="console, otlp")
    assert receiver.spans_named("kvcanary.verify")


def test_all_signals_name_the_same_instance_of_the_service(receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = open_pool()
    finish_pass(pool, violation())
    assert telemetry.shutdown(timeout_s=10)
    assert receiver.spans[0].resource == receiver.logs[0].resource == receiver.points[0].resource


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin_json", "no exporter 'zipkin_json' is installed; traces are not exported"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "set it to grpc or http/protobuf"),
    ],
)
def test_an_exporter_that_is_not_there_is_one_line_and_the_other_signals_go_on(
    receiver: HttpOtlpReceiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setenv(variable, value)
    telemetry, pool = open_pool()
    finish_pass(pool)
    assert telemetry.shutdown(timeout_s=10)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvcanary_agent"]
    assert f"{variable}={value}" in line
    assert said in line
    assert receiver.points
    assert not receiver.spans


@pytest.mark.parametrize(
    ("environment", "settings", "signals"),
    [
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"},
            "OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317",
            "traces, metrics and logs",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_LOGS_EXPORTER": "otlp"},
            "OTEL_TRACES_EXPORTER=otlp, OTEL_LOGS_EXPORTER=otlp",
            "traces and logs",
        ),
    ],
    ids=["one_setting", "two_settings"],
)
def test_a_package_that_lacks_for_several_signals_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environment: dict[str, str],
    settings: str,
    signals: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(providers, "entry_points", lambda **_: [])
    telemetry, _ = open_pool()
    assert telemetry.shutdown(timeout_s=10)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvcanary_agent"]
    assert line == (
        f"kvcanary: {settings}: no exporter 'otlp_proto_grpc' is installed; {signals} are not exported through it; "
        "pip install 'kvcanary-agent[otlp]'"
    )


@pytest.mark.parametrize("failure", [ImportError("no module named grpc"), ValueError("bad endpoint")], ids=repr)
def test_an_exporter_that_cannot_be_made_is_one_line_with_the_remedy(
    receiver: HttpOtlpReceiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    def fail(*args: object, **kwargs: object) -> None:
        raise failure

    monkeypatch.setattr(OTLPSpanExporter, "__init__", fail)
    telemetry, pool = open_pool()
    finish_pass(pool)
    assert telemetry.shutdown(timeout_s=10)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvcanary_agent"]
    assert f"OTEL_EXPORTER_OTLP_ENDPOINT={receiver.endpoint}" in line
    assert str(failure) in line
    assert ("pip install 'kvcanary-agent[otlp]'" in line) == isinstance(failure, ImportError)
    assert receiver.points


def test_the_users_service_name_and_resource_attributes_are_kept(
    receiver: HttpOtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod")
    telemetry, pool = open_pool()
    finish_pass(pool)
    assert telemetry.shutdown(timeout_s=10)
    resource = receiver.spans[0].resource
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("chat", "prod")


@pytest.mark.parametrize("interval", ["soon", "0", "-5"])
def test_a_wrong_metric_interval_is_one_line_and_the_default(
    receiver: HttpOtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interval: str
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    telemetry, pool = open_pool()
    finish_pass(pool)
    assert telemetry.shutdown(timeout_s=10)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"OTEL_METRIC_EXPORT_INTERVAL={interval}" in line
    assert receiver.points


def test_readers_that_are_scraped_are_not_flushed_and_others_beside_them_are() -> None:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        InMemoryMetricReader,
        MetricExporter,
        MetricExportResult,
        PeriodicExportingMetricReader,
    )
    from prometheus_client import REGISTRY

    exported = []

    class Exporter(MetricExporter):
        def export(self, metrics_data: object, timeout_millis: float = 0, **_: object) -> MetricExportResult:
            exported.append(metrics_data)
            return MetricExportResult.SUCCESS

        def force_flush(self, timeout_millis: float = 0) -> bool:
            return True

        def shutdown(self, timeout_millis: float = 0, **_: object) -> None:
            pass

    scraped = PrometheusMetricReader()
    host = MeterProvider([scraped, PeriodicExportingMetricReader(Exporter(), math.inf), InMemoryMetricReader()])
    host.get_meter("host").create_counter("asked").add(1)
    for _ in range(3):
        providers.flush(host)
    series = [sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name == "asked_total"]
    host.shutdown()
    assert len(exported) >= 3
    assert len(series) == 1
