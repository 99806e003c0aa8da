"""Running totals that the step thread adds to and that the instruments read when they are collected.

The step thread touches plain integers only: it takes no lock of the OpenTelemetry SDK, and a collection that is under
way cannot hold it up. Each pool has one writer, the thread that runs its steps; readers copy a mapping before they
walk it, because the writer may add a key meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LAYERS = 256
"""Distinct layer names that a process puts on metrics; later ones are counted as :data:`OTHER_LAYER`."""

OTHER_LAYER = "other"

MAX_SUBJECTS = 256
"""Statements of coverage that a process puts on metrics, those first that say what is not covered; of the others, the
least covered stands for all as :data:`OTHER_SUBJECT`. Adapters name layers, classes and settings, which may be many."""

OTHER_SUBJECT = "other"
MAX_REASON = 200
"""Characters of a subject, or of a reason, on metrics; the log and status files have all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKey:
    """What identifies a pool within a process: the attributes that all its measurements carry."""

    engine: str
    pool: str
    rank: int


@dataclass(slots=True)
class PoolTally:
    """Totals of one pool.

    Attributes:
        checks: Check -> ``[slots that passed, slots that failed]``.
        violations: ``(kind, layer or "", part or "")`` -> violations.
        drills: Kind of drill -> faults injected.
        incidents: What became of bursts of violations (``written``, ``repeated``, ``dropped``) -> how many.
        lost: Violations that were counted but whose details were not kept.
        records_bytes: Bytes of the canary's records and scratch; None while the pool has no canary.
    """

    checks: dict[str, list[int]] = field(default_factory=dict)
    violations: dict[tuple[str, str, str], int] = field(default_factory=dict)
    drills: dict[str, int] = field(default_factory=dict)
    incidents: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    records_bytes: int | None = None

    def count_incident(self, outcome: str) -> None:
        """Called by the thread that writes incidents, and by no other."""
        self.incidents[outcome] = self.incidents.get(outcome, 0) + 1


@dataclass(slots=True)
class Tallies:
    """Totals of this process.

    Attributes:
        pools: The totals of each pool that was ever opened.
        coverage: ``(engine, pool or "", subject)`` -> whether the subject is checked, and why not.
        patches: ``(engine, class)`` -> what became of it last.
        evictions: ``(engine, outcome)`` -> blocks that were to leave the engine's prefix cache.
        layers: The layer names seen so far, at most :data:`MAX_LAYERS`.
    """

    pools: dict[PoolKey, PoolTally] = field(default_factory=dict)
    coverage: dict[tuple[str, str, str], tuple[bool, str]] = field(default_factory=dict)
    patches: dict[tuple[str, str], str] = field(default_factory=dict)
    evictions: dict[tuple[str, str], int] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)

    def pool(self, key: PoolKey) -> PoolTally:
        return self.pools.setdefault(key, PoolTally())

    def bounded_layer(self, layer: str | None) -> str:
        """The name that metrics use for ``layer``: itself, ``""`` for None, or :data:`OTHER_LAYER` beyond the bound."""
        if layer is None:
            return ""
        if layer not in self.layers:
            if len(self.layers) >= MAX_LAYERS:
                return OTHER_LAYER
            self.layers.add(layer)
        return layer

    def bounded_coverage(self) -> list[tuple[str, str, str, bool, str]]:
        """Engine, pool, subject, whether it is covered, and why not, of at most :data:`MAX_SUBJECTS` subjects."""
        stated = [
            (engine, pool, subject[:MAX_REASON], covered, reason[:MAX_REASON])
            for (engine, pool, subject), (covered, reason) in list(self.coverage.items())
        ]
        if len(stated) <= MAX_SUBJECTS:
            return stated
        stated.sort(key=lambda statement: statement[3])
        shown, others = stated[: MAX_SUBJECTS - 1], stated[MAX_SUBJECTS - 1 :]
        engine, _, _, covered, _ = others[0]
        return [*shown, (engine, "", OTHER_SUBJECT, covered, "" if covered else f"{len(others)} more subjects")]

    def forget_pools(self) -> None:
        """Starts the pools' totals from zero, as a forked child must; what is patched and covered stays true there."""
        self.pools.clear()
        self.evictions.clear()
        self.layers.clear()
