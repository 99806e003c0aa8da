"""``kvcanary-agent dashboards alerts | grafana``: print one of the files of this package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.resources import files

FILES = {"alerts": "alerts.yaml", "grafana": "grafana.json"}


def main(argv: Sequence[str]) -> int:
    """Print what was asked for; the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        sys.stdout.write(text(arguments.what))
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on; Python would complain once more when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    return 0


def text(what: str) -> str:
    """The contents of one of `FILES`."""
    return files("kvcanary_agent.dashboards").joinpath(FILES[what]).read_text(encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcanary-agent dashboards",
        description="Print what Prometheus and Grafana need to know of the agent's metrics, as OpenTelemetry exports "
        "them to Prometheus.",
        epilog="alerts: a file for rule_files in prometheus.yml. grafana: a dashboard to import; it asks for a "
        "Prometheus data source.",
    )
    parser.add_argument("what", choices=FILES)
    return parser
