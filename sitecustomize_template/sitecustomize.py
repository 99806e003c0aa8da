"""The environment-variable door: with this folder on PYTHONPATH, Python runs this file at the start of each process.

It hands over to the user's own sitecustomize, the next on ``sys.path``, and then installs the agent if
``KVCANARY_ENABLED`` asks for it. The folder leaves ``sys.path`` but stays in PYTHONPATH, for child processes. Nothing
else may lie in this folder: it would shadow the user's modules while Python starts.
"""

import os
import sys


def _agent_wanted() -> bool:
    value = os.environ.get("KVCANARY_ENABLED", "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value not in ("", "0", "false", "no", "off"):
        _complain(f"KVCANARY_ENABLED={value!r} is none of 1, true, yes, on, 0, false, no, off")
    return False


def _complain(reason: str) -> None:
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"kvcanary-agent: not active in this process: {reason}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # standard error is closed


def _load_agent(root: str) -> None:
    """Import the kvcanary_agent beside this folder, whichever other copy could be imported.

    ``sys.path`` is left alone: what else lies in `root`, a clone or the site-packages of another environment, is none
    of the program's business. The file is named rather than searched for, which halves the time; the modules of the
    package are found through its ``__path__``, as usual.
    """
    if "kvcanary_agent" in sys.modules:
        return
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    package = f"{root}/kvcanary_agent"
    file = f"{package}/__init__.py"
    spec = spec_from_file_location("kvcanary_agent", file, submodule_search_locations=[package])
    assert spec is not None, f"{file} is Python source"
    assert spec.loader is not None, f"{file} is Python source"
    module = sys.modules["kvcanary_agent"] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["kvcanary_agent"]
        raise


def _run_users_sitecustomize() -> None:
    """Import the next sitecustomize as Python would have, had this one not been in the way.

    It takes the place of this module in ``sys.modules``. What it raises goes on to Python's ``site``, which reports it
    and leaves no module behind, as it does without this file.
    """
    this = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")  # not this one any more
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


def _start() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    wanted = _agent_wanted()
    if wanted:
        # Before the user's sitecustomize, so that the copy whose folder comes first on PYTHONPATH is the one in use.
        try:
            _load_agent(os.path.dirname(folder))
        except (Exception, SystemExit) as error:
            _complain(f"{type(error).__name__}: {error}")
            wanted = False
    try:
        _run_users_sitecustomize()
    finally:
        if wanted:
            try:
                sys.modules["kvcanary_agent"].install()
            except (Exception, SystemExit) as error:
                _complain(f"{type(error).__name__}: {error}")


_start()
