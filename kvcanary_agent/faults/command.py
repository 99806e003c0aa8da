"""``python -m kvcanary_agent faults run FILE... [--json]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import operations as ops
from .language import CaseError, read_cases
from .runner import Outcome, Report, run_case

_PASSED, _FAILED, _MALFORMED = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Run the cases of files.

    Returns:
        The exit status: 0 if every case passed, 1 if one failed, 2 if a file cannot be read or a case is malformed.
    """
    arguments = _parser().parse_args(argv)
    show = _as_json if arguments.json else _as_line
    passed = failed = malformed = 0
    for file in arguments.files:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            print(f"{file}: cannot be read: {error}", file=sys.stderr)
            malformed += 1
            continue
        found = 0
        for case in read_cases(text, file):
            found += 1
            if isinstance(case, CaseError):
                print(case, file=sys.stderr)
                malformed += 1
                continue
            outcome = run_case(case)
            print(show(outcome), flush=True)
            if outcome.crash:
                print(outcome.crash.trace, file=sys.stderr, end="")
            passed, failed = passed + outcome.passed, failed + (not outcome.passed)
        if not found:
            print(f"{file}:1: expected at least one case, found none", file=sys.stderr)
            malformed += 1
    print(f"{passed} passed, {failed} failed, {malformed} malformed", file=sys.stderr)
    if malformed:
        return _MALFORMED
    return _FAILED if failed else _PASSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcanary-agent faults", description="Break an embedded pool on purpose and judge what the canary reports."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run fault cases",
        description="Run fault cases, one line each: id, expected, reported, pass or fail. Exit status: 0 if all pass, "
        "1 if one fails, 2 if one is malformed.",
    )
    run.add_argument("files", nargs="+", metavar="FILE", help="JSON Lines of cases; - is standard input")
    run.add_argument("--json", action="store_true", help="one JSON object per case, with every report in full")
    return parser


def _as_line(outcome: Outcome) -> str:
    verdict = "pass" if outcome.passed else "fail: " + "; ".join(outcome.problems)
    expected = " + ".join(map(_expectation_text, outcome.case.expectations)) or "clean"
    return f"{outcome.case.id}  expected {expected}  reported {_reports_text(outcome.reports)}  {verdict}"


def _expectation_text(expectation: ops.Expectation) -> str:
    text = f"{'|'.join(sorted(expectation.kinds))}@{expectation.first}"
    if expectation.last != expectation.first:
        text += f"..{expectation.last}"
    if expectation.slots:
        text += f" slot {','.join(map(str, sorted(expectation.slots)))}"
    if expectation.req is not None:
        text += f" req {expectation.req}"
    return text


def _reports_text(reports: Sequence[Report]) -> str:
    counts = Counter((report.operation, str(report.violation.kind)) for report in reports)
    return " + ".join(
        f"{kind}@{operation}" + (f" x{count}" if count > 1 else "") for (operation, kind), count in counts.items()
    ) or ("nothing")


def _as_json(outcome: Outcome) -> str:
    """One line of JSON; ``reports`` in the order in which they came."""
    return json.dumps(
        {
            "id": outcome.case.id,
            "passed": outcome.passed,
            "problems": outcome.problems,
            "expected": [
                {
                    "kind": sorted(expectation.kinds),
                    "from": expectation.first,
                    "by": expectation.last,
                    "slots": sorted(expectation.slots),
                    "req": expectation.req,
                }
                for expectation in outcome.case.expectations
            ],
            "reports": [_report_object(report) for report in outcome.reports],
            "error": outcome.crash.message if outcome.crash else None,
        }
    )


def _report_object(report: Report) -> dict[str, Any]:
    violation = report.violation
    return {
        "kind": violation.kind,
        "op": report.operation,
        "rank": report.rank,
        "group": violation.group,
        "slot": violation.slot,
        "block": violation.block,
        "req": violation.request,
        "position": violation.position,
        "layer": None if violation.layer is None else int(violation.layer),
        "part": violation.part,
        "step": violation.step,
        "expected": violation.expected,
        "found": violation.found,
        "writer": violation.writer,
        "detail": violation.detail,
    }
