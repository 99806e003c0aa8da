"""Alert rules and dashboard, over what a real Prometheus scrapes from a server in which things go wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcanary_agent.dashboards.command import FILES, main, text
from kvcanary_agent.incident_files import PREFIX
from kvcanary_agent.telemetry.incidents.folder import MAX_FILES
from tests.dashboards.prometheus import PROMTOOL, Prometheus, free_port, needs_prometheus, running

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRAPED_WITHIN_S = 120.0
QUIET = {"KVCanaryGone"}
"""Alerts of what is not the matter with the server under test."""


def queries() -> dict[str, str]:
    """Every query of the dashboard, with the values that Grafana gives its variables; by panel."""
    dashboard = json.loads(text("grafana"))
    values = {variable["name"]: variable.get("allValue", "") for variable in dashboard["templating"]["list"]}
    found = {}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            # What a panel shows where there is nothing would always be data.
            expression = target["expr"].removesuffix(" or vector(0)").replace("$__rate_interval", "1m")
            found[f"{panel['title']} {target['refId']}"] = re.sub(r"\$(\w+)", lambda name: values[name[1]], expression)
    return found


def labels_asked_for() -> list[tuple[str, str]]:
    """Metric and label of each variable's ``label_values``."""
    dashboard = json.loads(text("grafana"))
    definitions = [variable.get("definition", "") for variable in dashboard["templating"]["list"]]
    matches = [re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", definition) for definition in definitions]
    return [(match[1], match[2]) for match in matches if match]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port where the agent in a server exposes its metrics."""
    incidents = tmp_path_factory.mktemp("incidents")
    # One more fits.
    for number in range(MAX_FILES - 1):
        (incidents / f"{PREFIX}{number}.json").touch()
    port = free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY_", "OTEL_"))},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OTEL_METRICS_EXPORTER": "prometheus",
        "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1",
        "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
        "KVCANARY_CONTENT": "full",
        "KVCANARY_DRILL": "block_table_swap@5",
        "KVCANARY_INCIDENT_DIR": str(incidents),
    }
    command = [sys.executable, "-m", "kvcanary_agent", "run", str(HERE / "faulty_server.py")]
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        open(log, "w") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n", log.read_text()
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def prometheus(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the rules, which has scraped the server for a while."""
    with running(tmp_path_factory.mktemp("prometheus"), text("alerts"), server) as prometheus:
        deadline = time.monotonic() + SCRAPED_WITHIN_S
        while not prometheus.query("rate(kvcanary_checks_total[1m]) > 0"):
            assert time.monotonic() < deadline, prometheus.get("targets")
            time.sleep(0.5)
        yield prometheus


@needs_prometheus
def test_every_query_of_the_dashboard_returns_data(prometheus: Prometheus) -> None:
    results = {panel: prometheus.query(expression) for panel, expression in queries().items()}

    assert len(results) > 10
    assert [panel for panel, result in results.items() if not result] == []
    numbers = [sample["value"][1] for result in results.values() for sample in result]
    assert "NaN" not in numbers
    for metric, label in labels_asked_for():
        assert prometheus.query(f'{metric}{{{label}!=""}}'), f"no {label} on {metric}"


@needs_prometheus
def test_every_alert_whose_cause_is_there_is_raised(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("rules")["groups"]
    names = {rule["name"] for rule in group["rules"]}
    assert len(names) == len(group["rules"])

    deadline = time.monotonic() + SCRAPED_WITHIN_S
    while prometheus.alerts().keys() != names - QUIET:
        assert time.monotonic() < deadline, prometheus.alerts()
        time.sleep(0.5)

    pending = {rule["name"] for rule in group["rules"] if rule["duration"]}
    assert {name for name, state in prometheus.alerts().items() if state == "firing"} >= names - pending - QUIET
    (rules,) = prometheus.get("rules")["groups"]
    assert {rule["name"]: rule["lastError"] for rule in rules["rules"] if rule.get("lastError")} == {}
    for alert in prometheus.get("alerts")["alerts"]:
        shown = json.dumps(alert["annotations"])
        assert not re.search("<no value>|<error", shown), shown


def test_a_scrape_has_each_series_once(server: str) -> None:
    with urllib.request.urlopen(f"http://{server}/metrics", timeout=30) as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]

    series = Counter(line.rpartition(" ")[0] for line in lines)
    assert any(name.startswith("kvcanary_violations_total{") for name in series)
    assert {name: count for name, count in series.items() if count > 1} == {}


@needs_prometheus
def test_promtool_accepts_the_rules_and_they_behave_over_time(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = tmp_path / "alerts.yaml"
    rules.write_text(text("alerts"))
    tests = tmp_path / "test.yaml"
    tests.write_text((HERE / "alerts_test.yaml").read_text().replace("RULES", str(rules)))
    for arguments in (["check", "rules", rules], ["test", "rules", tests]):
        done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("what", FILES)
def test_the_command_prints_the_file(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([what]) == 0

    assert capsys.readouterr().out == text(what)


def test_the_command_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["datadog"])

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(what in said for what in FILES)


def test_panels_do_not_overlap() -> None:
    dashboard: Any = json.loads(text("grafana"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
