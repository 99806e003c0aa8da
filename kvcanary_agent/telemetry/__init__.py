"""What the agent reports, and how it leaves the process."""

from kvcanary_agent.telemetry.pool import PoolTelemetry
from kvcanary_agent.telemetry.process import Telemetry

__all__ = ["PoolTelemetry", "Telemetry"]
