"""How the agent gets into a process: the launcher, the import hook, and the patching of engines' classes.

This file is the bootstrap. It runs at the start of every instrumented process, where each module costs about 0.1 ms, so
of its siblings it loads the import hook alone; `adapter_loading` follows when an engine turns up, or is there already.
"""

from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kvcanary_agent.activation.import_hook import TargetFinder

_installing = allocate_lock()
_finder: "TargetFinder | None" = None


def install() -> None:
    """Put the import hook in place and patch the target modules that are imported already.

    It can be reached several times in one process: from sitecustomize, from an explicit ``kvcanary_agent.install()``,
    from an engine's plugin entry point. Only the first does anything, until `uninstall`.
    """
    global _finder
    import os
    import sys

    from kvcanary_agent.activation.import_hook import TargetFinder

    adapters: dict[str, list[object]] = {}
    chosen: dict[str, list[object]] = {name: [module] for name, module in builtin_targets().items()}

    def on_import(name: str, module: object) -> None:
        from kvcanary_agent.activation.adapter_loading import attach

        attach(module, name, adapters[name])

    # The hook goes in before its targets are known, so that an adapter that calls install() as it is loaded finds it.
    with _installing:
        if _finder is not None and _finder in sys.meta_path:
            return
        _finder = TargetFinder(adapters, on_import)
        sys.meta_path.insert(0, _finder)
    if os.environ.get("KVCANARY_ADAPTERS", "").strip():
        from kvcanary_agent.activation.adapter_loading import chosen_adapters

        chosen = chosen_adapters(chosen, os.environ)
    # What another thread imports meanwhile is found by the hook, or by the loop, or by both.
    adapters.update(chosen)
    for name in chosen:
        if name in sys.modules:
            from kvcanary_agent.activation.adapter_loading import attach_imported

            attach_imported(name, chosen[name])


def uninstall() -> None:
    """Remove the import hook, put the original methods back and stop watching. Nothing if nothing is installed."""
    global _finder
    import sys

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


def builtin_targets() -> "dict[str, str]":
    """Each target module, and the adapter module that patches it: the table in ``adapters/targets.py``.

    That file is executed by itself, since importing it would run ``adapters/__init__.py`` in every process.
    """
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    import kvcanary_agent

    file = f"{kvcanary_agent.__path__[0]}/adapters/targets.py"
    spec = spec_from_file_location("kvcanary_agent.adapters.targets", file)
    assert spec is not None, f"{file} is Python source"
    assert spec.loader is not None, f"{file} is Python source"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    targets: dict[str, str] = module.BUILTIN
    return targets
