"""Hooks: which method of an engine says what, and the arguments of its calls by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kvcanary_agent.activation.patching import owner_of

if TYPE_CHECKING:
    from kvcanary_agent.adapters.api.pools import WatchedPool

Role = Literal["opens", "closes", "before", "after", "forward"]
Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "_kvcanary_hook"
# What a decorated method may ask for beside the arguments of the engine's method.
_RESULT = "result"


class HookError(TypeError):
    """A hook that does not fit the engine's method; the message names both, and what the method takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """What an adapter does at the calls of one method.

    Attributes:
        role: ``opens`` describes the pool that exists after a call; ``closes`` is for a call after which it is gone;
            ``before`` and ``after`` tell of events; ``forward`` describes the step, before the call.
        module, cls, method: Of the engine.
        wants: Names of the arguments that it reads.
        label: Who asks, for messages.
        run: Called with the pool, None for ``opens``, and the call.
    """

    role: Role
    module: str
    cls: str
    method: str
    wants: frozenset[str]
    label: str
    run: Callable[[WatchedPool | None, Call], Any]

    @property
    def place(self) -> str:
        """``Class.method``."""
        return f"{self.cls}.{self.method}"


class Call:
    """One call of an engine's method.

    Attributes:
        receiver: The object, or class, whose method it is.
        result: What it returned, once it has.
    """

    __slots__ = ("_args", "_kwargs", "_places", "receiver", "result")

    def __init__(
        self, places: Mapping[str, Argument], receiver: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._places, self._args, self._kwargs = places, args, kwargs
        self.receiver = receiver
        self.result: Any = None

    def argument(self, name: str) -> Any:
        """The argument of that name, which the hook's `wants` announced, or its default."""
        place = self._places[name]
        if place.index is not None and place.index < len(self._args):
            return self._args[place.index]
        return self._kwargs.get(name, place.default)


@dataclass(frozen=True, slots=True)
class Argument:
    """Where an argument is: at an index, unless it is given by name, or left to its default."""

    index: int | None
    default: Any


def arguments_of(cls: type, method: str, hooks: Iterable[Hook]) -> dict[str, Argument]:
    """Where each argument is that the hooks of a method want.

    Raises:
        HookError: If the method does not take it.
    """
    wanted = [(name, hook) for hook in hooks for name in sorted(hook.wants)]
    if not wanted:
        return {}
    entry = owner_of(cls, method).__dict__[method]
    function = getattr(entry, "__func__", entry)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise HookError(f"{cls.__qualname__}.{method} does not tell the names of its arguments") from None
    if not isinstance(entry, staticmethod):
        parameters = parameters[1:]
    places = {}
    for index, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        at = None if parameter.kind is parameter.KEYWORD_ONLY else index
        default = None if parameter.default is parameter.empty else parameter.default
        places[parameter.name] = Argument(at, default)
    for name, hook in wanted:
        if name not in places:
            takes = ", ".join(str(parameter).partition("=")[0].partition(":")[0] for parameter in parameters)
            raise HookError(f"{hook.label} asks for the argument {name!r}, but {hook.place} takes ({takes})")
    return places


def hook(role: Role, method: str) -> Callable[[Function], Function]:
    """A decorator that makes a method of an adapter a hook.

    Raises:
        HookError: If `method` is not written as ``Class.method`` or ``module:Class.method``.
    """
    module, _, path = method.rpartition(":")
    cls, _, name = path.rpartition(".")
    if not cls or not all(part.isidentifier() for part in path.split(".")):
        raise HookError(f"{method!r} is neither 'Class.method' nor 'module:Class.method'")

    def mark(function: Function) -> Function:
        marks = getattr(function, _MARK, ())
        setattr(function, _MARK, (*marks, (role, module, cls, name)))
        return function

    return mark


def hooks_of(adapter: object, module: str) -> list[Hook]:
    """The hooks that the class of `adapter` defines, for classes of `module` unless they name another."""
    found = []
    for name in dict.fromkeys(name for cls in reversed(type(adapter).__mro__) for name in vars(cls)):
        function = inspect.getattr_static(type(adapter), name)
        for role, other_module, cls, method in getattr(function, _MARK, ()):
            found.append(_decorated(getattr(adapter, name), role, other_module or module, cls, method))
    return found


def _decorated(function: Callable[..., Any], role: Role, module: str, cls: str, method: str) -> Hook:
    label = getattr(function, "__qualname__", repr(function))
    parameters = list(inspect.signature(function).parameters.values())
    leading = ("receiver",) if role == "opens" else ("pool", "receiver")
    if len(parameters) < len(leading):
        raise HookError(f"{label} must take (self, {', '.join(leading)}, ...), and then arguments of {cls}.{method}")
    names = [parameter.name for parameter in parameters[len(leading) :]]
    with_result = role in ("after", "opens", "closes") and _RESULT in names
    wants = tuple(name for name in names if not (with_result and name == _RESULT))

    def run(pool: WatchedPool | None, call: Call) -> Any:
        by_name = {name: call.argument(name) for name in wants}
        if with_result:
            by_name[_RESULT] = call.result
        return function(*(() if pool is None else (pool,)), call.receiver, **by_name)

    return Hook(role=role, module=module, cls=cls, method=method, wants=frozenset(wants), label=label, run=run)
