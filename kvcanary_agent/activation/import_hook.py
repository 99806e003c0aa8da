"""A meta path finder that says when one of a few named modules has been imported, and is invisible otherwise.

`TargetFinder.find_spec` runs under the interpreter's import lock, for every import of the process. So for a name that
is no target it is one look-up, and for none does it import or lock anything: either could deadlock with another thread.

For a target, the spec is the one that the other finders give, with its loader replaced by a `_NotifyingLoader` until
the module executes. From then on neither the module nor its spec holds a trace of it.
"""

import sys
from _frozen_importlib import ModuleSpec, spec_from_loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from types import ModuleType
    from typing import Any

    OnImport = Callable[[str, object], None]


class TargetFinder:
    """Calls ``on_import(name, module)`` each time a module of `targets` was executed, reloads included.

    `module` is what ``import`` hands out: the entry of ``sys.modules``, which a module may have replaced by anything.
    An import succeeds or fails as it does without the finder; what `on_import` raises is logged and dropped.
    """

    def __init__(self, targets: "Container[str]", on_import: "OnImport") -> None:
        self._targets = targets
        self._on_import = on_import

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The meta path protocol: None for a module that is no target, or that no other finder finds."""
        if name not in self._targets:
            return None
        spec = self._find_behind(name, path, target)
        # A namespace package has no loader, and executes nothing.
        if spec is not None and spec.loader is not None:
            _watch(spec, self._on_import)
        return spec

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


def _watch(spec: ModuleSpec, on_import: "OnImport") -> None:
    """Replace the loader of `spec`. A lazy loader keeps its place, and the one that it puts off is replaced."""
    holder: Any = spec
    util = sys.modules.get("importlib.util")
    if util is not None and isinstance(spec.loader, util.LazyLoader):
        holder = spec.loader
    real = holder.loader
    if isinstance(real, _NotifyingLoader):
        return  # a finder that gives out the same spec twice
    if hasattr(real, "exec_module"):
        if hasattr(real, "create_module"):
            holder.loader = _ExecutingLoader(spec, real, on_import)
        # else the import system refuses it, with its own message
    elif hasattr(real, "load_module"):
        holder.loader = _LegacyLoader(spec, real, on_import)


class _NotifyingLoader:
    """Stands in for the real loader from the finding of a module to its execution; all else is the real one's."""

    def __init__(self, spec: "Any", real: "Any", on_import: "OnImport") -> None:
        self._spec = spec
        self._real = real
        self._on_import = on_import

    def __getattr__(self, attribute: str) -> "Any":
        if attribute == "get_code":
            # Whoever asks for the code runs it himself: ``python -m target`` does, and takes the loader from the spec
            # afterwards. What runs then is __main__, not the target.
            self._step_aside()
        return getattr(self._real, attribute)

    def _step_aside(self, module: "Any" = None) -> None:
        if self._spec.loader is self:
            self._spec.loader = self._real
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._real

    def _notify(self, module: object) -> None:
        try:
            self._on_import(self._spec.name, module)
        except (Exception, SystemExit):
            import logging

            logging.getLogger("kvcanary_agent").warning("after the import of %s", self._spec.name, exc_info=True)


class _ExecutingLoader(_NotifyingLoader):
    def create_module(self, spec: "Any") -> "ModuleType | None":
        stands_in = spec.loader is self
        if stands_in:
            spec.loader = self._real  # which may look at it
        try:
            module: ModuleType | None = self._real.create_module(spec)
        finally:
            if stands_in:
                spec.loader = self
        return module

    def exec_module(self, module: "ModuleType") -> None:
        name = self._spec.name
        self._step_aside(module)
        # A spec can also be used to make a private copy, which sys.modules does not know.
        imported = sys.modules.get(name) is module
        self._real.exec_module(module)
        self._notify(sys.modules.get(name, module) if imported else module)


class _LegacyLoader(_NotifyingLoader):
    """For a loader without exec_module(): the import system looks for that method, so it must be absent here too."""

    def load_module(self, name: str) -> object:
        self._step_aside()
        module = self._real.load_module(name)
        module = sys.modules.get(name, module)
        self._step_aside(module)
        self._notify(module)
        return module
