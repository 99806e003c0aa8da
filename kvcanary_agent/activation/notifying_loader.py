"""The loader that stands in for a target's own from the finding of the module to its execution.

From then on neither the module nor its spec holds a trace of it. `kvcanary_agent.TargetFinder` executes this file when
the first target is found, under the import lock: it imports nothing that is not loaded by then.
"""

import sys
from _frozen_importlib import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    OnImport = Callable[[str, object], None]


def watch(spec: ModuleSpec, on_import: "OnImport") -> None:
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
            try:
                import logging

                logging.getLogger("kvcanary_agent").warning("after the import of %s", self._spec.name, exc_info=True)
            except Exception:
                pass  # a log handler of the host may raise


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
