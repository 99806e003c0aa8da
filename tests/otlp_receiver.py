"""A real OTLP receiver for tests: what a process exports to it, over gRPC or HTTP, as plain data to wait for.

with HttpOtlpReceiver() as receiver:
    ...  # a process with receiver.environment() in its environment
    assert receiver.wait_for(lambda received: received.events("kvcanary.violation"))
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]  # grpcio ships no types
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from typing_extensions import Self

Attributes = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    name: str
    attributes: Attributes
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``status`` is 0 (unset), 1 (ok) or 2 (error); ``parent_id`` is empty for a root span."""

    name: str
    attributes: Attributes
    resource: Attributes
    scope: str
    trace_id: bytes
    parent_id: bytes
    kind: int
    start_ns: int
    end_ns: int
    status: int
    status_message: str
    events: tuple[Event, ...]
    links: tuple[tuple[bytes, bytes], ...] = ()
    """Trace id and span id of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    event_name: str
    body: Any
    severity_number: int
    severity_text: str
    attributes: Attributes
    resource: Attributes
    scope: str
    time_ns: int
    trace_id: bytes
    """Empty outside of a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a metric.

    Attributes:
        instrument: ``"counter"`` (monotonic sum), ``"updowncounter"``, ``"gauge"`` or ``"histogram"``.
        value: The number; of a histogram its sum.
        count, bounds: Of a histogram: how many values, and the upper bounds of its buckets.
    """

    name: str
    unit: str
    instrument: str
    attributes: Attributes
    resource: Attributes
    value: float
    count: int = 0
    bounds: tuple[float, ...] = ()


class OtlpReceiver:
    """What was received, oldest first; a context manager that serves while it is open.

    Attributes:
        endpoint: For ``OTEL_EXPORTER_OTLP_ENDPOINT``.
        protocol: For ``OTEL_EXPORTER_OTLP_PROTOCOL``.
    """

    endpoint: str
    protocol: str

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.logs: list[Log] = []
        self.points: list[Point] = []
        self._arrived = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving; what was received stays."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """The variables that make a process export all three signals here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol}

    def wait_for(self, condition: Callable[[Self], object], timeout_s: float = 20.0) -> bool:
        """Waits until ``condition(self)`` is true after some arrival; False after ``timeout_s`` seconds."""
        with self._arrived:
            return bool(self._arrived.wait_for(lambda: condition(self), timeout_s))

    def events(self, name: str) -> list[Log]:
        """The log records whose event is ``name``."""
        return [log for log in self.logs if log.event_name == name]

    def spans_named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def points_of(self, name: str, **attributes: Any) -> list[Point]:
        """The points of metric ``name`` that have these attributes (``_`` for ``.``), oldest first."""
        wanted = {key.replace("_", "."): value for key, value in attributes.items()}
        return [point for point in self.points if point.name == name and wanted.items() <= point.attributes.items()]

    def latest(self, name: str, **attributes: Any) -> float | None:
        """The value of the last of :meth:`points_of`, None if there is none."""
        points = self.points_of(name, **attributes)
        return points[-1].value if points else None

    def receive_traces(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        spans = [
            Span(
                name=span.name,
                attributes=_plain(span.attributes),
                resource=_plain(of_resource.resource.attributes),
                scope=of_scope.scope.name,
                trace_id=span.trace_id,
                parent_id=span.parent_span_id,
                kind=span.kind,
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                status=span.status.code,
                status_message=span.status.message,
                events=tuple(
                    Event(name=event.name, attributes=_plain(event.attributes), time_ns=event.time_unix_nano)
                    for event in span.events
                ),
                links=tuple((link.trace_id, link.span_id) for link in span.links),
            )
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._arrived:
            self.spans.extend(spans)
            self._arrived.notify_all()

    def receive_logs(self, request: logs_service_pb2.ExportLogsServiceRequest) -> None:
        logs = [
            Log(
                event_name=log.event_name,
                body=_value(log.body),
                severity_number=log.severity_number,
                severity_text=log.severity_text,
                attributes=_plain(log.attributes),
                resource=_plain(of_resource.resource.attributes),
                scope=of_scope.scope.name,
                time_ns=log.time_unix_nano,
                trace_id=log.trace_id,
            )
            for of_resource in request.resource_logs
            for of_scope in of_resource.scope_logs
            for log in of_scope.log_records
        ]
        with self._arrived:
            self.logs.extend(logs)
            self._arrived.notify_all()

    def receive_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        points = [
            point
            for of_resource in request.resource_metrics
            for of_scope in of_resource.scope_metrics
            for metric in of_scope.metrics
            for point in _points(metric, _plain(of_resource.resource.attributes))
        ]
        with self._arrived:
            self.points.extend(points)
            self._arrived.notify_all()

    def _services(self) -> tuple[_Service, ...]:
        return (
            _Service("trace", trace_service_pb2.ExportTraceServiceRequest, self.receive_traces),
            _Service("logs", logs_service_pb2.ExportLogsServiceRequest, self.receive_logs),
            _Service("metrics", metrics_service_pb2.ExportMetricsServiceRequest, self.receive_metrics),
        )


class _Service:
    """One signal's service; an empty message, ``b""``, is the answer "all accepted" of every one of them."""

    def __init__(self, name: str, request: type[Any], receive: Callable[[Any], None]) -> None:
        self.http_path = f"/v1/{name}s" if name == "trace" else f"/v1/{name}"
        self.grpc_name = f"opentelemetry.proto.collector.{name}.v1.{name.capitalize()}Service"
        self._request = request
        self._receive = receive

    def answer(self, body: bytes) -> bytes:
        self._receive(self._request.FromString(body))
        return b""


class GrpcOtlpReceiver(OtlpReceiver):
    """Listens on a free port of 127.0.0.1 for OTLP over gRPC."""

    protocol = "grpc"

    def __init__(self) -> None:
        super().__init__()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        for service in self._services():
            method = grpc.unary_unary_rpc_method_handler(
                lambda body, _, service=service: service.answer(body), lambda body: body, lambda body: body
            )
            handler = grpc.method_handlers_generic_handler(service.grpc_name, {"Export": method})
            self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self._server.stop(grace=None).wait()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients of tests are killed in the middle of a request."""


class HttpOtlpReceiver(OtlpReceiver):
    """Listens on a free port of 127.0.0.1 for OTLP over HTTP (protobuf bodies)."""

    protocol = "http/protobuf"

    def __init__(self) -> None:
        super().__init__()
        services = {service.http_path: service for service in self._services()}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                service = services.get(self.path)
                reply = service.answer(body) if service else b""
                self.send_response(200 if service else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _HttpServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="otlp-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _points(metric: Metric, resource: Attributes) -> Iterable[Point]:
    data = metric.WhichOneof("data")
    if data == "histogram":
        for histogram in metric.histogram.data_points:
            yield Point(
                name=metric.name,
                unit=metric.unit,
                instrument="histogram",
                attributes=_plain(histogram.attributes),
                resource=resource,
                value=histogram.sum,
                count=histogram.count,
                bounds=tuple(histogram.explicit_bounds),
            )
        return
    if data == "sum":
        instrument = "counter" if metric.sum.is_monotonic else "updowncounter"
        numbers = metric.sum.data_points
    elif data == "gauge":
        instrument, numbers = "gauge", metric.gauge.data_points
    else:
        raise NotImplementedError(f"metric {metric.name} carries {data}")
    for number in numbers:
        yield Point(
            name=metric.name,
            unit=metric.unit,
            instrument=instrument,
            attributes=_plain(number.attributes),
            resource=resource,
            value=number.as_int if number.WhichOneof("value") == "as_int" else number.as_double,
        )


def _plain(attributes: Iterable[KeyValue]) -> Attributes:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _plain(value.kvlist_value.values)
    return getattr(value, kind)
