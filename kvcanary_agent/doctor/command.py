"""``kvcanary-agent doctor [--json] [--status FOLDER | -- COMMAND...]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcanary_agent import __version__
from kvcanary_agent.doctor.environment import doors, engines, exporters, own_adapters, setting_problems
from kvcanary_agent.doctor.processes import covered, run_with_status, statuses
from kvcanary_agent.screen import Screen


def main(argv: Sequence[str]) -> int:
    """Say what is covered, and why the rest is not; exit status 1 if an engine is here and not covered."""
    words = list(argv)
    command: list[str] | None = None
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    parser = _parser()
    arguments = parser.parse_args(words)
    if command is not None and (not command or arguments.status is not None):
        parser.error(
            "after -- comes the command to run" if not command else "--status and a command exclude each other"
        )
    report: dict[str, Any] = {
        "agent": __version__,
        "python": sys.executable,
        "doors": doors(os.environ),
        "exporters": exporters(os.environ),
        "settings": setting_problems(os.environ),
    }
    if command is None and arguments.status is None:
        found = [*engines(), *own_adapters(os.environ)]
        report["engines"] = [{**asdict(engine), "covered": engine.covered} for engine in found]
        healthy = all(engine.covered for engine in found)
    else:
        report["processes"] = _processes(command, arguments.status, report, quiet=arguments.json)
        verdicts = [process["covered"] for process in report["processes"]]
        healthy = True in verdicts and False not in verdicts
    report["healthy"] = healthy
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        _show(report, Screen(sys.stdout, os.environ))
    return 0 if healthy else 1


def _processes(
    command: list[str] | None, folder: Path | None, report: dict[str, Any], *, quiet: bool
) -> list[dict[str, Any]]:
    if folder is not None:
        return [{**status, "covered": covered(status)} for status in statuses(folder)]
    assert command is not None, "one of the two is given"
    with tempfile.TemporaryDirectory(prefix="kvcanary-doctor-") as scratch:
        report["command"] = {"words": command, "status": run_with_status(command, Path(scratch), quiet=quiet)}
        return [{**status, "covered": covered(status)} for status in statuses(Path(scratch))]


def _show(report: dict[str, Any], screen: Screen) -> None:
    screen.heading(f"kvcanary-agent {report['agent']}, {report['python']}")
    for problem in report["settings"]:
        screen.verdict(False, problem)
    screen.heading("Ways in")
    for door, reason in report["doors"].items():
        screen.paragraph(f"{door}: {reason or 'works'}")
    screen.heading("Exporters")
    for signal, words in report["exporters"].items():
        screen.paragraph(f"{signal}: {words}")
    if "engines" in report:
        _show_engines(report["engines"], screen)
    else:
        _show_processes(report, screen)


def _show_engines(found: list[dict[str, Any]], screen: Screen) -> None:
    screen.heading("Engines in this environment")
    if not found:
        screen.paragraph("none that the agent knows (the demo engine apart)")
    for engine in found:
        patched = sum(outcome == "patched" for outcome in engine["patches"].values())
        screen.verdict(
            engine["covered"],
            f"{engine['name']} {engine['version']}: {patched} of {len(engine['patches'])} classes patched",
        )
        for target, here in engine["targets"].items():
            screen.field("" if here else "missing", target)
        for problem in engine["problems"]:
            screen.field("but", problem)


def _show_processes(report: dict[str, Any], screen: Screen) -> None:
    screen.heading("Processes with an engine in them")
    if "command" in report:
        screen.paragraph(f"{' '.join(report['command']['words'])} ended with status {report['command']['status']}")
    if not report["processes"]:
        screen.verdict(False, "no process has imported an engine that the agent knows")
    elif not any(process["covered"] for process in report["processes"]):
        screen.verdict(False, "no process has a pool that is watched")
    for process in report["processes"]:
        state = f"as of {process['written']}" if process["running"] else "ended"
        words = f"pid {process['pid']} ({process.get('program', '')}, {state})"
        if process["covered"] is None:
            screen.paragraph(f"{words}: no KV pool here")
        else:
            screen.verdict(process["covered"], f"{words}: {'covered' if process['covered'] else 'not covered'}")
        for pool in process.get("pools", ()):
            screen.field(
                "pool",
                f"{pool['pool']} of {pool['engine']}, rank {pool['rank']}: {pool['checks']:,} checks, "
                f"{pool['violations']:,} violations",
            )
        for patch in process.get("patches", ()):
            screen.field(patch["outcome"], patch["class"])
        for entry in process.get("coverage", ()):
            if not entry["covered"]:
                screen.field("but", f"{entry['subject']}: {entry['reason']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcanary-agent doctor",
        usage="kvcanary-agent doctor [--json] [--status FOLDER | -- COMMAND...]",
        description="Say which engines are here and whether the agent finds what it patches, which ways in work, and "
        "what is exported. With a command, run it with the agent in it, and say what each of its processes covers; "
        "with --status, say so of the processes of a server that runs with KVCANARY_STATUS_DIR=FOLDER. Exit status 1 "
        "if an engine is here and not covered.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--status", type=Path, metavar="FOLDER", help="KVCANARY_STATUS_DIR of a running server")
    return parser
