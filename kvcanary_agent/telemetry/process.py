"""The telemetry of one process."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvcanary_agent.telemetry import semconv
from kvcanary_agent.telemetry.failures import Failures
from kvcanary_agent.telemetry.pool import PoolTelemetry
from kvcanary_agent.telemetry.pool_facts import NOTHING_KNOWN, PoolFacts
from kvcanary_agent.telemetry.status import StatusFile
from kvcanary_agent.telemetry.tallies import PoolKey, Tallies

if TYPE_CHECKING:
    from kvcanary_agent.settings import Settings
    from kvcanary_agent.telemetry.exporting import Exporting

EXIT_TIMEOUT_S = 0.2
"""The longest that exporting the last totals may hold up the end of the process."""

REPORT_TIMEOUT_S = 2.0
"""The end of the process waits for a report to be exported until the report is so old, if that is longer."""

FORK_TIMEOUT_S = 0.5
"""The longest that a fork waits, once in a process, for exporters that are in their first export."""

_inherited: list[Exporting] = []
"""What forked children got from their parents: kept, because destructors would use connections that the parent uses."""


class Telemetry:
    """What this process reports, through the host's OpenTelemetry providers or its own; one for each process.

    Nothing of OpenTelemetry is imported, and no thread started, before :meth:`open_pool`; what is known earlier
    (patches, coverage) is kept and exported from then on. No method raises because of an exporter, waits for one
    (but :meth:`flush` and :meth:`shutdown`, within their bounds), or changes a global provider.

    After a fork the child discards what it inherited, unflushed, and builds its own when its first pool reports. One
    thing cannot be discarded: a module that a thread of the parent was importing at that moment, as exporters do in
    their first export, can never be imported in the child (CPython keeps its lock). So a fork waits for first exports,
    for at most :data:`FORK_TIMEOUT_S`. Where that is not enough the child's exports may hang; its steps do not.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tallies = Tallies()
        self._status = StatusFile(Path(settings.status_dir), self._tallies) if settings.status_dir else None
        self._lock = threading.Lock()
        self._exporting: Exporting | None = None
        self._start_failed = False
        self._forks_wait = True
        self._resource_attributes: dict[str, str | int] = {
            semconv.MODE: str(settings.mode),
            semconv.CONTENT: str(settings.content),
        }
        self._pools: weakref.WeakSet[PoolTelemetry] = weakref.WeakSet()
        self._failures = Failures()
        if self._status is not None:
            atexit.register(self._write_status)
        # Registered before any OpenTelemetry object exists, so that it runs in the child before the SDK's own handlers.
        os.register_at_fork(
            before=_while_alive(self._wait_before_fork), after_in_child=_while_alive(self._start_over_after_fork)
        )

    def open_pool(
        self,
        engine: str,
        engine_version: str,
        pool: str,
        rank: int,
        world_size: int,
        facts: PoolFacts = NOTHING_KNOWN,
    ) -> PoolTelemetry:
        """The sink for the canary of one pool.

        Args:
            engine, engine_version: For example ``"vllm"`` and ``"0.32.0"`` (or ``""``).
            pool: The pool's name, unique within the process.
            rank, world_size: Tensor-parallel rank of this process, and of how many.
            facts: What the pool consists of, for diagnoses and incidents.
        """
        with self._lock:
            self._resource_attributes.update(
                {
                    semconv.ENGINE: engine,
                    semconv.ENGINE_VERSION: engine_version,
                    semconv.RANK: rank,
                    semconv.WORLD_SIZE: world_size,
                }
            )
        handle = PoolTelemetry(self, PoolKey(engine=engine, pool=pool, rank=rank), engine_version, facts)
        self._pools.add(handle)
        handle.start()
        return handle

    def coverage(self, engine: str, subject: str, covered: bool, reason: str = "", *, pool: str = "") -> None:
        """States whether something is checked; exported at once, if a pool is open.

        Args:
            engine: The engine's name.
            subject: A layer, a group, a feature or a class: what the statement is about.
            covered: Whether it is checked.
            reason: Why it is not.
            pool: The pool that the subject belongs to, if it belongs to one.
        """
        self._tallies.coverage[(engine, pool, subject)] = (covered, "" if covered else reason)
        self.status_changed()
        exporting = self._exporting
        if exporting is not None:
            exporting.request_export()

    def patched(self, engine: str, class_name: str, outcome: str) -> None:
        """States what became of patching a class of an engine; a later statement on the same class replaces it."""
        self._tallies.patches[(engine, class_name)] = outcome
        self.status_changed()

    def evicted(self, engine: str, counts: Mapping[str, int]) -> None:
        """Counts blocks that were to leave an engine's prefix cache, by outcome; exported soon, if a pool is open."""
        evictions = self._tallies.evictions
        for outcome, count in counts.items():
            if count:
                evictions[engine, outcome] = evictions.get((engine, outcome), 0) + count
        exporting = self._exporting
        if exporting is not None:
            exporting.request_export()

    def status_changed(self) -> None:
        """Has the status file written soon, if there is one."""
        if self._status is not None:
            self._status.changed()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything reported so far has been exported; False if that takes longer than ``timeout_s``."""
        exporting = self._exporting
        return exporting is None or exporting.flush(timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        """Exports what is left and ends the threads; what is reported later is lost.

        Returns:
            False if that takes longer than ``timeout_s``; it goes on meanwhile.
        """
        atexit.unregister(self._export_at_exit)
        atexit.unregister(self._write_status)
        self._write_status()
        exporting = self._exporting
        return exporting is None or exporting.close(timeout_s)

    @property
    def writes_incidents(self) -> bool:
        return self._settings.incident_dir is not None

    @property
    def tallies(self) -> Tallies:
        """The totals that the instruments observe."""
        return self._tallies

    def exporting(self) -> Exporting:
        """The OpenTelemetry side of this process, built on the first call in it.

        Raises:
            RuntimeError: It cannot be built; it is tried once only.
        """
        with self._lock:
            if self._exporting is not None:
                return self._exporting
            if self._start_failed:
                raise RuntimeError("telemetry could not be started")
            self._start_failed = True
            from kvcanary_agent.telemetry.exporting import Exporting

            self._exporting = Exporting(self._tallies, self._resource_attributes, self._settings)
            self._start_failed = False
            # After the exporters' libraries have registered their exit handlers, so that this one runs before theirs.
            atexit.unregister(self._export_at_exit)
            atexit.register(self._export_at_exit)
            return self._exporting

    @property
    def failures(self) -> Failures:
        """Where the pools' handles log what fails in them."""
        return self._failures

    def _write_status(self) -> None:
        if self._status is not None:
            self._status.write()

    def _export_at_exit(self) -> None:
        if self._exporting is not None:
            self._exporting.finish(EXIT_TIMEOUT_S, REPORT_TIMEOUT_S)

    def _wait_before_fork(self) -> None:
        if self._exporting is not None and self._forks_wait:
            self._forks_wait = self._exporting.wait_for_first_exports(FORK_TIMEOUT_S)

    def _start_over_after_fork(self) -> None:
        # A forked child has one thread here. Locks that other threads held are replaced, not taken.
        self._lock = threading.Lock()
        if self._exporting is not None:
            _inherited.append(self._exporting)
        self._exporting = None
        self._start_failed = False
        self._forks_wait = True
        self._tallies.forget_pools()
        for pool in list(self._pools):
            pool.detach()


def _while_alive(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls a bound method as long as its object exists, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call
