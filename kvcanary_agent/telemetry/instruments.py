"""The instruments: names, units, and how the totals become observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from kvcanary_agent.telemetry import semconv
from kvcanary_agent.telemetry.tallies import PoolKey, Tallies

STEP_DURATION_BOUNDARIES_S = (
    50e-6,
    100e-6,
    200e-6,
    400e-6,
    800e-6,
    1.5e-3,
    3e-3,
    6e-3,
    12e-3,
    25e-3,
    50e-3,
    100e-3,
    250e-3,
    500e-3,
    1.0,
)
"""A pass takes tens of microseconds on an idle step, and a fraction of a second on every byte of a long prefix."""


def create_instruments(meter: Meter, tallies: Tallies) -> Histogram:
    """Creates every instrument of the agent on ``meter``.

    All but one observe ``tallies`` at collection. Creating them again on the same meter, as a forked child does with
    a provider it inherited, changes nothing.

    Returns:
        ``kvcanary.step.duration`` in seconds, the one instrument that is recorded to directly.
    """

    def checks(_: CallbackOptions) -> Iterable[Observation]:
        for key, tally in list(tallies.pools.items()):
            for check, (passed, failed) in list(tally.checks.items()):
                attributes = {**pool_attributes(key), semconv.CHECK: check}
                yield Observation(passed, attributes)
                if failed:
                    yield Observation(failed, {**attributes, semconv.ERROR_TYPE: check})

    def violations(_: CallbackOptions) -> Iterable[Observation]:
        for key, tally in list(tallies.pools.items()):
            for (kind, layer, part), count in list(tally.violations.items()):
                where = {semconv.LAYER: layer, semconv.PART: part}
                named = {name: value for name, value in where.items() if value}
                yield Observation(count, {**pool_attributes(key), semconv.KIND: kind, **named})

    def lost(_: CallbackOptions) -> Iterable[Observation]:
        for key, tally in list(tallies.pools.items()):
            if tally.lost:
                yield Observation(tally.lost, pool_attributes(key))

    def drills(_: CallbackOptions) -> Iterable[Observation]:
        for key, tally in list(tallies.pools.items()):
            for kind, count in list(tally.drills.items()):
                yield Observation(count, {**pool_attributes(key), semconv.KIND: kind})

    def incidents(_: CallbackOptions) -> Iterable[Observation]:
        for key, tally in list(tallies.pools.items()):
            for outcome, count in list(tally.incidents.items()):
                yield Observation(count, {**pool_attributes(key), semconv.OUTCOME: outcome})

    def evictions(_: CallbackOptions) -> Iterable[Observation]:
        for (engine, outcome), count in list(tallies.evictions.items()):
            yield Observation(count, {semconv.ENGINE: engine, semconv.OUTCOME: outcome})

    def records_memory(_: CallbackOptions) -> Iterable[Observation]:
        for key, tally in list(tallies.pools.items()):
            if tally.records_bytes is not None:
                yield Observation(tally.records_bytes, pool_attributes(key))

    def pools(_: CallbackOptions) -> Iterable[Observation]:
        open_pools: Counter[str] = Counter()
        for key, tally in list(tallies.pools.items()):
            open_pools[key.engine] += tally.records_bytes is not None
        for engine, count in open_pools.items():
            yield Observation(count, {semconv.ENGINE: engine})

    def coverage(_: CallbackOptions) -> Iterable[Observation]:
        for engine, pool, subject, covered, reason in tallies.bounded_coverage():
            optional = {semconv.POOL: pool, semconv.REASON: reason}
            named = {name: value for name, value in optional.items() if value}
            yield Observation(int(covered), {semconv.ENGINE: engine, semconv.SUBJECT: subject, **named})

    def patches(_: CallbackOptions) -> Iterator[Observation]:
        classes = Counter((engine, outcome) for (engine, _), outcome in list(tallies.patches.items()))
        for (engine, outcome), count in classes.items():
            yield Observation(count, {semconv.ENGINE: engine, semconv.OUTCOME: outcome})

    meter.create_observable_counter("kvcanary.checks", [checks], "{slot}", "Slots that a check compared.")
    meter.create_observable_counter(
        "kvcanary.violations", [violations], "{violation}", "Slots that are not what they should be."
    )
    meter.create_observable_counter(
        "kvcanary.violations.lost",
        [lost],
        "{violation}",
        "Violations counted without their details.",
    )
    meter.create_observable_counter(
        "kvcanary.drills", [drills], "{drill}", "Faults injected on purpose, see KVCANARY_DRILL."
    )
    meter.create_observable_counter(
        "kvcanary.incidents", [incidents], "{incident}", "Bursts of violations by what became of their files."
    )
    meter.create_observable_counter(
        "kvcanary.evictions",
        [evictions],
        "{block}",
        "Corrupt blocks by what became of taking them out of the prefix cache, see KVCANARY_ON_VIOLATION.",
    )
    meter.create_observable_up_down_counter(
        "kvcanary.records.memory", [records_memory], "By", "Memory of the canary's records and scratch."
    )
    meter.create_observable_up_down_counter("kvcanary.pools", [pools], "{pool}", "Pools that are being checked.")
    meter.create_observable_up_down_counter(
        "kvcanary.patches", [patches], "{class}", "Engine classes by what became of patching them."
    )
    meter.create_observable_gauge(
        "kvcanary.coverage", [coverage], "1", "1 where the subject is checked, 0 where it is known not to be."
    )
    return meter.create_histogram(
        "kvcanary.step.duration",
        "s",
        "Time that a pass of checks takes on the thread that runs the model's steps.",
        explicit_bucket_boundaries_advisory=STEP_DURATION_BOUNDARIES_S,
    )


def pool_attributes(key: PoolKey) -> dict[str, str | int]:
    return {semconv.ENGINE: key.engine, semconv.POOL: key.pool, semconv.RANK: key.rank}
