"""Stands in for the CUDA package ``sgl_kernel``: everything in it can be imported, nothing can be called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

__version__ = "0.4.10"


class _Missing:
    """Any name of the package, and any attribute of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        return _missing(f"{self._name}.{name}", name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self._name} is a CUDA kernel: there is only a stub of sgl_kernel here")


def _missing(path: str, name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(path)


def __getattr__(name: str) -> _Missing:
    return _missing(f"sgl_kernel.{name}", name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = lambda name: _missing(f"{module.__name__}.{name}", name)


sys.meta_path.append(_Submodules())
