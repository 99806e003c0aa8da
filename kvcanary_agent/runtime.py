"""What the agent is doing in this process: its canaries, what it covers, and how it fails without harm.

Adapters use this module and `kvcanary_agent.canary`; nothing here knows an engine. Importing it imports torch, which
the engine has imported by then; OpenTelemetry is imported with the first pool.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from kvcanary_agent.activation.patching import Around, patch_method
from kvcanary_agent.canary import Canary, KVCanaryError, KVLayout, Sink
from kvcanary_agent.settings import Settings

if TYPE_CHECKING:
    from kvcanary_agent.telemetry import Telemetry

__all__ = ["FailOpen", "KVCanaryError", "covered", "not_covered", "open_canary", "patch_class", "telemetry"]

log = logging.getLogger("kvcanary_agent")

_settings: Settings | None = None
_telemetry: Telemetry | None = None
_already_said: set[tuple[str, str, str]] = set()


def settings() -> Settings:
    """The settings of this process; a wrong value is one warning and the default."""
    global _settings
    if _settings is None:
        _settings, complaints = Settings.tolerant(os.environ)
        for complaint in complaints:
            log.warning("kvcanary: %s", complaint)
    return _settings


def telemetry() -> Telemetry:
    """This process's telemetry, made on first use."""
    global _telemetry
    if _telemetry is None:
        from kvcanary_agent.telemetry import Telemetry

        _telemetry = Telemetry(settings())
    return _telemetry


def patch_class(engine: str, cls: type, arounds: Mapping[str, Around]) -> bool:
    """Patch methods of an engine's class, or, if one of them cannot be patched, say so; whether all are patched.

    Args:
        engine: The engine's name.
        cls: The class; a method that it inherits is patched in the class that owns it.
        arounds: Method name -> what runs instead, see `kvcanary_agent.activation.patching`.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        for method, around in arounds.items():
            patch_method(cls, method, around)
    except (AttributeError, TypeError, RuntimeError) as error:
        telemetry().patched(engine, name, "failed")
        not_covered(engine, name, str(error))
        return False
    telemetry().patched(engine, name, "patched")
    return True


def open_canary(layout: KVLayout) -> Canary | None:
    """Start to watch a pool.

    Returns:
        The pool's canary, or None if it could not be set up; then that has been reported and the engine goes on
        without.
    """
    try:
        sink = telemetry().open_pool(
            engine=layout.engine,
            engine_version=layout.engine_version,
            pool=layout.pool,
            rank=layout.rank,
            world_size=layout.world_size,
        )
        canary = _new_canary(layout, sink)
    except Exception as error:
        not_covered(layout.engine, f"pool {layout.pool}", f"{type(error).__name__}: {error}")
        return None
    covered(layout.engine, f"pool {layout.pool}")
    for subject, reason in layout.not_covered.items():
        not_covered(layout.engine, subject, reason)
    return canary


def _new_canary(layout: KVLayout, sink: Sink) -> Canary:
    drill = settings().drill
    if drill is None:
        return Canary(layout, settings(), sink)
    from kvcanary_agent.faults.drills import DrillingCanary

    log.warning(
        "kvcanary: DRILL: KVCANARY_DRILL asks for a %s fault from step %d on in pool %s; it damages what is served",
        *(drill.kind, drill.step, layout.pool),
    )
    return DrillingCanary(layout, settings(), sink, drill)


def covered(engine: str, subject: str) -> None:
    """Say that the agent covers a part of an engine."""
    telemetry().coverage(engine, subject, True)


def not_covered(engine: str, subject: str, reason: str) -> None:
    """Say once, in the log and in `kvcanary.coverage`, that the agent does not cover a part of an engine, and why."""
    if (engine, subject, reason) in _already_said:
        return
    _already_said.add((engine, subject, reason))
    log.warning("kvcanary: not covering %s of %s: %s", subject, engine, reason)
    try:
        telemetry().coverage(engine, subject, False, reason)
    except Exception as error:
        log.warning("kvcanary: cannot report coverage: %s: %s", type(error).__name__, error)


class FailOpen:
    """One part of an adapter, which switches itself off when it fails, instead of harming the engine.

    ``if part.on: with part: ...``: an exception inside is reported once and swallowed, and ``on`` is False from then.
    A violation in raise mode is no failure and passes through.
    """

    def __init__(self, engine: str, subject: str) -> None:
        self.engine = engine
        self.subject = subject
        self.on = True

    def __enter__(self) -> FailOpen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, KVCanaryError) or not isinstance(error, Exception):
            return False
        self.on = False
        log.debug("kvcanary: %s failed", self.subject, exc_info=error)
        not_covered(self.engine, self.subject, f"switched off after {type(error).__name__}: {error}")
        return True
