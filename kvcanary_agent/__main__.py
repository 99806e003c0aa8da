"""The command line, ``python -m kvcanary_agent`` and ``kvcanary-agent``."""

import sys

from kvcanary_agent import __version__, execute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _run(arguments: list[str]) -> int:
    status: int = execute("activation/launcher.py").main(arguments)
    return status


def _enable(arguments: list[str]) -> int:
    from kvcanary_agent.activation import site_door

    return site_door.enable(arguments)


def _disable(arguments: list[str]) -> int:
    from kvcanary_agent.activation import site_door

    return site_door.disable(arguments)


def _demo(arguments: list[str]) -> int:
    from kvcanary_agent.demo import command

    return command.main(arguments)


def _faults(arguments: list[str]) -> int:
    import warnings

    # torch says so where NumPy is absent; nothing here uses it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from kvcanary_agent.faults import command

    return command.main(arguments)


def _report(arguments: list[str]) -> int:
    from kvcanary_agent.report import command

    return command.main(arguments)


def _doctor(arguments: list[str]) -> int:
    from kvcanary_agent.doctor import command

    return command.main(arguments)


def _dashboards(arguments: list[str]) -> int:
    from kvcanary_agent.dashboards import command

    return command.main(arguments)


def _inspect(arguments: list[str]) -> int:
    from kvcanary_agent.inspecting import command

    return command.main(arguments)


# Each imports what it needs when it is chosen, and this file nothing: `run` must not wait, not even for the search that
# an import is.
COMMANDS: "dict[str, tuple[Callable[[list[str]], int], str]]" = {
    "run": (_run, "run a program with the agent in it"),
    "enable": (_enable, "load the agent in every process of this Python environment"),
    "disable": (_disable, "take that back"),
    "demo": (_demo, "see the agent catch a corrupted KV cache"),
    "doctor": (_doctor, "say what the agent covers here, and what not"),
    "inspect": (_inspect, "propose the table that declares a pool of your own"),
    "report": (_report, "show an incident file"),
    "dashboards": (_dashboards, "print alert rules for Prometheus, or a dashboard for Grafana"),
    "faults": (_faults, "run fault cases on an embedded pool"),
}


def _usage() -> str:
    lines = ["usage: kvcanary-agent COMMAND ...", "       kvcanary-agent --version | --help", ""]
    lines += [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join([*lines, "", "kvcanary-agent COMMAND --help says more about one of them.", ""])


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run the command in `argv` (``sys.argv[1:]``) and return its exit status: 2 when there is no such command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.stderr.write(_usage())
        return 2
    name = arguments[0]
    if name in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"kvcanary-agent {__version__}\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(f"kvcanary-agent: unknown command {name!r}; there are {', '.join(COMMANDS)}\n")
        return 2
    command, _ = COMMANDS[name]
    return command(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
