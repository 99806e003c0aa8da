"""Which OpenTelemetry providers this process reports through.

For each signal on its own, in this order:

0. The provider that was given to :func:`use`.
1. The provider that the host application has set globally, if it is a real one.
2. A private provider, if the standard ``OTEL_*`` variables name an exporter. It is never made the global one: a global
   provider can be set once only, and that is the host's to do.
3. The global proxy: nothing leaves the process unless the host sets a provider later.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from opentelemetry import _logs, metrics, trace
from opentelemetry._logs._internal import ProxyLoggerProvider
from opentelemetry.metrics._internal import _ProxyMeterProvider

from kvcanary_agent import __version__
from kvcanary_agent.telemetry.semconv import SCOPE

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_logger = logging.getLogger(SCOPE)

Signal = Literal["traces", "metrics", "logs"]
_Provider = TypeVar("_Provider")

_OTLP_BY_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_DEFAULT_METRIC_INTERVAL_S = 60.0
_INSTALL = {
    "otlp": "pip install 'kvcanary-agent[otlp]'",
    "otlp_proto_grpc": "pip install 'kvcanary-agent[otlp]'",
    "otlp_proto_http": "pip install 'kvcanary-agent[otlp]'",
    "prometheus": "pip install 'kvcanary-agent[prometheus]'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """The providers chosen for this process.

    Attributes:
        traces, metrics, logs: One for each signal; the global proxy where nobody listens.
        private: The signals whose provider belongs to this agent, which must flush it and shut it down.
        metric_interval_s: How often a private meter provider is to be flushed, in seconds.
    """

    traces: trace.TracerProvider
    metrics: metrics.MeterProvider
    logs: _logs.LoggerProvider
    private: frozenset[Signal]
    metric_interval_s: float

    def current(self, signal: Signal) -> object:
        """The provider of ``signal``, or what the host has put in the place of the global proxy since."""
        if signal == "traces":
            return trace.get_tracer_provider() if is_proxy(self.traces) else self.traces
        if signal == "metrics":
            return metrics.get_meter_provider() if is_proxy(self.metrics) else self.metrics
        return _logs.get_logger_provider() if is_proxy(self.logs) else self.logs


_given: dict[Signal, Any] = {}


def use(
    *,
    traces: trace.TracerProvider | None,
    metrics: metrics.MeterProvider | None,
    logs: _logs.LoggerProvider | None,
) -> None:
    """Has pools that are opened from now on report through these providers; None leaves the choice open."""
    _given.clear()
    given: dict[Signal, Any] = {"traces": traces, "metrics": metrics, "logs": logs}
    _given.update({signal: provider for signal, provider in given.items() if provider is not None})


def is_proxy(provider: object) -> bool:
    """Whether ``provider`` is the stand-in that the API hands out while no global provider is set."""
    return isinstance(provider, (trace.ProxyTracerProvider, _ProxyMeterProvider, ProxyLoggerProvider))


def flush(provider: object) -> None:
    """Has a provider of any signal export what it holds, if it can; may raise, and wait for the exporter.

    Readers that are scraped have nothing to flush: Prometheus's keeps each collection that it is flushed for, and shows
    all of them in the next scrape, every series as many times.
    """
    # The SDK keeps the readers in the first place, older ones in the second.
    readers: Sequence[Any] | None = getattr(provider, "_metric_readers", None)
    if readers is None:
        readers = getattr(getattr(provider, "_sdk_config", None), "metric_readers", ())
    if any(map(_is_scraped, readers or ())):
        for reader in readers or ():
            if not _is_scraped(reader):
                reader.force_flush()
        return
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is not None:
        force_flush()


def _is_scraped(reader: object) -> bool:
    return any(cls.__name__ == "PrometheusMetricReader" for cls in type(reader).__mro__)


def choose_providers(resource_attributes: Mapping[str, str | int]) -> Providers:
    """Chooses the providers, building private ones where needed.

    Never raises for a wrong or unusable setting: it is one log line, and the signal is not exported.

    Args:
        resource_attributes: What a private provider says of this process, beside ``OTEL_RESOURCE_ATTRIBUTES``.
    """
    tracer_provider: trace.TracerProvider = _given.get("traces") or trace.get_tracer_provider()
    meter_provider: metrics.MeterProvider = _given.get("metrics") or metrics.get_meter_provider()
    logger_provider: _logs.LoggerProvider = _given.get("logs") or _logs.get_logger_provider()
    private: set[Signal] = set()
    problems = _Problems()
    resource = cache(lambda: _resource(resource_attributes))

    if is_proxy(tracer_provider):
        private_tracer_provider = _build("traces", _private_tracer_provider, resource, problems)
        if private_tracer_provider is not None:
            tracer_provider = private_tracer_provider
            private.add("traces")
    if is_proxy(meter_provider):
        private_meter_provider = _build("metrics", _private_meter_provider, resource, problems)
        if private_meter_provider is not None:
            meter_provider = private_meter_provider
            private.add("metrics")
    if is_proxy(logger_provider):
        private_logger_provider = _build("logs", _private_logger_provider, resource, problems)
        if private_logger_provider is not None:
            logger_provider = private_logger_provider
            private.add("logs")
    problems.say()
    return Providers(
        traces=tracer_provider,
        metrics=meter_provider,
        logs=logger_provider,
        private=frozenset(private),
        metric_interval_s=_metric_interval_s(),
    )


def _build(
    signal: Signal,
    build: Callable[[list[Any], Resource], _Provider],
    resource: Callable[[], Resource],
    problems: _Problems,
) -> _Provider | None:
    """A private provider, or None if no exporter for ``signal`` is asked for or it cannot be built."""
    exporters = list(_exporters(signal, problems))
    if not exporters:
        return None
    try:
        return build(exporters, resource())
    except Exception as error:
        _logger.error("kvcanary: %s are not exported: %s: %s", signal, type(error).__name__, error)
        return None


# The private providers have no exit handler of their own (``shutdown_on_exit=False``): the SDK's would wait for a
# hanging exporter without a bound. The agent flushes them itself.


def _private_tracer_provider(exporters: list[Any], resource: Resource) -> trace.TracerProvider:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _private_meter_provider(exporters: list[Any], resource: Resource) -> metrics.MeterProvider:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    # An infinite interval gives a reader without a thread. The SDK restarts a reader's thread in a forked child, which
    # would go on exporting the parent's totals from there; the agent's own thread stays in the parent.
    readers = [
        exporter
        if isinstance(exporter, MetricReader)
        else PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        for exporter in exporters
    ]
    return MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)


def _private_logger_provider(exporters: list[Any], resource: Resource) -> _logs.LoggerProvider:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    return provider


def _resource(attributes: Mapping[str, str | int]) -> Resource:
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create(
        {
            **attributes,
            "process.pid": os.getpid(),
            "telemetry.distro.name": "kvcanary-agent",
            "telemetry.distro.version": __version__,
        }
    )
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "kvcanary-agent"}))
    return resource


class _Problems:
    """What is wrong with exporters: the same of several signals is one line."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[dict[str, None], list[Signal]]] = {}

    def add(self, setting: str, signal: Signal, problem: str, remedy: str) -> None:
        """``setting`` asks for something that ``signal`` cannot be exported through."""
        settings, signals = self._found.setdefault((problem, remedy), ({}, []))
        settings[setting] = None
        signals.append(signal)

    def say(self) -> None:
        for (problem, remedy), (settings, signals) in self._found.items():
            *others, last = signals
            _logger.error(
                "kvcanary: %s: %s; %s are not exported through it; %s",
                ", ".join(settings),
                problem,
                f"{', '.join(others)} and {last}" if others else last,
                remedy,
            )


def _exporters(signal: Signal, problems: _Problems) -> Iterator[Any]:
    """The exporters that the environment asks for, those that work."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    named = os.environ.get(variable, "").strip()
    if not named:
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
        variable = next((endpoint for endpoint in endpoints if os.environ.get(endpoint, "").strip()), "")
        named = "otlp" if variable else "none"
    for name in (part.strip() for part in named.split(",")):
        if not name or name.lower() == "none":
            continue
        exporter = _exporter(signal, name, variable, problems)
        if exporter is not None:
            yield exporter


def _exporter(signal: Signal, name: str, variable: str, problems: _Problems) -> Any | None:
    """The exporter ``name``, or None if there is a problem, for which ``variable`` is to blame."""
    setting = f"{variable}={os.environ[variable]}"
    registered = _otlp_exporter_name(signal, problems) if name == "otlp" else name
    if registered is None:
        return None
    group = f"opentelemetry_{signal}_exporter"
    found = next(iter(entry_points(group=group, name=registered)), None)
    if found is None:
        remedy = _INSTALL.get(registered, f"install the package that registers it under {group!r}, or correct the name")
        problems.add(setting, signal, f"no exporter {registered!r} is installed", remedy)
        return None
    try:
        return found.load()()
    except Exception as error:
        install = _INSTALL.get(registered) if isinstance(error, ImportError) else None
        problem = f"the exporter {registered!r} cannot be used ({type(error).__name__}: {error})"
        problems.add(setting, signal, problem, install or "check its settings")
        return None


def _otlp_exporter_name(signal: Signal, problems: _Problems) -> str | None:
    """The registered name of the OTLP exporter for the protocol that is set, or None if there is none for it."""
    for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "").strip()
        if protocol:
            if protocol not in _OTLP_BY_PROTOCOL:
                remedy = f"set it to {' or '.join(_OTLP_BY_PROTOCOL)}"
                problems.add(f"{variable}={protocol}", signal, "no such protocol is supported", remedy)
            return _OTLP_BY_PROTOCOL.get(protocol)
    return _OTLP_BY_PROTOCOL["grpc"]


def _metric_interval_s() -> float:
    value = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    if not value:
        return _DEFAULT_METRIC_INTERVAL_S
    try:
        interval_s = float(value) / 1e3
    except ValueError:
        interval_s = math.nan
    if not interval_s > 0:
        _logger.error(
            "kvcanary: OTEL_METRIC_EXPORT_INTERVAL=%s is not a positive number of milliseconds; using %d",
            value,
            _DEFAULT_METRIC_INTERVAL_S * 1e3,
        )
        return _DEFAULT_METRIC_INTERVAL_S
    return min(interval_s, threading.TIMEOUT_MAX)
