"""``kvcanary-agent inspect MODULE:NAME``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from kvcanary_agent.inspecting.proposal import propose


def main(argv: Sequence[str]) -> int:
    """Print the table that is proposed; exit status 1 if there is nothing to propose."""
    parser = argparse.ArgumentParser(
        prog="kvcanary-agent inspect",
        description="Propose the table that declares a pool, with ? for what it cannot tell. NAME is a class, which is "
        "read, or an object of it, which tells more; its module is imported. In a running engine, "
        "print(kvcanary_agent.inspecting.proposal.propose(pool)) does the same.",
    )
    parser.add_argument("name", metavar="MODULE:NAME", help="for example my_engine.cache:KVCache")
    name = parser.parse_args(list(argv)).name
    module, colon, path = name.partition(":")
    if not colon or not path:
        parser.error(f"{name!r} is not of the form MODULE:NAME")
    try:
        sys.stdout.write(propose(_found(module, path)))
    except (ImportError, AttributeError, ValueError) as error:
        sys.stderr.write(f"kvcanary-agent: {name}: {error}\n")
        return 1
    return 0


def _found(module: str, path: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
