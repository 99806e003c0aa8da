"""Reports as a canary makes them."""

from __future__ import annotations

import time
from typing import Any

from kvcanary_agent.canary.violation import CheckCounts, Kind, Violation
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry import PoolTelemetry, Telemetry

NO_COUNTS = CheckCounts(slots={})


def violation(kind: Kind = Kind.TOKEN, **changes: Any) -> Violation:
    """Request ``req-reader`` reads position 1 in block 4 at step 9 and finds what ``req-writer`` wrote at step 8."""
    facts: dict[str, Any] = {
        "pool": "kv",
        "group": "full",
        "slot": 17,
        "block": 4,
        "offset": 1,
        "step": 9,
        "request": "req-reader",
        "position": 1,
        "expected": "hash:aaaa",
        "found": "hash:bbbb",
        "writer": "req-writer",
        "written_step": 8,
        "recorded_position": 1,
        "block_history": ("req-reader", "req-writer"),
    }
    return Violation(kind=kind, **{**facts, **changes})


def changed_bytes(**changes: Any) -> Violation:
    """One slot's K of layer 3 is no longer what ``req-writer`` wrote."""
    return violation(Kind.CONTENT, **{"layer": "model.layers.3.attn", "part": "k", **changes})


def open_pool(telemetry: Telemetry | None = None, pool: str = "kv") -> tuple[Telemetry, PoolTelemetry]:
    telemetry = telemetry or Telemetry(Settings())
    return telemetry, telemetry.open_pool("demo", "1.2", pool, rank=1, world_size=2)


def finish_pass(pool: PoolTelemetry, *violations: Violation, counts: CheckCounts = NO_COUNTS, step: int = 9) -> None:
    """A verifying pass over one step that took 2 ms and found ``violations``."""
    end_ns = time.time_ns()
    for found in violations:
        pool.violation(found)
    pool.pass_finished("verify", step, end_ns - 2_000_000, end_ns, counts, violations)
