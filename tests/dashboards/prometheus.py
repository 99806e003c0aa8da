"""A real Prometheus, for as long as a test looks at it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="there is no Prometheus: apt-get install prometheus"
)
START_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """Calls of a Prometheus's HTTP API."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """The ``data`` of an answer."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of a query."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def alerts(self) -> dict[str, str]:
        """Each alert that is pending or firing, and which of the two."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in self.get("alerts")["alerts"]}


@contextlib.contextmanager
def running(folder: Path, rules: str, target: str) -> Iterator[Prometheus]:
    """A Prometheus on 127.0.0.1 that scrapes one target every second.

    Args:
        folder: For its configuration and data.
        rules: The text of a rule file.
        target: Host and port.
    """
    assert PROMETHEUS is not None
    (folder / "rules.yaml").write_text(rules)
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [{"job_name": "server", "static_configs": [{"targets": [target]}]}],
    }
    # JSON is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    port = free_port()
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "prometheus.log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            prometheus = Prometheus(port)
            deadline = time.monotonic() + START_TIMEOUT_S
            while True:
                try:
                    prometheus.query("vector(1)")
                    break
                except OSError:
                    said = (folder / "prometheus.log").read_text()[-3000:]
                    assert process.poll() is None, said
                    assert time.monotonic() < deadline, said
                    time.sleep(0.1)
            yield prometheus
        finally:
            process.terminate()
