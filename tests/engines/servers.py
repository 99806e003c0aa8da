"""HTTP servers of real engines, on this machine alone."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request

from tests.engines.processes import TIMEOUT_S


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_it_serves(port: int) -> None:
    """Return at the first answer: a server says that it has started before it listens."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
