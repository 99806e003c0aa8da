"""What the agent is doing in this process: its canaries, what it covers, and how it fails without harm.

Adapters use this module and `kvcanary_agent.canary`; nothing here knows an engine. Importing it imports torch, which
the engine has imported by then; OpenTelemetry is imported with the first pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kvcanary_agent.activation.patching import Around, owner_of, patch_method, unwrap_method
from kvcanary_agent.canary import AllocatorCanary, AllocatorLayout, Canary, ForwardStep, KVCanaryError, KVLayout, Sink
from kvcanary_agent.canary.condemned import Condemned
from kvcanary_agent.canary.tensor_cache import TensorCaches
from kvcanary_agent.settings import Drill, Settings

if TYPE_CHECKING:
    from kvcanary_agent.canary.violation import Neighbourhood
    from kvcanary_agent.telemetry import Telemetry
    from kvcanary_agent.telemetry.pool_facts import PoolFacts

__all__ = [
    "FailOpen",
    "KVCanaryError",
    "close_canary",
    "condemned_blocks",
    "covered",
    "evicted",
    "not_covered",
    "on_shut_down",
    "open_allocator",
    "open_canary",
    "open_tensor_caches",
    "patch_class",
    "recorded_forward",
    "shut_down",
    "telemetry",
    "unexpected_methods",
    "watched_forward",
]

T = TypeVar("T")

_SHUT_DOWN_TIMEOUT_S = 1.0
_BLOCKS_NAMED = 16

log = logging.getLogger("kvcanary_agent")

_settings: Settings | None = None
_telemetry: Telemetry | None = None
_open: weakref.WeakValueDictionary[str, Canary] = weakref.WeakValueDictionary()
_open_allocators: weakref.WeakValueDictionary[str, AllocatorCanary] = weakref.WeakValueDictionary()
_condemned: weakref.WeakKeyDictionary[Canary, Condemned] = weakref.WeakKeyDictionary()
_shut_down_callbacks: list[Callable[[], None]] = []
_already_said: set[tuple[str, str, str]] = set()
_switched_off: set[str] = set()
"""Engines of whose calls the agent has missed one: what it knows about them is out of date."""


def settings() -> Settings:
    """The settings of this process; a wrong value is one warning and the default."""
    global _settings
    if _settings is None:
        _settings, complaints = Settings.tolerant(os.environ)
        for complaint in complaints:
            log.warning("kvcanary: ignored: %s", complaint)
    return _settings


def telemetry() -> Telemetry:
    """This process's telemetry, made on first use."""
    global _telemetry
    if _telemetry is None:
        from kvcanary_agent.telemetry import Telemetry

        _telemetry = Telemetry(settings())
    return _telemetry


def patch_class(engine: str, cls: type, arounds: Mapping[str, Around]) -> bool:
    """Patch methods of an engine's class, all of them or none; whether they are patched now.

    If one cannot be patched, that is said, and the class stays as it is. Whatever an around does, the engine gets what
    its own method returns or raises, or in raise mode a `KVCanaryError`; the first around that fails is the last that
    runs for this engine.

    Args:
        engine: The engine's name.
        cls: The class; a method that it inherits is patched in the class that owns it.
        arounds: Method name -> what runs instead, see `kvcanary_agent.activation.patching`.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    patched: list[tuple[type, str]] = []
    try:
        for method, around in arounds.items():
            owner = owner_of(cls, method)
            if patch_method(cls, method, _harmless(engine, f"{name}.{method}", around)):
                patched.append((owner, method))
    except Exception as error:
        for owner, method in patched:
            unwrap_method(owner, method)
        telemetry().patched(engine, name, "failed")
        not_covered(engine, name, _described(error))
        return False
    telemetry().patched(engine, name, "patched")
    return True


def unexpected_methods(cls: type, expected: Mapping[str, tuple[str, ...]]) -> str | None:
    """What is missing or different in an engine's class, in words, or None.

    Args:
        cls: The class.
        expected: Method name -> names of its leading parameters after ``self``.
    """
    for name, wanted in expected.items():
        method = getattr(cls, name, None)
        if method is None:
            return f"{cls.__qualname__} has no method {name}"
        found = tuple(inspect.signature(method).parameters)[1:]
        if found[: len(wanted)] != wanted:
            return f"{cls.__qualname__}.{name} takes ({', '.join(found)}), wanted ({', '.join(wanted)}, ...)"
    return None


class _Call:
    """An engine's own method, bound, and what became of calling it."""

    __slots__ = ("error", "method", "result", "returned")

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        self.returned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self.method(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.returned = True
        return self.result


def _harmless(engine: str, method: str, around: Around) -> Around:
    """An around that cannot fail, or change what its method returns."""

    def harmless(method_call: Callable[..., Any], receiver: Any, /, *args: Any, **kwargs: Any) -> Any:
        if engine in _switched_off:
            return method_call(*args, **kwargs)
        call = None
        try:
            call = _Call(method_call)
            around(call, receiver, *args, **kwargs)
        except KVCanaryError:
            raise
        except Exception as error:
            if call is not None and error is call.error:
                raise
            _switch_off(engine, method, _described(error))
        if call is not None and call.returned:
            return call.result
        if call is not None and call.error is not None:
            raise call.error
        _switch_off(engine, method, "it has not called the engine's method")
        return method_call(*args, **kwargs)

    return harmless


def _switch_off(engine: str, method: str, reason: str) -> None:
    if engine not in _switched_off:
        _switched_off.add(engine)
        with contextlib.suppress(Exception):
            not_covered(engine, method, f"the agent is switched off after {reason}")


def open_canary(layout: KVLayout) -> Canary | None:
    """Start to watch a pool.

    Returns:
        The pool's canary, or None if it could not be set up; then that has been reported and the engine goes on
        without.
    """
    try:
        layout = _uniquely_named(layout)
        sink = telemetry().open_pool(
            engine=layout.engine,
            engine_version=layout.engine_version,
            pool=layout.pool,
            rank=layout.rank,
            world_size=layout.world_size,
            facts=_facts(layout),
        )
        canary = _new_canary(layout, sink)
        sink.look_with(_slots_around(canary))
        if settings().on_violation == "evict":
            condemned = _condemned[canary] = Condemned()
            sink.listen(condemned.hear)
        _open[layout.pool] = canary
        # An engine that is dropped without a word takes its canary with it.
        weakref.finalize(canary, sink.close).atexit = False
    except Exception as error:
        not_covered(layout.engine, f"pool {layout.pool}", _described(error))
        return None
    covered(layout.engine, f"pool {layout.pool}")
    with contextlib.suppress(Exception):  # a log handler that raises, a closed standard error
        _announce(layout)
    for subject, reason in layout.not_covered.items():
        not_covered(layout.engine, subject, reason)
    return canary


def _slots_around(canary: Canary) -> Callable[[str, int], Neighbourhood | None]:
    """The canary's own method, which does not keep the canary."""
    method = weakref.WeakMethod(canary.slots_around)

    def slots_around(group: str, block: int) -> Neighbourhood | None:
        look = method()
        return None if look is None else look(group, block)

    return slots_around


def _facts(layout: KVLayout) -> PoolFacts:
    from kvcanary_agent.telemetry.pool_facts import PoolFacts

    return PoolFacts.of(layout)


def open_allocator(layout: AllocatorLayout) -> AllocatorCanary | None:
    """Start to follow an allocator.

    Returns:
        Its canary, or None if it could not be set up; then that has been reported and the engine goes on without.
    """
    try:
        layout = _uniquely_named(layout)
        sink = telemetry().open_pool(
            engine=layout.engine, engine_version=layout.engine_version, pool=layout.pool, rank=0, world_size=1
        )
        canary = AllocatorCanary(layout, settings(), sink)
        _open_allocators[layout.pool] = canary
    except Exception as error:
        not_covered(layout.engine, layout.pool, _described(error))
        return None
    covered(layout.engine, layout.pool)
    return canary


def open_tensor_caches(engine: str, engine_version: str, pool: str) -> TensorCaches | None:
    """Start to watch the caches that an engine makes for each call, all of them under one name.

    Returns:
        What opens each, or None if it could not be set up; then that has been reported and the engine goes on without.
    """
    try:
        sink = telemetry().open_pool(engine=engine, engine_version=engine_version, pool=pool, rank=0, world_size=1)
        caches = _new_tensor_caches(pool, sink)
    except Exception as error:
        not_covered(engine, f"pool {pool}", _described(error))
        return None
    covered(engine, f"pool {pool}")
    with contextlib.suppress(Exception):  # a log handler that raises, a closed standard error
        line = f"kvcanary: watching pool {pool} of {engine} {engine_version}".rstrip()
        _say(logging.INFO, f"{line}: every cache as it comes, mode {settings().mode}, content {settings().content}")
    return caches


def _new_tensor_caches(pool: str, sink: Sink) -> TensorCaches:
    drill = settings().drill
    if drill is None:
        return TensorCaches(pool, settings(), sink)
    from kvcanary_agent.faults.drills import DrillingTensorCaches

    _announce_drill(drill, pool)
    return DrillingTensorCaches(pool, settings(), sink, drill)


Layout = TypeVar("Layout", KVLayout, AllocatorLayout)


def _uniquely_named(layout: Layout) -> Layout:
    name, number = layout.pool, 1
    while layout.pool in _open or layout.pool in _open_allocators:
        number += 1
        layout = dataclasses.replace(layout, pool=f"{name}-{number}")
    return layout


def condemned_blocks(canary: Canary) -> Condemned | None:
    """The blocks of a pool that are to leave the engine's prefix cache; None unless KVCANARY_ON_VIOLATION is evict."""
    return _condemned.get(canary)


def evicted(engine: str, blocks: Sequence[int], counts: Mapping[str, int]) -> None:
    """Log and count what became of corrupt blocks that were to leave an engine's prefix cache.

    Args:
        engine: The engine's name.
        blocks: Those that left it.
        counts: Outcome -> blocks: ``evicted`` (idle, now out of the cache), ``held`` (still used by running requests,
            and out of the cache at once or, in SGLang, when they have ended), ``following`` (out of the cache because
            they were computed from a corrupt one).
    """
    telemetry().evicted(engine, counts)
    if blocks:
        shown = ", ".join(map(str, blocks[:_BLOCKS_NAMED])) + (", ..." if len(blocks) > _BLOCKS_NAMED else "")
        described = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        with contextlib.suppress(Exception):  # a log handler of the server's may raise
            _say(logging.WARNING, f"kvcanary: out of the prefix cache of {engine}: block {shown} ({described})")


def close_canary(canary: Canary) -> None:
    """Stop to watch a pool, and let go of its tensors."""
    _open.pop(canary.layout.pool, None)
    canary.close()


def on_shut_down(callback: Callable[[], None]) -> None:
    """Have an adapter forget its engines when the agent is uninstalled; called once by each adapter."""
    _shut_down_callbacks.append(callback)


def shut_down() -> None:
    """Stop watching every pool, export what is left and end the agent's threads; part of `uninstall`."""
    global _telemetry, _settings
    for callback in _shut_down_callbacks:
        callback()
    for canary in list(_open.values()):
        close_canary(canary)
    _open_allocators.clear()
    ended, _telemetry, _settings = _telemetry, None, None
    _already_said.clear()
    _switched_off.clear()
    if ended is not None:
        ended.shutdown(_SHUT_DOWN_TIMEOUT_S)


def _announce(layout: KVLayout) -> None:
    """Say once for each pool that the agent is on."""
    layers = len({part.layer for group in layout.groups for part in group.parts})
    line = (
        f"kvcanary: watching pool {layout.pool} of {layout.engine} {layout.engine_version}".rstrip()
        + f": {layers} layers, {sum(group.num_slots for group in layout.groups)} slots, mode {settings().mode}, "
        f"content {settings().content}"
    )
    _say(logging.INFO, line)


def _say(level: int, line: str) -> None:
    """Log a line that an operator must not miss; a server whose logging would drop it shows it on standard error."""
    # A warning without any handler goes to standard error by itself.
    if log.isEnabledFor(level) and (log.hasHandlers() or level >= logging.WARNING):
        log.log(level, "%s", line)
    else:
        print(line, file=sys.stderr, flush=True)


def _new_canary(layout: KVLayout, sink: Sink) -> Canary:
    drill = settings().drill
    if drill is None:
        return Canary(layout, settings(), sink)
    from kvcanary_agent.faults.drills import DrillingCanary

    _announce_drill(drill, layout.pool)
    return DrillingCanary(layout, settings(), sink, drill)


def _announce_drill(drill: Drill, pool: str) -> None:
    _say(
        logging.WARNING,
        f"kvcanary: DRILL: KVCANARY_DRILL asks for a {drill.kind} fault from step {drill.step} on in pool "
        f"{pool}; it damages what is served",
    )


def covered(engine: str, subject: str) -> None:
    """Say that the agent covers a part of an engine."""
    telemetry().coverage(engine, subject, True)


def not_covered(engine: str, subject: str, reason: str) -> None:
    """Say once, in the log and in `kvcanary.coverage`, that the agent does not cover a part of an engine, and why."""
    if (engine, subject, reason) in _already_said:
        return
    _already_said.add((engine, subject, reason))
    with contextlib.suppress(Exception):  # a log handler of the server's may raise, and coverage must fall even then
        _say(logging.WARNING, f"kvcanary: not covering {subject} of {engine}: {reason}")
    try:
        telemetry().coverage(engine, subject, False, reason)
    except Exception as error:
        log.warning("kvcanary: cannot report coverage: %s: %s", type(error).__name__, error)


class FailOpen:
    """One part of an adapter, which switches itself off when it fails, instead of harming the engine.

    ``if part.on: with part: ...``: an exception inside is reported once and swallowed, and ``on`` is False from then.
    A violation in raise mode is no failure and passes through; so does what is no `Exception`, an exit or an interrupt:
    it comes from a signal handler of the host that happened to run here.
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
        if not isinstance(error, Exception) or isinstance(error, KVCanaryError):
            return False
        self.on = False
        # The report itself may fail: a log handler of the server, an error that cannot say what it is.
        with contextlib.suppress(Exception):
            log.debug("kvcanary: %s failed", self.subject, exc_info=error)
            not_covered(self.engine, self.subject, f"switched off after {_described(error)}")
        return True


def watched_forward(part: FailOpen, canary: Canary, describe: Callable[[], ForwardStep], forward: Callable[[], T]) -> T:
    """Run one forward pass between the canary's two looks at it; what every adapter's step comes to.

    Args:
        part: What to switch off if the agent fails; to be on.
        canary: Of the pool that the step uses.
        describe: The step; called before the forward.
        forward: The engine's own forward; its result is returned, and what it raises is raised.

    Raises:
        KVCanaryError: In raise mode, if anything is wrong.
    """
    with part:
        canary.before_forward(describe())
    return recorded_forward(part, canary, forward)


def recorded_forward(part: FailOpen, canary: Canary, forward: Callable[[], T]) -> T:
    """Run one forward pass and the canary's second look at it, for an engine whose step is described inside.

    Args:
        part: What to switch off if the agent fails.
        canary: Of the pool that the step uses; its `before_forward` is called within ``forward``, or before.
        forward: The engine's own; its result is returned, and what it raises is raised.

    Raises:
        KVCanaryError: In raise mode, if anything is wrong.
    """
    try:
        result = forward()
    except BaseException:
        with part:
            canary.abandon_step()
        raise
    if part.on:
        with part:
            canary.after_forward()
    return result


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
