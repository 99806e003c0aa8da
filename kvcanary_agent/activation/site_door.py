"""The door for environments that clear PYTHONPATH: ``kvcanary-agent enable --site`` and ``kvcanary-agent disable``.

A file of ours in site-packages has every Python of that environment call `start`, in processes that were started with
``-I`` or ``-E``, or with an empty environment, too. It is a ``.pth`` file, and from Python 3.15 on a ``.start`` file
(PEP 829). `start` is called before sitecustomize, whose door then finds the agent in place.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

USAGE = """\
usage: kvcanary-agent enable --site
       kvcanary-agent disable

enable --site has every process of this Python environment load the agent at its start, whatever its options and its
environment, except with -S or KVCANARY_ENABLED=0: it puts one small file into site-packages. disable removes it.
"""

_OURS = "# kvcanary-agent: made by `kvcanary-agent enable --site`, removed by `kvcanary-agent disable`\n"


class SiteDoorError(Exception):
    """The door cannot be opened or closed; the message says why, and what to do instead."""


_started = False


def start() -> None:
    """Install the agent, unless ``KVCANARY_ENABLED`` is off; a failure is one line, and the program runs.

    Only the first call does anything: in a virtual environment Python goes through the site-packages twice.
    """
    global _started
    if _started:
        return
    _started = True
    value = os.environ.get("KVCANARY_ENABLED", "").strip().lower()
    if value in ("0", "false", "no", "off"):
        return
    try:
        if value not in ("", "1", "true", "yes", "on"):
            raise ValueError(f"KVCANARY_ENABLED={value!r} is none of 1, true, yes, on, 0, false, no, off")
        import kvcanary_agent

        kvcanary_agent.install()
    except (Exception, SystemExit) as error:
        from kvcanary_agent import complain

        complain(f"not active in this process: {error}")


def enable(arguments: "Sequence[str]") -> int:
    """The command ``enable``; its exit status."""
    if list(arguments) != ["--site"]:
        return _usage(arguments)
    import sysconfig

    return _report(open_door, sysconfig.get_path("purelib"))


def disable(arguments: "Sequence[str]") -> int:
    """The command ``disable``; its exit status."""
    if arguments:
        return _usage(arguments)
    import sysconfig

    return _report(close_door, sysconfig.get_path("purelib"))


def open_door(folder: str) -> str:
    """Put the file into `folder`, a site-packages of this interpreter, and see that it works; what to tell the user.

    Raises
        SiteDoorError: A file of that name is not ours, it cannot be written, or a Python that starts does not load this
            agent through it. Then nothing is left behind.
    """
    path = _path(folder)
    existed = _is_ours(path)
    try:
        # Other processes may start meanwhile: they see the old file, or the new one, or none.
        fresh = f"{path}.{os.getpid()}"
        with open(fresh, "x", encoding="utf-8") as file:
            file.write(_text(path))
        os.replace(fresh, path)
    except OSError as error:
        raise SiteDoorError(
            f"cannot write {path}: {error.strerror}; use another door: kvcanary-agent run, or PYTHONPATH with the "
            "sitecustomize_template"
        ) from None
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = _agent_of_a_new_process()
    if found != package:
        if not existed:
            os.unlink(path)
        what = f"loads another one, in {found}" if found else "does not load it"
        raise SiteDoorError(
            f"{path} has no effect: a Python that starts here {what}; install kvcanary-agent in this environment first"
        )
    return (
        f"{path}: every Python process of {sys.prefix} has the agent from now on; kvcanary-agent disable takes it out"
    )


def close_door(folder: str) -> str:
    """Remove the file from `folder`; what to tell the user. Raises `SiteDoorError` if it is not ours, or stays."""
    path = _path(folder)
    if not _is_ours(path):
        return f"{path} does not exist: nothing to do"
    try:
        os.unlink(path)
    except OSError as error:
        raise SiteDoorError(f"cannot remove {path}: {error.strerror}; KVCANARY_ENABLED=0 keeps the agent out") from None
    return f"{path} is removed: processes that start from now on do without the agent"


def is_open(folder: str) -> bool:
    """Whether the file is in `folder`. Raises `SiteDoorError` if one of its name is there that is somebody else's."""
    return _is_ours(_path(folder))


def _path(folder: str) -> str:
    return os.path.join(folder, "kvcanary_agent.start" if sys.version_info >= (3, 15) else "kvcanary_agent.pth")


def _text(path: str) -> str:
    call = f"{__name__}:start"
    if path.endswith(".pth"):
        # Of this file, a Python executes the lines that begin with import. After an uninstallation it does nothing.
        module, _, function = call.partition(":")
        here = os.path.abspath(__file__)
        call = f"import os; os.path.exists({here!r}) and __import__({module!r}, fromlist=[0]).{function}()"
    return f"{_OURS}{call}\n"


def _is_ours(path: str) -> bool:
    """Whether the file is there. Raises `SiteDoorError` if it is somebody else's."""
    if not os.path.lexists(path):
        return False
    try:
        with open(path, encoding="utf-8") as file:
            ours = file.readline() == _OURS and not os.path.islink(path)
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise SiteDoorError(f"{path} is not from kvcanary-agent enable; it stays as it is: move it away first")
    return True


def _agent_of_a_new_process() -> str | None:
    """The folder of the agent in a Python that starts with nothing but its site-packages; None if it is not there."""
    import subprocess

    look = (
        "import sys; agent = sys.modules.get('kvcanary_agent'); hook = getattr(agent, '_finder', None)\n"
        "print(agent.__path__[0] if hook in sys.meta_path else '', end='')"
    )
    asked = subprocess.run(
        [sys.executable, "-I", "-c", look], env={"KVCANARY_ENABLED": "1"}, stdout=subprocess.PIPE, text=True
    )
    return asked.stdout or None


def _usage(arguments: "Sequence[str]") -> int:
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    sys.stderr.write(USAGE)
    return 2


def _report(action: "Callable[[str], str]", folder: str) -> int:
    try:
        sys.stdout.write(f"{action(folder)}\n")
    except SiteDoorError as error:
        sys.stderr.write(f"kvcanary-agent: {error}\n")
        return 1
    return 0
