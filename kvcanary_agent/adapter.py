"""Adapters for an engine of one's own: the public API, which the demo engine's adapter uses, too.

An adapter is a class whose decorated methods say what happens at the calls of the engine's methods::

    from kvcanary_agent import adapter as kv

    class MyAdapter(kv.Adapter):
        engine = "my-engine"
        module = "my_engine.runner"

        @kv.opens("Engine.__init__")
        def layout(self, engine):
            return kv.layout(self.engine, k=engine.k, v=engine.v, axes="blocks tokens heads dim")

        @kv.forward("Engine.forward")
        def step(self, pool, engine, batch):
            return kv.step(pool, requests=batch.ids, block_table=batch.tables, token_ids=batch.tokens)

``KVCANARY_ADAPTERS=/path/to/file.py`` or ``module:MyAdapter`` loads it; so does an entry point of the group
``kvcanary_agent.adapters`` whose name is the module that it waits for; or, in the engine's own code, `register`.

Adapters are loaded at the start of each process, and this module imports torch only when one of its names that need it
is used: write ``kv.KVLayout`` inside of methods rather than importing it at the top of the file.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kvcanary_agent.adapters.api.hooks import Argument, Call, Function, Hook, HookError, arguments_of, hook, hooks_of
from kvcanary_agent.adapters.api.pools import Pools, WatchedPool

if TYPE_CHECKING:
    from kvcanary_agent.adapters.api.axes import layout, parts_of
    from kvcanary_agent.adapters.api.steps import step
    from kvcanary_agent.canary import ForwardStep, GroupStep, KnownTokens, KVGroup, KVLayout, KVPart

__all__ = [
    "Adapter",
    "ForwardStep",
    "GroupStep",
    "HookError",
    "KVGroup",
    "KVLayout",
    "KVPart",
    "KnownTokens",
    "WatchedPool",
    "after",
    "before",
    "closes",
    "forward",
    "layout",
    "opens",
    "parts_of",
    "register",
    "step",
]

_LAZY = {
    "layout": "kvcanary_agent.adapters.api.axes",
    "parts_of": "kvcanary_agent.adapters.api.axes",
    "step": "kvcanary_agent.adapters.api.steps",
    **dict.fromkeys(
        ("ForwardStep", "GroupStep", "KnownTokens", "KVGroup", "KVLayout", "KVPart"), "kvcanary_agent.canary"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def opens(method: str) -> Callable[[Function], Function]:
    """After `method` of the engine, the object that it was called on holds a pool.

    The decorated method takes that object and arguments of the call, by their names, and returns the `KVLayout`, or
    None if there is nothing to watch. A second call on the same object replaces the first pool.
    """
    return hook("opens", method)


def closes(method: str) -> Callable[[Function], Function]:
    """After `method` of the engine, the pool that the object holds, or uses, is gone.

    The decorated method takes the pool, the object and arguments; what it does is its own affair.
    """
    return hook("closes", method)


def before(method: str) -> Callable[[Function], Function]:
    """Before `method` of the engine: the decorated method takes the `WatchedPool`, the object and arguments by name."""
    return hook("before", method)


def after(method: str) -> Callable[[Function], Function]:
    """As `before`, but after the call, and ``result``, if it is asked for, is what the call returned."""
    return hook("after", method)


def forward(method: str) -> Callable[[Function], Function]:
    """`method` runs the model. The decorated method takes what `before` gives and returns the step, see `step`.

    It returns None if this call is no step: a warm-up, a capture of graphs.
    """
    return hook("forward", method)


class Adapter:
    """An engine's adapter. Subclasses set `engine` and `module` and have methods decorated with `opens`, `before`, ...

    Attributes:
        engine: Its name in reports.
        module: The module that defines the classes whose methods are hooked; a hook may name another one.
    """

    engine: str = ""
    module: str = ""

    def __init__(self) -> None:
        self._hooks = self.hooks()
        self._patched: set[Hook] = set()
        self._pools = Pools(self._unclear)
        self._follows_uninstall = False
        name = type(self).__name__
        if not self.engine:
            raise HookError(f'{name} has no engine; add engine = "name-in-reports"')
        for each in self._hooks:
            if not each.module:
                raise HookError(f'{each.label}: in which module is {each.cls}? Add module = "package.module" to {name}')
        if not any(each.role == "opens" for each in self._hooks):
            raise HookError(f'{name} opens no pool; decorate the method that describes it: @opens("Class.__init__")')

    def hooks(self) -> list[Hook]:
        """All hooks; by default the decorated methods."""
        return hooks_of(self, self.module)

    def used_by(self, holder: Any) -> Iterable[object]:
        """The objects of the engine that act on the pool of `holder`, beside itself; asked for as the pool opens.

        Needed where a process may have several pools. Without it all calls are about the only one.
        """
        return ()

    @property
    def targets(self) -> tuple[str, ...]:
        """The modules to wait for."""
        return tuple(dict.fromkeys(each.module for each in self._hooks))

    def patch(self, module: Any) -> None:
        """Patch the classes of an imported module. What cannot be patched is said in the log and in coverage."""
        from kvcanary_agent import runtime

        if not self._follows_uninstall:
            runtime.on_shut_down(self._forget)
            self._follows_uninstall = True
        by_class: dict[str, dict[str, list[Hook]]] = {}
        for each in self._hooks:
            if each.module == module.__name__:
                by_class.setdefault(each.cls, {}).setdefault(each.method, []).append(each)
        for name, methods in by_class.items():
            try:
                cls = _class_of(module, name)
                arounds = {}
                for method, hooks in methods.items():
                    if not hasattr(cls, method):
                        raise HookError(f"{hooks[0].label} hooks {name}.{method}, but there is no such method")
                    arounds[method] = self._around(hooks, arguments_of(cls, method, hooks))
            except HookError as error:
                runtime.telemetry().patched(self.engine, f"{module.__name__}.{name}", "failed")
                runtime.not_covered(self.engine, f"{module.__name__}.{name}", str(error))
                continue
            if runtime.patch_class(self.engine, cls, arounds):
                self._patched.update(each for hooks in methods.values() for each in hooks)

    def _around(self, hooks: list[Hook], arguments: Mapping[str, Argument]) -> Callable[..., Any]:
        """What runs instead of a method: all hooks that it has, around one call of it."""
        from kvcanary_agent import runtime

        before, after, opening, closing = (
            [each for each in hooks if each.role == role] for role in ("before", "after", "opens", "closes")
        )
        steps = [each for each in hooks if each.role == "forward"]
        of_a_pool = before or after or closing or steps
        place = hooks[0].place

        def around(method: Callable[..., Any], receiver: Any, /, *args: Any, **kwargs: Any) -> Any:
            call = Call(arguments, receiver, args, kwargs)
            pool = self._pools.of(receiver, place) if of_a_pool else None
            if pool is not None:
                _tell(pool, before, call)
            if pool is None or not steps:
                call.result = method(*args, **kwargs)
            else:
                call.result = _run_step(pool, steps, call, lambda: method(*args, **kwargs))
            if pool is not None:
                _tell(pool, after, call)
            if pool is not None and closing:
                _tell(pool, closing, call)
                self._close(pool.holder)
            for each in opening:
                part = runtime.FailOpen(self.engine, f"the pool of {each.cls}")
                with part:
                    self._open(each, call, part)
                if not part.on:
                    self._pools.missed(receiver)
            return call.result

        return around

    def _open(self, opening: Hook, call: Call, part: Any) -> None:
        from kvcanary_agent import runtime

        holder = call.receiver
        self._close(holder)
        unpatched = [each for each in self._hooks if each not in self._patched]
        if unpatched:
            names = ", ".join(dict.fromkeys(f"{each.module}.{each.place}" for each in unpatched))
            imported = all(each.module in sys.modules for each in unpatched)
            reason = f"{names} {'could not be' if imported else 'is not'} patched, so that its calls would be missed"
            runtime.not_covered(self.engine, part.subject, reason)
            self._pools.missed(holder)
            return
        described = opening.run(None, call)
        if described is None:
            return
        canary = runtime.open_canary(described)
        if canary is None:
            self._pools.missed(holder)
            return
        part.subject = f"pool {canary.layout.pool}"
        try:
            pool = WatchedPool(canary, part, holder)
            self._pools.add(pool, holder, self.used_by(holder))
            self.opened(pool)
        except BaseException:
            self._pools.remove(holder)
            runtime.close_canary(canary)
            raise

    def opened(self, pool: WatchedPool) -> None:
        """A pool is watched from now on; for adapters that keep something for it."""

    def reopen(self, pool: WatchedPool, described: KVLayout) -> None:
        """The pool's buffers are others: watch those from now on. Nothing counts as written, or as handed out.

        Raises:
            RuntimeError: If they cannot be watched, which has been reported by then.
        """
        from kvcanary_agent import runtime

        runtime.close_canary(pool.canary)
        canary = runtime.open_canary(described)
        if canary is None:
            raise RuntimeError("its buffers were allocated anew, and cannot be watched where they are")
        pool.canary = canary

    def _close(self, holder: object) -> None:
        from kvcanary_agent import runtime

        pool = self._pools.remove(holder)
        if pool is not None:
            runtime.close_canary(pool.canary)
            logging.getLogger("kvcanary_agent").info("kvcanary: %s of %s is closed", pool.part.subject, self.engine)

    def _unclear(self, method: str, reason: str) -> None:
        from kvcanary_agent import runtime

        runtime.not_covered(self.engine, method, reason)

    def _forget(self) -> None:
        self._pools.clear()
        self._patched.clear()


def _tell(pool: WatchedPool, hooks: list[Hook], call: Call) -> None:
    for each in hooks:
        if pool.part.on:
            with pool.part:
                each.run(pool, call)


def _run_step(pool: WatchedPool, steps: list[Hook], call: Call, run: Callable[[], Any]) -> Any:
    from kvcanary_agent import runtime

    described = None
    if pool.part.on and not pool.in_step:
        with pool.part:
            described = steps[0].run(pool, call)
    if described is None:
        return run()
    found = described
    pool.in_step = True
    try:
        return runtime.watched_forward(pool.part, pool.canary, lambda: found, run)
    finally:
        pool.in_step = False
        pool.notes.clear()


def _class_of(module: Any, path: str) -> type:
    found = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, type):
        what = f"is a {type(found).__name__}" if found is not None else "is not there"
        raise HookError(f"{module.__name__} was to define a class {path}, which {what}")
    return found


AdapterClass = TypeVar("AdapterClass", bound="type[Adapter]")


def register(cls: AdapterClass) -> AdapterClass:
    """A class decorator: use this adapter in this process, whenever the agent is on in it.

    For an adapter that stands in the engine's own code; below the classes that it hooks, if it is in their module. What
    is wrong with it is one warning.
    """
    from kvcanary_agent.activation.adapter_loading import use

    use(cls)
    return cls
