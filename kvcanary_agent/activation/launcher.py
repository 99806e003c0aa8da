"""``python -m kvcanary_agent run [--] COMMAND...``: become COMMAND, with the agent in it and in all its children.

The launcher prepares the environment and calls exec, so process id, signals, arguments and exit code are the program's
own. Nothing of the launcher is left in the process, and sitecustomize takes over from there.

The user waits for two starts of Python, so this one imports nothing that the interpreter has not loaded already:
`signal` and `shutil` alone would take half as long as the interpreter itself.
"""

import _signal  # type: ignore[import-not-found]  # typeshed knows it as signal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import NoReturn

USAGE = """\
usage: kvcanary-agent run [--] COMMAND [ARGUMENT...]

Runs COMMAND with the agent in it and in the Python processes that it starts.

COMMAND is one of
  script.py        a Python script, or a folder or archive that holds a __main__.py
  -m MODULE        a module, as with python -m
  -c CODE          a line of Python
  PROGRAM          any program on PATH, or the path of one

Scripts, -m and -c run with this Python interpreter and the options it was started with.
KVCANARY_* variables configure the agent. With KVCANARY_ENABLED=0 COMMAND runs without it.
A Python started with -I, -E or -S ignores PYTHONPATH, and the agent with it.
"""

# A process of the server may have another working directory.
_FOLDERS = ("KVCANARY_INCIDENT_DIR", "KVCANARY_STATUS_DIR")
_PYTHON_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")


class LaunchError(Exception):
    """COMMAND cannot be run; `status` is the exit status a shell would give."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def main(arguments: "Sequence[str]") -> int:
    """Run the COMMAND in `arguments`. Returns, with an exit status, only when it could not be started."""
    if not arguments:
        sys.stderr.write(USAGE)
        return 2
    if arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    command = list(arguments[1:] if arguments[0] == "--" else arguments)
    try:
        adapters, off = _checked_settings(os.environ)
        program, argv = resolve(command)
        environ = dict(os.environ) if off else instrumented(os.environ, adapters)
        _become(program, argv, environ)
    except LaunchError as error:
        return _fail(str(error), error.status)


def _checked_settings(environ: "Mapping[str, str]") -> "tuple[tuple[str, ...], bool]":
    """The adapters asked for, and whether the agent is switched off. Raises `LaunchError` for a wrong setting."""
    if not any(name.startswith("KVCANARY_") for name in environ):
        return (), False
    from kvcanary_agent.settings import Settings, SettingsError

    try:
        settings = Settings.from_environ(environ)
    except SettingsError as error:
        raise LaunchError(str(error), 2) from None
    return settings.adapters, bool(environ.get("KVCANARY_ENABLED", "").strip()) and not settings.enabled


def instrumented(environ: "Mapping[str, str]", adapters: "Sequence[str]" = ()) -> dict[str, str]:
    """The environment in which Python processes get the agent through sitecustomize, with these `adapters`, if any."""
    folder = template_folder()
    # Entries are kept as they are, empty ones too: the user's PYTHONPATH is the user's. Ours goes first, once.
    entries = environ["PYTHONPATH"].split(os.pathsep) if environ.get("PYTHONPATH") else []
    changed = dict(environ)
    changed["PYTHONPATH"] = os.pathsep.join([folder, *(entry for entry in entries if entry != folder)])
    changed["KVCANARY_ENABLED"] = "1"
    if adapters:
        # A process of the server may have another working directory.
        for entry in adapters:
            if entry.endswith(".py"):
                _check_adapter(entry)
            elif entry.endswith(".toml"):
                _check_table(entry)
        absolute = (os.path.abspath(entry) if entry.endswith((".py", ".toml")) else entry for entry in adapters)
        changed["KVCANARY_ADAPTERS"] = ",".join(absolute)
    for name in _FOLDERS:
        if environ.get(name, "").strip():
            changed[name] = _folder(name, os.path.abspath(environ[name].strip()))
    return changed


def _check_adapter(file: str) -> None:
    try:
        with open(file, "rb") as source:
            compile(source.read(), file, "exec")
    except FileNotFoundError:
        raise LaunchError(f"KVCANARY_ADAPTERS names {file!r}, but there is no such file", 2) from None
    except OSError as error:
        raise LaunchError(f"KVCANARY_ADAPTERS names {file!r}, which cannot be read: {error.strerror}", 2) from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        words = error.msg if isinstance(error, SyntaxError) else str(error)
        raise LaunchError(f"KVCANARY_ADAPTERS names {file!r}, which is no Python{line}: {words}", 2) from None


def _check_table(file: str) -> None:
    from kvcanary_agent.adapters.declared.declaration import DeclarationError
    from kvcanary_agent.adapters.declared.toml_file import read

    try:
        read(file)
    except FileNotFoundError:
        raise LaunchError(f"KVCANARY_ADAPTERS names {file!r}, but there is no such file", 2) from None
    except OSError as error:
        raise LaunchError(f"KVCANARY_ADAPTERS names {file!r}, which cannot be read: {error.strerror}", 2) from None
    except DeclarationError as error:
        raise LaunchError(f"KVCANARY_ADAPTERS names {file!r}: {error}", 2) from None


def _folder(name: str, path: str) -> str:
    """The same path, now of a folder that can be written to."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{name}={path!r} cannot be a folder: {error.strerror}", 2) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise LaunchError(f"{name}={path!r} cannot be written to; give a folder that the server may write to", 2)
    return path


def template_folder() -> str:
    """The folder of sitecustomize.py, beside the package in a clone as in site-packages."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folder = os.path.join(os.path.dirname(package), "sitecustomize_template")
    if not os.path.isfile(os.path.join(folder, "sitecustomize.py")):
        raise LaunchError(f"the installation is incomplete: {folder} has no sitecustomize.py", 1)
    if os.pathsep in folder:
        raise LaunchError(f"{folder} cannot be put on PYTHONPATH, for it contains {os.pathsep!r}", 1)
    return folder


def resolve(command: "Sequence[str]") -> tuple[str, list[str]]:
    """The program to execute for COMMAND, and its argv.

    Raises `LaunchError` with status 2 for wrong usage, 126 for what cannot be run, and 127 for what does not exist.
    """
    if not command:
        raise LaunchError("run: there is no command after --", 2)
    name = command[0]
    if name in ("-m", "-c"):
        if len(command) < 2:
            raise LaunchError(f"run: {name} needs an argument", 2)
        return _python(command)
    if name.startswith("-"):
        raise LaunchError(f"run: unknown option {name}; see kvcanary-agent run --help", 2)
    if os.sep not in name and not name.endswith(_PYTHON_SUFFIXES):
        program = _on_path(name)
        if program is not None:
            return program, list(command)
    if not os.path.exists(name):
        what = "no such file" if os.sep in name or name.endswith(_PYTHON_SUFFIXES) else "command not found"
        raise LaunchError(f"{name}: {what}", 127)
    if _is_python(name):
        return _python(command)
    if os.sep not in name:
        raise LaunchError(f"{name}: command not found (for the file in this folder: ./{name})", 127)
    if os.path.isdir(name):
        raise LaunchError(f"{name}: is a folder without a __main__.py", 126)
    if not os.access(name, os.X_OK):
        raise LaunchError(f"{name}: is not executable", 126)
    return name, list(command)


def interpreter_options(orig_argv: "Sequence[str]") -> list[str]:
    """The options that this interpreter was started with, from ``sys.orig_argv``: what stands before -m or a script."""
    options: list[str] = []
    rest: Iterator[str] = iter(orig_argv[1:])
    for argument in rest:
        if argument == "--check-hash-based-pycs":
            options += [argument, next(rest)]
        elif argument.startswith("--"):
            options.append(argument)
        elif argument.startswith("-") and argument != "-":
            for position, letter in enumerate(argument[1:], start=2):
                if letter in "mc":
                    return options
                if letter in "WX":
                    options.append(f"-{letter}{argument[position:] or next(rest)}")
                    break
                options.append(f"-{letter}")
        else:
            break
    return options


def _on_path(name: str) -> str | None:
    """The first executable of this name on PATH."""
    for folder in os.get_exec_path():
        program = os.path.join(folder, name)
        if os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    return None


def _python(arguments: "Sequence[str]") -> tuple[str, list[str]]:
    if not sys.executable:
        raise LaunchError("this Python does not know its own executable; name one: run -- python ...", 1)
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-S": sys.flags.no_site}
    for option, given in flags.items():
        if given:
            raise LaunchError(f"Python was started with {option}, which keeps the agent out; start it without", 2)
    return sys.executable, [sys.executable, *interpreter_options(sys.orig_argv), *arguments]


def _is_python(path: str) -> bool:
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, "__main__.py"))
    if path.endswith(_PYTHON_SUFFIXES):
        return True
    if os.access(path, os.X_OK):
        return False  # runs by its own first line
    try:
        with open(path, "rb") as file:
            first_line = file.readline(200)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}", 126) from None
    return first_line.startswith(b"#!") and b"python" in first_line


def _become(program: str, argv: list[str], environ: "Mapping[str, str]") -> "NoReturn":
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two at its start, and exec would hand that down: a program must die of a closed pipe if that
    # is its way.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execve(program, argv, environ)
    except OSError as error:
        raise LaunchError(f"{program}: {error.strerror}", 126) from None


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"kvcanary-agent: {message}\n")
    return status
