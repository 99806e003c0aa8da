"""Bring an adapter and the module it patches together, and never let a failure of that reach the server.

An adapter is an object with ``patch(module)`` and, if it is a user's own, ``targets``: the names of the modules that it
is to be called for. A module or file is one, if it has these, or holds subclasses of `kvcanary_agent.adapter.Adapter`:
of each, one instance is made. ``KVCANARY_ADAPTERS`` lists the adapters to use; unset, it is every built-in one, and
those of the entry points that `kvcanary_agent.activation.entry_points` reads. Adapters that the program itself
registers (`use`) are used in either case. The entries of the variable are parsed by `kvcanary_agent.settings`:

- ``vllm``: a built-in adapter, by the name of its module in ``kvcanary_agent.adapters``;
- ``/path/to/adapter.py`` or ``./adapter.py``: a file. A relative path counts from the working directory of the process
  that loads it (the launcher makes it absolute). The leading ``./`` is required, so that no file of the working
  directory is executed for having the name of something else;
- ``/path/to/engine.toml``: a table, see `kvcanary_agent.adapters.declared`;
- ``package.module:attribute``: imported as any module is, when the agent is installed, but not from the working
  directory: there, only what is named as a file is executed.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from kvcanary_agent.settings import Settings

_log = logging.getLogger("kvcanary_agent")


def warn(message: str) -> None:
    """One line in the server's own log; never raises, not even because of the server's handlers."""
    with contextlib.suppress(Exception):
        _log.warning("kvcanary: %s", message)


def chosen_adapters(builtin: Mapping[str, list[object]], environ: Mapping[str, str]) -> dict[str, list[object]]:
    """For each target module the adapters that ``KVCANARY_ADAPTERS`` asks for.

    `builtin` has them all: target module -> names of adapter modules. An adapter that cannot be loaded is one warning.
    """
    chosen: dict[str, list[object]] = {}
    settings, messages = Settings.tolerant({"KVCANARY_ADAPTERS": environ["KVCANARY_ADAPTERS"]})
    for message in messages:
        warn(message)
    if not settings.adapters:
        return dict(builtin)
    for entry in settings.adapters:
        if entry.endswith((".py", ".toml")) or ":" in entry:
            try:
                found = [(target, adapter) for adapter in load(entry) for target in _targets_of(adapter)]
            except (Exception, SystemExit) as error:
                warn(f"the adapter {entry} of KVCANARY_ADAPTERS cannot be loaded: {_describe(error)}")
                continue
            for target, adapter in found:
                chosen.setdefault(target, []).append(adapter)
        else:
            for target, modules in builtin.items():
                if f"kvcanary_agent.adapters.{entry}" in modules:
                    chosen.setdefault(target, []).append(f"kvcanary_agent.adapters.{entry}")
    return chosen


def load(entry: str) -> list[object]:
    """The adapters of a file, a table or an attribute of a module. Raises whatever loading it raises."""
    if entry.endswith(".toml"):
        from kvcanary_agent.adapters.declared.declared_adapter import declared_adapter

        return [declared_adapter(os.path.realpath(entry))]
    return _adapters_in(_load_file(entry) if entry.endswith(".py") else _load_attribute(entry))


def use(cls: type) -> None:
    """Have the agent, if it is or will be on in this process, use an adapter that the program itself defines."""
    try:
        (adapter,) = _adapters_in(cls)
        targets = _targets_of(adapter)
    except (Exception, SystemExit) as error:
        warn(f"the adapter {cls.__qualname__} is not used: {_describe(error)}")
        return
    import kvcanary_agent

    _registered.append((adapter, targets))
    kvcanary_agent.add_adapters({target: [adapter] for target in targets})


_registered: list[tuple[object, list[str]]] = []


def registered() -> dict[str, list[object]]:
    """For each target module the adapters of `use`."""
    chosen: dict[str, list[object]] = {}
    for adapter, targets in _registered:
        for target in targets:
            chosen.setdefault(target, []).append(adapter)
    return chosen


def attach(module: object, name: str, adapters: Iterable[object]) -> None:
    """Have each adapter patch the imported `module`.

    A built-in adapter is given by the name of its own module, one of an entry point as ``module:attribute``.
    """
    for adapter in adapters:
        _attach_one(module, name, adapter)


def attach_imported(name: str, adapters: Iterable[object]) -> None:
    """The same for a module that was in ``sys.modules`` before the hook; one in the making is waited for."""
    if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
        try:
            importlib.import_module(name)  # waits for the thread that imports it
        except Exception:
            return  # that import's own failure, reported where it belongs
    module = sys.modules.get(name)
    if module is not None:
        attach(module, name, adapters)


def _attach_one(module: object, name: str, adapter: Any) -> None:
    try:
        patchers: list[Any] = [adapter]
        if isinstance(adapter, str):
            patchers = _adapters_in(_load_attribute(adapter) if ":" in adapter else importlib.import_module(adapter))
        for patcher in patchers:
            patcher.patch(module)
    except (Exception, SystemExit) as error:
        label = adapter if isinstance(adapter, str) else getattr(adapter, "__name__", repr(adapter))
        warn(f"{label} did not patch {name}, which goes on without it: {_describe(error)}")
        _log.debug("traceback of the above", exc_info=True)


def _adapters_in(found: Any) -> list[object]:
    """The adapters that a module holds, or a class stands for, or the object that is one itself."""
    if isinstance(found, type):
        # One instance, however often it is asked for: it knows which pools it watches.
        if "_kvcanary_adapter" not in vars(found):
            found._kvcanary_adapter = found()  # type: ignore[attr-defined]
        return [vars(found)["_kvcanary_adapter"]]
    base = getattr(sys.modules.get("kvcanary_agent.adapter"), "Adapter", None)
    if base is None or not isinstance(found, ModuleType) or hasattr(found, "patch"):
        return [found]
    own = [
        value
        for value in vars(found).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == found.__name__
    ]
    return [adapter for cls in own for adapter in _adapters_in(cls)] or [found]


def _load_file(entry: str) -> object:
    path = os.path.realpath(entry)
    # Not a name that any import statement can ask for.
    name = f"kvcanary_agent adapter {path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_attribute(entry: str) -> object:
    module_name, _, attribute = entry.partition(":")
    top = module_name.partition(".")[0]
    if top not in sys.modules:
        spec = importlib.util.find_spec(top)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        if any(place and os.path.realpath(os.path.dirname(place)) == os.getcwd() for place in places):
            raise ImportError(f"{top} lies in the working directory; name it as a file, ./{top}.py, or install it")
    found: object = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _targets_of(adapter: object) -> list[str]:
    targets = getattr(adapter, "targets", None)
    if not callable(getattr(adapter, "patch", None)):
        raise TypeError("it has no function patch(module), and no subclass of kvcanary_agent.adapter.Adapter")
    if targets is None:
        raise TypeError("it has no targets; add targets = [...], the names of the modules that it patches")
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        raise TypeError(f"its targets must be an iterable of module names, not {targets!r}")
    return [str(target) for target in targets]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
