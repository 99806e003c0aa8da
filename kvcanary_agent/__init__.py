"""Integrity checks for the KV caches of LLM servers, put in from outside.

This file is the bootstrap: all that is loaded at the start of an instrumented Python process, where every module costs
some 0.1 ms. So it imports nothing that the interpreter has not loaded by then; `kvcanary_agent.activation` follows when
an engine turns up, or is there already.
"""

import sys
from _frozen_importlib import ModuleSpec, spec_from_loader
from _frozen_importlib_external import SourceFileLoader
from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from types import ModuleType
    from typing import Any

__version__ = "0.1.0"

# Python looks for the last two in every process.
_PYTHONS_OWN = sys.stdlib_module_names | {"sitecustomize", "usercustomize"}

_installing = allocate_lock()
_finder: "TargetFinder | None" = None
_adapters: "dict[str, list[object]]" = {}


def install() -> None:
    """Patch the engines that this process has imported, and those that it will import.

    The explicit door, beside ``python -m kvcanary_agent run`` and the environment variables: it works whether or not
    ``KVCANARY_ENABLED`` is set. It can be reached several times in one process: from sitecustomize, from the program,
    from an engine's plugin entry point. Only the first does anything, until `uninstall`. It does not raise: where the
    agent cannot start, that is one line on standard error.
    """
    try:
        _install()
    except (Exception, SystemExit) as error:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _finder]
        complain(f"not active in this process: {type(error).__name__}: {error}")


def _install() -> None:
    global _finder, _adapters
    import os

    adapters: dict[str, list[object]] = {}
    chosen: dict[str, list[object]] = {name: [module] for name, module in builtin_targets().items()}

    def on_import(name: str, module: object) -> None:
        from kvcanary_agent.activation.adapter_loading import attach

        attach(module, name, adapters[name])

    # The hook goes in before its targets are known, so that an adapter that calls install() as it is loaded finds it.
    with _installing:
        if _finder is not None and _finder in sys.meta_path:
            return
        _finder, _adapters = TargetFinder(adapters, on_import), adapters
        sys.meta_path.insert(0, _finder)
    if os.environ.get("KVCANARY_ADAPTERS", "").strip():
        from kvcanary_agent.activation.adapter_loading import chosen_adapters

        chosen = chosen_adapters(chosen, os.environ)
    elif "torch" in sys.modules:
        # An engine may have been imported already.
        for name, wanted in entry_point_adapters().items():
            chosen.setdefault(name, []).extend(wanted)
    else:
        _finder.before_installed_packages(lambda: _extend(adapters, entry_point_adapters()))
    add_adapters(chosen)
    loading = sys.modules.get("kvcanary_agent.activation.adapter_loading")
    if loading is not None:
        add_adapters(loading.registered())


def add_adapters(chosen: "dict[str, list[object]]") -> None:
    """Use more adapters, if the agent is on: for each module the objects or names that adapter_loading attaches."""
    if _finder is None or _finder not in sys.meta_path:
        return
    # What another thread imports meanwhile is found by the hook, or by the loop, or by both.
    _extend(_adapters, chosen)
    for name in chosen:
        if name in sys.modules:
            from kvcanary_agent.activation.adapter_loading import attach_imported

            attach_imported(name, chosen[name])


def _extend(adapters: "dict[str, list[object]]", more: "dict[str, list[object]]") -> None:
    for name, wanted in more.items():
        adapters[name] = [*adapters.get(name, ()), *wanted]


def uninstall() -> None:
    """Take everything back: engines get their own function objects again, and no further module is patched.

    The environment stays as it is, so processes started later are instrumented as before.
    """
    global _finder
    if _finder is None:
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _finder]
    _finder = None
    # Not imported, nothing patched: do not load it for this.
    if "kvcanary_agent.activation.patching" in sys.modules:
        from kvcanary_agent.activation.adapter_loading import warn
        from kvcanary_agent.activation.patching import restore_all

        for left in restore_all():
            warn(left)
    runtime = sys.modules.get("kvcanary_agent.runtime")
    if runtime is not None:
        runtime.shut_down()


class TargetFinder:
    """A meta path finder that says when one of a few named modules was imported, and is invisible otherwise.

    It calls ``on_import(name, module)`` each time a module of `targets` was executed, reloads included. `module` is
    what ``import`` hands out: the entry of ``sys.modules``, which a module may have replaced by anything. An import
    succeeds or fails as it does without the finder; what fails in the finder itself is one line, and not watched.

    `find_spec` runs under the interpreter's import lock, for every import of the process. So for a name that is no
    target it is one look-up, and for none does it import or lock anything: either could deadlock with another thread.
    """

    def __init__(self, targets: "Container[str]", on_import: "Callable[[str, object], None]") -> None:
        self._targets = targets
        self._on_import = on_import
        self._watch: Any = None
        self._add_more: Callable[[], None] | None = None

    def before_installed_packages(self, add_more: "Callable[[], None]") -> None:
        """Have `add_more` extend the targets before the first module is imported that does not belong to Python.

        A process that never imports one does not pay for the search.
        """
        self._add_more = add_more

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The meta path protocol: None for a module that is no target, or that no other finder finds."""
        if self._add_more is not None and name.partition(".")[0] not in _PYTHONS_OWN:
            self._ask_for_more()
        if name not in self._targets:
            return None
        spec = self._find_behind(name, path, target)
        # A namespace package has no loader, and executes nothing.
        if spec is not None and spec.loader is not None:
            try:
                if self._watch is None:
                    self._watch = execute("activation/notifying_loader.py").watch
                self._watch(spec, self._on_import)
            except Exception as error:
                complain(f"{name} is not watched: {type(error).__name__}: {error}")
        return spec

    def _ask_for_more(self) -> None:
        add_more, self._add_more = self._add_more, None
        try:
            if add_more is not None:
                add_more()
        except Exception as error:
            complain(f"entry points of adapters are not read: {type(error).__name__}: {error}")

    def _find_behind(self, name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "ModuleSpec | None":
        """Ask the finders after this one, or all of them if it was taken off the list; those before it were asked."""
        finders: list[Any] = list(sys.meta_path)
        position = next((index for index, finder in enumerate(finders) if finder is self), -1)
        for finder in finders[position + 1 :]:
            if hasattr(finder, "find_spec"):
                spec: ModuleSpec | None = finder.find_spec(name, path, target)
            elif sys.version_info < (3, 12):  # these still ask a finder that has only the older method
                loader = finder.find_module(name, path)
                spec = None if loader is None else spec_from_loader(name, loader)
            else:
                continue
            if spec is not None:
                return spec
        return None


def builtin_targets() -> "dict[str, str]":
    """Each target module, and the adapter module that patches it: the table in ``adapters/targets.py``."""
    targets: dict[str, str] = execute("adapters/targets.py").BUILTIN
    return targets


def entry_point_adapters() -> "dict[str, list[object]]":
    """Each target module, and the adapters that installed packages have for it: see activation/entry_points.py."""
    adapters: dict[str, list[object]] = execute("activation/entry_points.py").adapters(sys.path)
    return adapters


def execute(file: str) -> "Any":
    """What a file of this package defines, executed apart from the import system, its search and its locks."""
    name = f"{__name__}.{file[:-3].replace('/', '.')}"
    module: Any = type(sys)(name)
    module.__file__ = f"{__path__[0]}/{file}"
    code = SourceFileLoader(name, module.__file__).get_code(name)
    assert code is not None, f"{file} is Python source"
    exec(code, module.__dict__)
    return module


def complain(reason: str) -> None:
    """One line on standard error, where the log cannot be had: whoever comes here may hold the import lock."""
    try:
        sys.stderr.write(f"kvcanary-agent: {reason}\n")
        sys.stderr.flush()
    except Exception:
        pass  # standard error is closed
