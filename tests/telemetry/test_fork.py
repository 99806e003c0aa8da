"""A forked child starts over: nothing of its parent's is exported twice, and nothing hangs."""

from __future__ import annotations

from pathlib import Path

from tests.otlp_receiver import HttpOtlpReceiver, Log, Point, Span
from tests.telemetry.conftest import StartChild

# The parent has counted 100 slots and has a violation in its queues when it forks.
FORK = """
import os, sys
from kvcanary_agent.canary.violation import CheckCounts
from tests.telemetry.samples import finish_pass, open_pool, violation

telemetry, pool = open_pool()
pool.records_memory(1_000, 200_000)
finish_pass(pool, violation(), counts=CheckCounts(slots={"token": (100, 1)}))
child = os.fork()
if child == 0:
    in_child()
    os._exit(0)
_, status = os.waitpid(child, 0)
finish_pass(pool, counts=CheckCounts(slots={"token": (10, 0)}))
print(child, status, telemetry.flush(10), flush=True)
"""


def fork(start_child: StartChild, in_child: str) -> tuple[int, int]:
    """Runs ``in_child`` in a forked child; the pids of parent and child."""
    body = "\n".join(f"    {line}" for line in in_child.strip().splitlines())
    parent = start_child(f"def in_child():\n{body}\n{FORK}")
    out, errors = parent.communicate(timeout=60)
    assert out, errors
    child, status, flushed = out.split()
    assert (status, flushed) == ("0", "True"), errors
    return parent.pid, int(child)


def slots_checked(receiver: HttpOtlpReceiver, pid: int) -> float | None:
    values = [
        point.value
        for point in receiver.points_of("kvcanary.checks")
        if point.resource["process.pid"] == pid and "error.type" not in point.attributes
    ]
    return values[-1] if values else None


def test_a_childs_counters_start_at_zero_and_the_parents_go_on(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    parent, child = fork(
        start_child,
        """
finish_pass(pool, counts=CheckCounts(slots={"token": (5, 0)}))
assert telemetry.flush(10)
""",
    )
    assert slots_checked(receiver, child) == 5
    assert slots_checked(receiver, parent) == 109


def test_a_child_exports_its_own_violations_and_not_its_parents(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    parent, child = fork(
        start_child,
        """
finish_pass(pool, violation(slot=99))
assert telemetry.flush(10)
""",
    )
    slots = [(log.resource["process.pid"], log.attributes["kvcanary.slot"]) for log in receiver.logs]
    assert sorted(slots) == sorted([(parent, 17), (child, 99)])


def test_a_child_that_reports_nothing_exports_nothing_while_its_parent_goes_on(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    program = """
import os
from tests.telemetry.samples import finish_pass, open_pool, violation
telemetry, pool = open_pool()
finish_pass(pool, violation())
child = os.fork()
if child == 0:
    input()
    os._exit(0 if telemetry.flush(10) else 1)
print(child, flush=True)
print(os.waitpid(child, 0)[1], flush=True)
"""
    parent = start_child(program, OTEL_METRIC_EXPORT_INTERVAL="10")
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    before = len(receiver.points)
    assert receiver.wait_for(lambda received: len(received.points) > before + 100)
    out, errors = parent.communicate("\n", timeout=60)
    assert out == "0\n", errors
    received: list[Point | Span | Log] = [*receiver.points, *receiver.spans, *receiver.logs]
    assert {one.resource["process.pid"] for one in received} == {parent.pid}, child


def test_a_child_forked_while_its_parent_exports_does_not_hang(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    program = """
import os, threading
from tests.telemetry.samples import finish_pass, open_pool, violation
telemetry, pool = open_pool()
finish_pass(pool, violation(slot=1))
assert telemetry.flush(10)  # the exporters have imported what they need
stop = threading.Event()
def export():
    while not stop.is_set():
        telemetry.flush(10)
exporting = threading.Thread(target=export)
exporting.start()
for attempt in range(10):
    finish_pass(pool, violation(slot=attempt))
    child = os.fork()
    if child == 0:
        finish_pass(pool, violation(slot=1000 + attempt))
        os._exit(0 if telemetry.flush(20) else 1)
    assert os.waitpid(child, 0)[1] == 0, attempt
stop.set()
exporting.join()
print("done")
"""
    out, errors = start_child(program).communicate(timeout=120)
    assert out == "done\n", errors
    assert len([log for log in receiver.logs if log.attributes["kvcanary.slot"] >= 1000]) == 10


def test_a_host_provider_that_a_child_inherits_reports_the_childs_own_counts(start_child: StartChild) -> None:
    program = """
import os
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from kvcanary_agent.canary.violation import CheckCounts
from tests.telemetry.samples import finish_pass, open_pool

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
telemetry, pool = open_pool()
finish_pass(pool, counts=CheckCounts(slots={"token": (100, 0)}))
if os.fork() == 0:
    finish_pass(pool, counts=CheckCounts(slots={"token": (5, 0)}))
    (of_resource,) = reader.get_metrics_data().resource_metrics
    names = {metric.name: metric for of_scope in of_resource.scope_metrics for metric in of_scope.metrics}
    print([point.value for point in names["kvcanary.checks"].data.data_points], flush=True)
    os._exit(0)
os.wait()
"""
    out, errors = start_child(program).communicate(timeout=60)
    assert out == "[5]\n", errors


def test_a_lock_that_another_thread_holds_and_a_failed_start_stay_in_the_parent(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    program = """
import os, threading
from kvcanary_agent.canary.violation import CheckCounts
from tests.telemetry.samples import finish_pass, open_pool
from kvcanary_agent.telemetry import exporting
real = exporting.Exporting
def refuses(*_): raise OSError("no memory")
exporting.Exporting = refuses
telemetry, pool = open_pool()
exporting.Exporting = real
locked, done = threading.Event(), threading.Event()
def hold():
    with telemetry._lock:
        locked.set()
        done.wait()
threading.Thread(target=hold).start()
locked.wait()
child = os.fork()
if child == 0:
    finish_pass(pool, counts=CheckCounts(slots={"token": (5, 0)}))
    os._exit(0 if telemetry.flush(30) else 1)
_, status = os.waitpid(child, 0)
done.set()
print(child, status)
"""
    out, errors = start_child(program).communicate(timeout=120)
    child, status = out.split()
    assert status == "0", errors
    assert slots_checked(receiver, int(child)) == 5


def test_a_child_never_runs_the_destructors_of_what_its_parent_still_uses(
    receiver: HttpOtlpReceiver, start_child: StartChild
) -> None:
    program = """
import gc, os, weakref
from tests.telemetry.samples import finish_pass, open_pool
telemetry, pool = open_pool()
exporters = weakref.ref(telemetry.exporting())
if os.fork() == 0:
    finish_pass(pool)
    gc.collect()
    print(exporters() is not None and exporters() is not telemetry.exporting(), flush=True)
    os._exit(0)
os.wait()
"""
    out, errors = start_child(program).communicate(timeout=120)
    assert out == "True\n", errors


# The first export imports a module that takes a while, as exporters' libraries do, and tells when it has begun.
SLOW_FIRST_EXPORT = """
import os, sys, threading, time
from tests.telemetry.samples import finish_pass, open_pool, violation
from kvcanary_agent.telemetry.exporting import Exporting

sys.path.insert(0, os.environ["SLOW_MODULE"])
flush, begun = Exporting._flush, threading.Event()
def slow(self, signal):
    begun.set()
    import slow_module
    flush(self, signal)
Exporting._flush = slow
telemetry, pool = open_pool()
finish_pass(pool, violation(slot=1))
assert begun.wait(10)
"""


def test_a_child_forked_in_its_parents_first_export_can_export(
    receiver: HttpOtlpReceiver, start_child: StartChild, tmp_path: Path
) -> None:
    program = f"""{SLOW_FIRST_EXPORT}
child = os.fork()
if child == 0:
    finish_pass(pool, violation(slot=2))
    os._exit(0 if telemetry.flush(10) else 1)
print(os.waitpid(child, 0)[1])
"""
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(0.2)")
    out, errors = start_child(program, SLOW_MODULE=str(tmp_path)).communicate(timeout=60)
    assert out == "0\n", errors
    assert 2 in [log.attributes["kvcanary.slot"] for log in receiver.logs]


def test_a_first_export_that_hangs_holds_up_one_fork_for_half_a_second(start_child: StartChild, tmp_path: Path) -> None:
    program = f"""{SLOW_FIRST_EXPORT}
for attempt in range(5):
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    print(time.monotonic() - start)
os._exit(0)
"""
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(30)")
    out, errors = start_child(program, SLOW_MODULE=str(tmp_path)).communicate(timeout=60)
    assert out, errors
    first, *others = (float(line) for line in out.split())
    assert first >= 0.5
    assert sorted(others)[1] < 0.5
