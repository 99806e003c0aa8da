"""A declared adapter's file: TOML, or ``[tool.kvcanary_agent]`` of a pyproject.toml."""

import importlib
import os
from collections.abc import Mapping
from typing import Any

from kvcanary_agent.adapters.declared.declaration import Declaration, DeclarationError

_TABLE = "tool.kvcanary_agent"


def read(path: str) -> Declaration:
    """Read and check a file.

    Raises:
        OSError: It cannot be read.
        DeclarationError: It is no TOML, or its table is wrong.
    """
    with open(path, "rb") as file:
        text = file.read()
    try:
        table: Any = tables_of(text.decode())
    except ValueError as error:
        raise error if isinstance(error, DeclarationError) else DeclarationError(f"it is no TOML: {error}") from None
    if os.path.basename(path) == "pyproject.toml":
        for key in _TABLE.split("."):
            table = table.get(key) if isinstance(table, Mapping) else None
        if not isinstance(table, Mapping):
            raise DeclarationError(f"it has no table [{_TABLE}], which would declare the adapter")
    return Declaration.parse(table)


def tables_of(text: str) -> Any:
    """What a text in TOML says. Raises ValueError if it is none, `DeclarationError` if nothing here can read it."""
    for name in ("tomllib", "tomli"):  # Python's own from 3.11 on
        try:
            toml: Any = importlib.import_module(name)
        except ImportError:
            continue
        return toml.loads(text)
    raise DeclarationError("Python 3.10 cannot read TOML by itself: pip install tomli, or use Python 3.11 or newer")
