"""The door of OpenTelemetry's auto-instrumentation: ``opentelemetry-instrument vllm serve MODEL``."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

import kvcanary_agent
from kvcanary_agent.settings import Settings


class KVCanaryInstrumentor(BaseInstrumentor):
    """Installs the agent, as any other way in does, unless ``KVCANARY_ENABLED`` says no.

    Instrumenting by hand takes ``tracer_provider``, ``meter_provider`` and ``logger_provider``, for pools opened later.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """None: which engines are here is seen when one is imported."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        if os.environ.get("KVCANARY_ENABLED", "").strip():
            settings, complaints = Settings.tolerant({"KVCANARY_ENABLED": os.environ["KVCANARY_ENABLED"]})
            if not settings.enabled and not complaints:
                return
        if any(kwargs.get(f"{signal}_provider") is not None for signal in ("tracer", "meter", "logger")):
            from kvcanary_agent.telemetry import providers

            providers.use(
                traces=kwargs.get("tracer_provider"),
                metrics=kwargs.get("meter_provider"),
                logs=kwargs.get("logger_provider"),
            )
        kvcanary_agent.install()

    def _uninstrument(self, **kwargs: Any) -> None:
        kvcanary_agent.uninstall()
