"""Adapters of installed packages: entry points of the group ``kvcanary_agent.adapters``.

The name of such an entry point is the module that its adapter waits for, so that the adapter is loaded when that module
is imported, and no sooner::

    [project.entry-points."kvcanary_agent.adapters"]
    "my_engine.runner" = "my_engine.kvcanary:MyAdapter"

An adapter of several modules has several entry points. This file is executed by `kvcanary_agent` under the import lock:
it imports nothing that is not loaded by then, `importlib.metadata` least of all.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_GROUP = b"[kvcanary_agent.adapters]"


def adapters(search_path: "Iterable[str]") -> "dict[str, list[object]]":
    """Target module -> ``module:attribute`` of its adapters, of packages in `search_path`, but not of those that lie in
    the working directory."""
    here = os.path.realpath(os.getcwd())
    found: dict[str, list[object]] = {}
    for folder in dict.fromkeys(search_path):
        if not folder or os.path.realpath(folder) == here:
            continue
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # a zip file, or nothing
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                for target, adapter in _declared(f"{folder}/{name}/entry_points.txt"):
                    if adapter not in found.setdefault(target, []):
                        found[target].append(adapter)
    return found


def _declared(path: str) -> "Iterable[tuple[str, str]]":
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError:
        return
    _, _, section = text.partition(_GROUP)
    for line in section.decode(errors="replace").splitlines():
        if line.startswith("["):
            return
        target, equals, value = line.partition("=")
        adapter = value.partition("[")[0].strip()
        if equals and target.strip() and ":" in adapter:
            yield target.strip(), adapter
