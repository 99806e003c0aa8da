"""``kvcanary-agent demo``: a server with the agent in it, its KV cache broken on purpose, and what the agent reports.

Everything shown comes from outside of the server: answers over HTTP, and what its process has recorded with the
OpenTelemetry providers that the server itself has set, to which the agent reports as to those of any host.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import takewhile
from random import Random
from types import FrameType
from typing import Any

from kvcanary_agent.demo.config import ModelConfig
from kvcanary_agent.demo.observations import Attributes, points, total, violations
from kvcanary_agent.demo.server_process import ServerError, ServerProcess
from kvcanary_agent.screen import Screen

NUM_REQUESTS = 40
CONCURRENCY = 12
REPORT_TIMEOUT_S = 5.0
"""The agent counts a violation at once and reports it from another thread: how long that may take."""
_POLL_S = 0.02
_MAX_ATTEMPTS = 10

Request = dict[str, Any]
"""The body of POST /generate."""

# Long enough that the default content=scrub, too, comes past the byte while the request runs.
VICTIM: Request = {"request_id": "victim", "prompt": "Is what you read what was written?", "max_tokens": 150}
HOLDER: Request = {"request_id": "alice", "prompt": "Alice asks the first question.", "max_tokens": 60}
TAKER: Request = {"request_id": "bob", "prompt": "Bob would like something else.", "max_tokens": 60}

FLIP = {
    "kind": "flip_byte",
    "request_id": VICTIM["request_id"],
    "layer": ModelConfig().num_layers - 1,
    "part": "value",
    "position": len(VICTIM["prompt"]) + 10,
}
DOUBLE_ALLOCATION = {
    "kind": "double_allocation",
    "request_id": HOLDER["request_id"],
    "other_request_id": TAKER["request_id"],
}
# The names that the server and the agent give to the same part of a pool.
_PART_NAMES = {"key": "k", "value": "v"}


def main(argv: list[str]) -> int:
    """Run the demonstration.

    Returns:
        The exit status: 0 if a sound server was left in peace and both faults were reported as what they are, 1 if
        not, 130 after Ctrl-C.
    """
    argparse.ArgumentParser(
        prog="kvcanary-agent demo",
        description="Start a small LLM server with the agent in it, serve requests, corrupt one byte of its KV cache, "
        "hand one block out twice, and show what the agent reports. Exit status 0 if it reported nothing "
        "before, and both faults as what they are; 1 otherwise.",
        epilog="KVCANARY_* variables configure the agent in the server, but KVCANARY_ENABLED, KVCANARY_MODE "
        "and KVCANARY_DRILL are ignored, KVCANARY_CONTENT is full and KVCANARY_INCIDENT_DIR a new folder unless they "
        "are set. NO_COLOR turns colours off.",
    ).parse_args(argv)
    screen = Screen(sys.stdout, os.environ)
    try:
        with _unwound_by_sigterm():
            return _demonstrate(screen, ServerProcess(os.environ))
    except ServerError as error:
        sys.stderr.write(f"\nkvcanary-agent demo: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nkvcanary-agent demo: interrupted; the server is stopped\n")
        return 130
    except BrokenPipeError:
        # Nobody reads on; Python would complain once more when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind this process, as Ctrl-C does, instead of ending it at once: the server has to go first."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _demonstrate(screen: Screen, server: ServerProcess) -> int:
    start = time.monotonic()
    screen.heading("A server, unchanged, with the agent in it")
    screen.command(server.command)
    # The server ends before the threads are waited for, which wait for its answers.
    with ThreadPoolExecutor(CONCURRENCY) as threads, server:
        screen.paragraph(f"{server.url}, pid {server.pid}, ready after {time.monotonic() - start:.1f} s")
        demonstration = _Demonstration(screen, server, threads)
        demonstration.serve_in_peace()
        demonstration.flip_a_byte()
        demonstration.hand_a_block_out_twice()
        demonstration.show_metrics()
        demonstration.name_incidents()
    if demonstration.failures:
        screen.heading("Not as expected")
        for failure in demonstration.failures:
            screen.verdict(False, failure)
        return 1
    screen.heading(f"As expected, in {time.monotonic() - start:.1f} s. To put the agent into a server of your own:")
    screen.command(["python", "-m", "kvcanary_agent", "run", "YOUR_SERVER.py"])
    return 0


class _Demonstration:
    """The three acts, in this order, and which of their expectations did not hold.

    Attributes:
        failures: Each a sentence.
    """

    def __init__(self, screen: Screen, server: ServerProcess, threads: ThreadPoolExecutor) -> None:
        self.failures: list[str] = []
        self._screen = screen
        self._server = server
        self._threads = threads
        self._undisturbed: dict[str, list[list[int]]] = {}
        self._num_seen = 0

    def serve_in_peace(self) -> None:
        """Nothing is wrong, so nothing may be reported, though everything is checked."""
        self._screen.heading(f"1. {NUM_REQUESTS} requests: mixed lengths, shared prefixes, some with two continuations")
        futures = [self._threads.submit(self._generate, request) for request in _requests()]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            self._screen.progress(done, len(futures))
        answers = [future.result() for future in futures]
        self._undisturbed = {answer["request_id"]: answer["outputs"] for answer in answers}

        num_tokens = sum(len(output) for answer in answers for output in answer["outputs"])
        metrics = self._server.call("GET", "/metrics")
        num_checks, num_violations = total(metrics, "kvcanary.checks"), total(metrics, "kvcanary.violations")
        not_covered = [
            f"{attributes['kvcanary.subject']} ({attributes['kvcanary.reason']})"
            for attributes, point in points(metrics, "kvcanary.coverage")
            if not point["value"]
        ]
        reports = self._new_reports()
        served = f"{len(answers)} requests, {num_tokens:,} tokens, {num_checks:,} checks of slots"
        if not num_checks:
            self._conclude(False, "the agent is expected to check every step, but it checked no slot")
        elif not_covered:
            self._conclude(False, f"the agent is expected to cover all, but left out {', '.join(not_covered)}")
        elif num_violations or reports:
            self._conclude(
                False, f"{served}; no violation is expected, but {num_violations} were counted ({_summary(reports)})"
            )
        else:
            self._conclude(True, f"{served}, 0 violations")

    def flip_a_byte(self) -> None:
        """One byte of a running request changes behind the engine's back."""
        self._screen.heading("2. One byte of a running request is inverted")
        injected, answers = self._strike(FLIP, [VICTIM])
        layer, part = f"layers.{injected['layer']}", _PART_NAMES[injected["part"]]
        self._screen.paragraph(
            f"done: request {injected['request_id']}, {layer}, {injected['part']} of position {injected['position']}, "
            f"slot {injected['slot']} (block {injected['block']})"
        )
        self._tell_what_users_see(answers)
        expected = {
            "kvcanary.kind": "content",
            "kvcanary.layer": layer,
            "kvcanary.part": part,
            "kvcanary.slot": injected["slot"],
            "kvcanary.request": injected["request_id"],
        }
        reports = self._new_reports()
        found = next((report for report in reports if expected.items() <= report.items()), None)
        self._show(found, reports)
        self._conclude(
            found is not None,
            "reported as content, with the very layer, part, slot and request"
            if found
            else f"a content violation of {layer}, part {part}, slot {injected['slot']}, request "
            f"{injected['request_id']} is expected, but the agent reported {_summary(reports)} "
            f"(the server runs with KVCANARY_CONTENT={self._server.content})",
        )

    def hand_a_block_out_twice(self) -> None:
        """The allocator gives a block that one request reads to another one, which writes to it."""
        self._screen.heading("3. The allocator hands a block out twice")
        injected, answers = self._strike(DOUBLE_ALLOCATION, [HOLDER, TAKER])
        requests = {injected["request_id"], injected["other_request_id"]}
        self._screen.paragraph(
            f"done: block {injected['block']} of request {injected['request_id']} is now also "
            f"{injected['other_request_id']}'s"
        )
        self._tell_what_users_see(answers)
        reports = self._new_reports()
        found = next(
            (
                report
                for report in reports
                if report["kvcanary.kind"] == "ownership"
                and report["kvcanary.block"] == injected["block"]
                and {report.get("kvcanary.request"), report.get("kvcanary.writer")} == requests
            ),
            None,
        )
        self._show(found, reports)
        self._conclude(
            found is not None,
            "reported as ownership, with the very block and both requests"
            if found
            else f"an ownership violation of block {injected['block']} by {' and '.join(sorted(requests))} is "
            f"expected, but the agent reported {_summary(reports)}",
        )

    def show_metrics(self) -> None:
        """What the server's own meter provider has by now."""
        screen, metrics = self._screen, self._server.call("GET", "/metrics")
        screen.heading("Metrics, as the server's own OpenTelemetry meter provider has them")

        passed: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for attributes, point in points(metrics, "kvcanary.checks"):
            (failed if "error.type" in attributes else passed)[attributes["kvcanary.check"]] += point["value"]
        screen.row("kvcanary.checks {slot}", "passed", "failed")
        for check in sorted(passed):
            screen.row(f"  {check}", f"{passed[check]:,}", f"{failed[check]:,}")

        kinds: Counter[str] = Counter()
        for attributes, point in points(metrics, "kvcanary.violations"):
            kinds[attributes["kvcanary.kind"]] += point["value"]
        screen.row("kvcanary.violations {violation}", "count")
        for kind in sorted(kinds):
            screen.row(f"  {kind}", f"{kinds[kind]:,}")

        screen.row("kvcanary.step.duration", "count", "mean")
        for attributes, point in points(metrics, "kvcanary.step.duration"):
            mean_ms = 1e3 * point["sum"] / point["count"]
            screen.row(f"  {attributes['kvcanary.phase']}", f"{point['count']:,}", f"{mean_ms:.2f} ms")

        screen.row("kvcanary.coverage", "covered")
        for attributes, point in points(metrics, "kvcanary.coverage"):
            screen.row(f"  {attributes['kvcanary.subject']}", "yes" if point["value"] else "no")

        screen.row("kvcanary.records.memory", f"{total(metrics, 'kvcanary.records.memory') / 1024:,.0f} KiB")
        screen.paragraph(
            "A slot that stays broken fails its check at every step, and is reported once for each request that reads "
            "it, and once for the patrol (sweep)."
        )

    def name_incidents(self) -> None:
        """The files that the agent has written, and how to look at them."""
        folder = self._server.incident_folder
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while not (files := sorted(folder.glob("*.json"))) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if files:
            self._screen.heading("Incident files: evidence, probable causes, what to try next. To read them:")
        for file in files[-2:]:
            self._screen.command(["python", "-m", "kvcanary_agent", "report", str(file)])

    def _generate(self, request: Request) -> Any:
        return self._server.call("POST", "/generate", request)

    def _strike(self, fault: dict[str, Any], requests: list[Request]) -> tuple[Any, list[Any]]:
        """Have the server wait with `fault` for `requests`, serve them, and return both answers."""
        self._screen.paragraph(f"POST /fault {json.dumps(fault)}")
        injected = self._threads.submit(self._server.call, "POST", "/fault", fault)
        while not injected.done() and not self._server.call("GET", "/health")["waiting_faults"]:
            time.sleep(_POLL_S)
        # Two requests may miss each other, if one is delayed for longer than the other runs.
        for _ in range(_MAX_ATTEMPTS):
            answers = list(self._threads.map(self._generate, requests))
            if not self._server.call("GET", "/health")["waiting_faults"]:
                return injected.result(), answers
        raise ServerError(f"the fault {fault['kind']} never found the requests it is for running")

    def _new_reports(self) -> list[Attributes]:
        """The violations that were reported since the last call, once there are as many as were counted."""
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        num_counted = total(self._server.call("GET", "/metrics"), "kvcanary.violations")
        while True:
            reports = violations(self._server.call("GET", "/logs"))
            if len(reports) >= num_counted or time.monotonic() > deadline:
                new, self._num_seen = reports[self._num_seen :], len(reports)
                return new
            time.sleep(_POLL_S)

    def _tell_what_users_see(self, answers: list[Any]) -> None:
        for answer in answers:
            name, [output] = answer["request_id"], answer["outputs"]
            [undisturbed] = self._undisturbed[name]
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(output, undisturbed, strict=True)))
            difference = (
                "and the same answer" if same == len(output) else f"but another answer from token {same + 1} on"
            )
            self._screen.paragraph(f"{name} gets 200 OK, {difference} (compared with 1.)")

    def _show(self, report: Attributes | None, reports: list[Attributes]) -> None:
        if report is None:
            return
        known = {name.removeprefix("kvcanary."): value for name, value in report.items()}
        self._screen.paragraph("the agent reports:")
        self._screen.field("kind", f"{known['kind']}, at step {known['step']}")
        self._screen.field("request", _with(known["request"], ", position", known.get("position")))
        self._screen.field("where", f"block {known['block']}, slot {known['slot']}")
        if "layer" in known:
            self._screen.field("", f"{known['layer']}, part {known['part']}")
        if "writer" in known:
            self._screen.field("writer", _with(known["writer"], ", step", known.get("written_step")))
        self._screen.field("cause", f"{known['cause']} (confidence {known['confidence']})")
        self._screen.field("", known["body"])
        others = [other for other in reports if other is not report]
        if others:
            self._screen.paragraph(f"and, following from it, {_summary(others)}")

    def _conclude(self, good: bool, text: str) -> None:
        self._screen.verdict(good, text)
        if not good:
            self.failures.append(text)


def _requests() -> list[Request]:
    """What is served first: the requests that faults will strike later, and others of every shape."""
    random = Random(0)
    system_prompts = ("", "Answer briefly, and say so when you are not sure. ", "You are a careful assistant. ")
    others = [
        {
            "prompt": random.choice(system_prompts) + f"Question {number}: " + "why? " * random.randint(1, 12),
            "max_tokens": random.randint(4, 40),
            "n": 2 if number % 6 == 0 else 1,
        }
        for number in range(NUM_REQUESTS - 3)
    ]
    return [VICTIM, HOLDER, TAKER, *others]


def _with(text: str, word: str, value: object) -> str:
    return text if value is None else f"{text}{word} {value}"


def _summary(reports: list[Attributes]) -> str:
    kinds = Counter(report["kvcanary.kind"] for report in reports)
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "nothing"
