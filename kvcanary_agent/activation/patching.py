"""Wrap methods of an engine's classes in place, and put the very same objects back.

An *around* is what runs instead of a patched method: ``around(call, self, *args, **kwargs)``, where ``call(*args,
**kwargs)`` runs the original on ``self`` and whose return value is the caller's. For a class method the second argument
is the class, for a static method the class that was patched. Declare both positional-only, so that a keyword argument
of the same name reaches the method: ``def around(call, self, /, *args, **kwargs)``. An exception that an around raises
reaches the engine: an around that must not take the server down catches its own.

A wrapper lives in the ``__dict__`` of the class that owns the method, so every instance, subclass and bound method sees
it, including those made before. It passes straight through to the original

- while ``torch.compile`` or ``torch.export`` traces the method, so that it adds nothing to the graph;
- while an around of the same method name runs for the same object in the same thread: an override that calls
  ``super()``, or a method that calls itself, is one call;
- after the patch was taken back while another tool's wrapper held on to it.

The table of patches is process-wide, because classes are. Adapters use `patch_method`, which may be repeated and which
`restore_all` undoes; `wrap_method`, `unwrap_method` and `is_wrapped` are the strict operations beneath it.
"""

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

Around = Callable[..., Any]


class _Patch:
    """One wrapper. Lives as long as the wrapper does, so that a class that was reloaded away is not kept alive."""

    __slots__ = ("__weakref__", "around", "name", "original", "owner", "wrapper")

    def __init__(self, owner: type, name: str, original: Any, around: Around) -> None:
        self.owner = owner
        self.name = name
        self.original = original
        """The entry of the owner's ``__dict__`` that the wrapper replaces: a function, a descriptor, any callable."""
        self.around: Around | None = around
        """None once the patch was taken back: the wrapper then passes straight through."""
        self.wrapper: Any = None
        """The entry that replaces `original`; set once, after the wrapper was built around this patch."""


class _Running(threading.local):
    """The calls of this thread that are inside an around, as (id of the object, method name)."""

    def __init__(self) -> None:
        self.calls: set[tuple[int, str]] = set()


_patches: weakref.WeakSet[_Patch] = weakref.WeakSet()
_lock = threading.RLock()
_running = _Running()


def wrap_method(owner: type, name: str, around: Around) -> None:
    """Replace the method `name` in the ``__dict__`` of `owner` by a wrapper that calls `around`.

    Raises
        AttributeError: `owner` has no such method, or only inherits it.
        RuntimeError: it is wrapped already; wrappers stacked by accident see each call, and each result, twice.
        TypeError: the entry cannot be wrapped (a property, a nested class, a coroutine or generator function), or the
            class does not let its attributes be replaced.
    """
    with _lock:
        original = _own_entry(owner, name)
        patch = _find(owner, name)
        if patch is not None:
            if patch.around is not None:
                raise RuntimeError(
                    f"{_label(owner, name)} is wrapped already; unwrap_method() first, or use patch_method(), "
                    "which may be repeated"
                )
            # Another tool's wrapper kept ours when it was taken back: it starts to work again where it is.
            patch.around = around
            return
        patch = _Patch(owner, name, original, around)
        patch.wrapper = _build_wrapper(patch)
        if not (callable(around) and callable(getattr(patch.wrapper, "__func__", patch.wrapper))):
            raise TypeError(f"{_label(owner, name)} would be replaced by what cannot be called: {around!r}")
        _replace(owner, name, original, patch.wrapper)
        _patches.add(patch)


def unwrap_method(owner: type, name: str) -> None:
    """Put the original object of a wrapped method back.

    Raises RuntimeError when the method is not wrapped, and when another tool has replaced the wrapper since: then its
    replacement stays where it is, and ours, if it is beneath, passes straight through from now on.
    """
    with _lock:
        patch = _find(owner, name)
        if patch is None:
            raise RuntimeError(f"{_label(owner, name)} is not wrapped")
        patch.around = None
        current = owner.__dict__.get(name)
        if current is not patch.wrapper:
            raise RuntimeError(
                f"{_label(owner, name)} was wrapped again by {_wrapped_by(current)}; its wrapper is left in place, and "
                "the one beneath it passes straight through"
            )
        _replace(owner, name, current, patch.original)
        _patches.discard(patch)


def is_wrapped(owner: type, name: str) -> bool:
    """Whether the entry of `owner` itself, not of a base class, is wrapped and its around in force."""
    with _lock:
        patch = _find(owner, name)
        return patch is not None and patch.around is not None


def owner_of(cls: type, name: str) -> type:
    """The class along the method resolution order of `cls` whose ``__dict__`` holds `name`. AttributeError if none."""
    for owner in cls.__mro__:
        if name in owner.__dict__:
            return owner
    raise AttributeError(
        f"{_label(cls, name)} does not exist; this version of {cls.__module__} is not the one expected"
    )


def patch_method(cls: type, name: str, around: Around) -> bool:
    """Wrap the method `name` where `cls` gets it from: in the class that owns it, once, however many inherit it.

    Returns False, and changes nothing, when the owning class is patched already. Raises as `wrap_method` does.
    """
    with _lock:
        owner = owner_of(cls, name)
        if is_wrapped(owner, name):
            return False
        wrap_method(owner, name, around)
        return True


def restore_all() -> list[str]:
    """Unwrap every method, and return one sentence for each whose wrapper had to be left in place."""
    left = []
    with _lock:
        for patch in list(_patches):
            if _find(patch.owner, patch.name) is not patch:
                continue
            try:
                unwrap_method(patch.owner, patch.name)
            except (RuntimeError, TypeError) as error:
                left.append(str(error))
    return left


def _find(owner: type, name: str) -> _Patch | None:
    """The patch of this entry. One whose original object somebody else put back is over, and is forgotten here."""
    for patch in list(_patches):
        if patch.owner is owner and patch.name == name:
            if owner.__dict__.get(name) is not patch.original:
                return patch
            patch.around = None
            _patches.discard(patch)
    return None


def _own_entry(owner: type, name: str) -> Any:
    try:
        return owner.__dict__[name]
    except KeyError:
        inherited = next((base for base in owner.__mro__ if name in base.__dict__), None)
        reason = (
            f"does not exist; this version of {owner.__module__} is not the one expected"
            if inherited is None
            else f"is inherited from {_label(inherited, name)}: wrap it there, or use patch_method()"
        )
        raise AttributeError(f"{_label(owner, name)} {reason}") from None


def _replace(owner: type, name: str, old: Any, new: Any) -> None:
    """Set the entry, and make sure that it is what the class now holds: a metaclass may refuse, alter or ignore it."""
    try:
        setattr(owner, name, new)
        reason = "the class stored something else"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    found = owner.__dict__.get(name)
    if found is new:
        return
    if found is not old:
        setattr(owner, name, old)
    raise TypeError(f"{_label(owner, name)} cannot be replaced: {reason}")


def _build_wrapper(patch: _Patch) -> Any:
    entry, where = patch.original, _label(patch.owner, patch.name)
    if isinstance(entry, (staticmethod, classmethod)):
        function = entry.__func__
        _require_plain(function, where)
        kind: Any = type(entry)
        if isinstance(entry, staticmethod):
            return kind(_static_wrapper(patch, function))
        return kind(_method_wrapper(patch, function))
    _require_plain(entry, where)
    if isinstance(entry, FunctionType):
        return _method_wrapper(patch, entry)
    # From 3.13 on a partial has a __get__ too, which still does not bind.
    if isinstance(entry, functools.partial) or not hasattr(type(entry), "__get__"):
        raise TypeError(f"{where} is a {type(entry).__name__} that does not bind to instances, not a method")
    return _method_wrapper(patch, _unbound(entry))


def _require_plain(function: Any, where: str) -> None:
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{where} is a {type(function).__name__}, not a method")
    for is_kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        if is_kind(function):
            raise TypeError(
                f"{where} is a {is_kind.__name__.removeprefix('is')}: calling it only makes the object that runs it "
                "later, outside the around; patch a plain method that it calls"
            )


def _unbound(descriptor: Any) -> Callable[..., Any]:
    """A function of (self, ...) for a callable that binds in its own way: another tool's proxy, a Cython method."""

    @functools.wraps(descriptor)
    def unbound(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return descriptor.__get__(self, type(self))(*args, **kwargs)

    return unbound


def _method_wrapper(patch: _Patch, function: Callable[..., Any]) -> Callable[..., Any]:
    name, running = patch.name, _running

    @functools.wraps(function)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return function(self, *args, **kwargs)
        around, calls, this_call = patch.around, running.calls, (id(self), name)
        if around is None or this_call in calls:
            return function(self, *args, **kwargs)
        calls.add(this_call)
        try:
            return around(MethodType(function, self), self, *args, **kwargs)
        finally:
            calls.discard(this_call)

    return wrapper


def _static_wrapper(patch: _Patch, function: Callable[..., Any]) -> Callable[..., Any]:
    owner, running = patch.owner, _running
    # There is no object to tell calls apart by; overrides of one static method share the class that introduced it.
    introduced_by = next(base for base in reversed(owner.__mro__) if patch.name in base.__dict__)
    this_call = (id(introduced_by), patch.name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return function(*args, **kwargs)
        around, calls = patch.around, running.calls
        if around is None or this_call in calls:
            return function(*args, **kwargs)
        calls.add(this_call)
        try:
            return around(function, owner, *args, **kwargs)
        finally:
            calls.discard(this_call)

    return wrapper


def _is_compiling() -> bool:
    # torch folds is_compiling() to a constant while it traces. Looked up anew each time: a class may be patched before
    # torch is imported, or while another thread is in the middle of that, and this package does not import it.
    is_compiling = getattr(sys.modules.get("torch.compiler"), "is_compiling", None)
    return is_compiling is not None and is_compiling()


def _wrapped_by(entry: Any) -> str:
    """Name the tool whose wrapper is outermost; SGLang's canary, for one, leaves its name on the function."""
    function = getattr(entry, "__func__", entry)
    code = getattr(function, "__code__", None)
    mark = getattr(function, "_kv_canary_wrapped_by", None)
    if mark is not None:
        return str(mark)
    return f"code in {code.co_filename}" if code is not None else f"a {type(entry).__name__}"


def _label(owner: type, name: str) -> str:
    return f"{owner.__module__}.{owner.__qualname__}.{name}"
