"""Names, units and attributes of the metrics, as a receiver sees them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcanary_agent.canary.violation import CheckCounts, Kind
from kvcanary_agent.telemetry import PoolTelemetry, Telemetry
from kvcanary_agent.telemetry.tallies import PoolKey
from tests.otlp_receiver import HttpOtlpReceiver
from tests.telemetry.samples import changed_bytes, finish_pass, open_pool, violation

OF_POOL = {"kvcanary.engine": "demo", "kvcanary.pool": "kv", "kvcanary.rank": 1}


@pytest.fixture
def opened(receiver: HttpOtlpReceiver) -> Iterator[tuple[Telemetry, PoolTelemetry]]:
    telemetry, pool = open_pool()
    yield telemetry, pool
    assert telemetry.shutdown(timeout_s=10)


Opened = tuple[Telemetry, PoolTelemetry]


def test_every_instrument_has_its_name_and_unit(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    telemetry.patched("demo", "BlockManager", "patched")
    telemetry.coverage("demo", "prefix cache", True)
    telemetry.evicted("demo", {"evicted": 1})
    pool.records_memory(1_000, 200_000)
    pool.lost_violations(2)
    finish_pass(pool, violation(), counts=CheckCounts(slots={"token": (64, 1)}))
    telemetry.tallies.pool(PoolKey(engine="demo", pool="kv", rank=1)).count_incident("written")
    assert telemetry.flush(10)
    assert {(point.name, point.unit, point.instrument) for point in receiver.points} == {
        ("kvcanary.checks", "{slot}", "counter"),
        ("kvcanary.violations", "{violation}", "counter"),
        ("kvcanary.violations.lost", "{violation}", "counter"),
        ("kvcanary.incidents", "{incident}", "counter"),
        ("kvcanary.step.duration", "s", "histogram"),
        ("kvcanary.coverage", "1", "gauge"),
        ("kvcanary.evictions", "{block}", "counter"),
        ("kvcanary.records.memory", "By", "updowncounter"),
        ("kvcanary.pools", "{pool}", "updowncounter"),
        ("kvcanary.patches", "{class}", "updowncounter"),
    }


def test_checks_add_up_and_only_failures_carry_an_error_type(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    finish_pass(pool, counts=CheckCounts(slots={"token": (64, 0), "chain": (64, 0)}))
    finish_pass(pool, counts=CheckCounts(slots={"token": (64, 3), "chain": (64, 0)}))
    assert telemetry.flush(10)
    points = {
        (point.attributes["kvcanary.check"], point.attributes.get("error.type")): point
        for point in receiver.points_of("kvcanary.checks")
    }
    assert {key: point.value for key, point in points.items()} == {
        ("token", None): 125,
        ("token", "token"): 3,
        ("chain", None): 128,
    }
    assert points["chain", None].attributes == {**OF_POOL, "kvcanary.check": "chain"}


def test_violations_are_counted_by_kind_layer_and_part(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    pool.violation(changed_bytes(slot=1))
    pool.violation(changed_bytes(slot=2))
    pool.violation(violation(Kind.CHAIN))
    assert telemetry.flush(10)
    kinds = {point.attributes["kvcanary.kind"]: point for point in receiver.points_of("kvcanary.violations")}
    assert {kind: point.value for kind, point in kinds.items()} == {"content": 2, "chain": 1}
    assert kinds["content"].attributes == {
        **OF_POOL,
        "kvcanary.kind": "content",
        "kvcanary.layer": "model.layers.3.attn",
        "kvcanary.part": "k",
    }
    assert kinds["chain"].attributes == {**OF_POOL, "kvcanary.kind": "chain"}


def test_layers_beyond_256_are_counted_as_other(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    for layer in range(300):
        pool.violation(changed_bytes(layer=f"layers.{layer}", block=layer))
    assert telemetry.flush(10)
    layers = {point.attributes["kvcanary.layer"] for point in receiver.points_of("kvcanary.violations")}
    assert len(layers) == 257
    assert receiver.latest("kvcanary.violations", kvcanary_layer="other") == 300 - 256


def test_beyond_256_subjects_what_is_not_covered_is_named_first_and_the_least_of_the_others_stands_for_them(
    opened: Opened, receiver: HttpOtlpReceiver
) -> None:
    telemetry, _ = opened
    for number in range(400):
        telemetry.coverage("demo", f"layer {number}", number != 399, "x" * 5000)
    assert telemetry.flush(10)
    last = {
        str(point.attributes["kvcanary.subject"]): point for point in receiver.points_of("kvcanary.coverage")[-256:]
    }
    assert len(last) == 256
    assert (last["layer 399"].value, len(str(last["layer 399"].attributes["kvcanary.reason"]))) == (0, 200)
    assert last["other"].value == 1
    for number in range(400):
        telemetry.coverage("demo", f"layer {number}", False, "gone")
    assert telemetry.flush(10)
    assert receiver.latest("kvcanary.coverage", kvcanary_subject="other") == 0


def test_evictions_are_counted_by_what_became_of_them(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, _ = opened
    telemetry.evicted("demo", {"evicted": 2, "held": 0})
    telemetry.evicted("demo", {"evicted": 1, "held": 4})
    assert telemetry.flush(10)
    assert receiver.latest("kvcanary.evictions", kvcanary_outcome="evicted") == 3
    assert receiver.latest("kvcanary.evictions", kvcanary_outcome="held") == 4


def test_the_duration_is_in_seconds_by_phase_in_buckets_from_50_microseconds_to_a_second(
    opened: Opened, receiver: HttpOtlpReceiver
) -> None:
    telemetry, pool = opened
    finish_pass(pool)
    assert telemetry.flush(10)
    (point,) = receiver.points_of("kvcanary.step.duration")
    assert point.attributes == {**OF_POOL, "kvcanary.phase": "verify"}
    assert point.count == 1
    assert point.value == pytest.approx(2e-3)
    assert (point.bounds[0], point.bounds[-1]) == (50e-6, 1.0)


def test_coverage_is_1_or_0_and_the_last_statement_holds(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    telemetry.coverage("demo", "prefix cache", False, "the class was renamed")
    pool.coverage("layers.7", True)
    telemetry.coverage("demo", "attention", False, "not seen yet")
    telemetry.coverage("demo", "attention", True)
    assert telemetry.flush(10)
    assert [(point.value, point.attributes) for point in receiver.points_of("kvcanary.coverage")] == [
        (
            0,
            {"kvcanary.engine": "demo", "kvcanary.subject": "prefix cache", "kvcanary.reason": "the class was renamed"},
        ),
        (1, {"kvcanary.engine": "demo", "kvcanary.subject": "layers.7", "kvcanary.pool": "kv"}),
        (1, {"kvcanary.engine": "demo", "kvcanary.subject": "attention"}),
    ]


def test_patches_count_classes_by_their_latest_outcome(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, _ = opened
    telemetry.patched("demo", "Scheduler", "patched")
    telemetry.patched("demo", "BlockManager", "missing")
    telemetry.patched("demo", "BlockManager", "patched")
    assert telemetry.flush(10)
    assert [(point.value, point.attributes) for point in receiver.points_of("kvcanary.patches")] == [
        (2, {"kvcanary.engine": "demo", "kvcanary.outcome": "patched"})
    ]


def test_a_pool_counts_while_it_has_records(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    _, second = open_pool(telemetry, "draft")
    pool.records_memory(1_000, 200_000)
    second.records_memory(500, 100_000)
    assert telemetry.flush(10)
    assert receiver.latest("kvcanary.pools", kvcanary_engine="demo") == 2
    assert receiver.latest("kvcanary.records.memory", kvcanary_pool="draft") == 500
    second.close()
    assert telemetry.flush(10)
    assert receiver.latest("kvcanary.pools", kvcanary_engine="demo") == 1
    assert len(receiver.points_of("kvcanary.records.memory", kvcanary_pool="draft")) == 1


def test_lost_violations_are_counted(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    pool.lost_violations(40)
    pool.lost_violations(2)
    assert telemetry.flush(10)
    assert receiver.latest("kvcanary.violations.lost") == 42


def test_no_request_id_is_on_a_metric(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    pool.records_memory(1_000, 200_000)
    finish_pass(pool, violation(), changed_bytes(), counts=CheckCounts(slots={"token": (64, 1)}))
    assert telemetry.flush(10)
    assert receiver.points
    assert not [point for point in receiver.points if "req-" in repr(point.attributes)]


def test_the_resource_says_which_process_of_which_engine_this_is(opened: Opened, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened
    finish_pass(pool)
    assert telemetry.flush(10)
    resource = receiver.points[-1].resource
    assert {
        "service.name": "kvcanary-agent",
        "kvcanary.engine": "demo",
        "kvcanary.engine.version": "1.2",
        "kvcanary.rank": 1,
        "kvcanary.world_size": 2,
        "kvcanary.mode": "log",
        "telemetry.distro.name": "kvcanary-agent",
    }.items() <= resource.items()
    assert resource["process.pid"]
