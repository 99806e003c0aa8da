"""``kvcanary-agent report INCIDENT [-o FILE.html]``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcanary_agent.report.incident_file import IncidentError, newest_in, read_incident
from kvcanary_agent.report.page import page
from kvcanary_agent.report.summary import show
from kvcanary_agent.screen import Screen


def main(argv: Sequence[str]) -> int:
    """Show an incident; the exit status: 0, or 2 if it cannot be read or the page cannot be written."""
    arguments = _parser().parse_args(argv)
    try:
        path = arguments.incident
        if path.is_dir():
            path, others = newest_in(path)
            print(f"{path}, the newest of {others + 1}" if others else f"{path}, the only one there")
        incident = read_incident(path)
        if arguments.output is None:
            show(incident, Screen(sys.stdout, os.environ))
        else:
            arguments.output.write_text(page(incident), encoding="utf-8")
            print(f"{path} is now a page: {arguments.output}")
    except IncidentError as error:
        sys.stderr.write(f"kvcanary-agent report: {error}\n")
        return 2
    except BrokenPipeError:
        # Nobody reads on; Python would complain once more when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        sys.stderr.write(f"kvcanary-agent report: {error.filename}: {error.strerror}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcanary-agent report",
        description="Show an incident that the agent has written to KVCANARY_INCIDENT_DIR: what broke, the probable "
        "causes, and what to try next. Exit status 2 if it cannot be read.",
    )
    parser.add_argument("incident", type=Path, metavar="INCIDENT", help="the file, or a folder for its newest one")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="write a page that needs nothing else")
    return parser
