"""Stands in for torchvision: everything in it can be imported, and every name is an empty class."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

__version__ = "0.0.0"


class _AnyAttribute(type):
    """Classes whose every attribute is its own name: enumerations are asked for their members at import."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyAttribute(name, (), {})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = __getattr__


sys.meta_path.append(_Submodules())
