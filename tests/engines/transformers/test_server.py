"""``transformers serve`` under the agent."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.engines.processes import TIMEOUT_S, checked, start
from tests.engines.transformers.harness import ENVIRONMENT, EXPORTED_WITHIN_S, Engine
from tests.otlp_receiver import HttpOtlpReceiver


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def complete(port: int, model: Path, prompt: str) -> str:
    """The server's answer, when it is up."""
    body = {"model": str(model), "prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return str(json.load(response)["choices"][0]["text"])
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        except urllib.error.URLError:
            assert time.monotonic() < until
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("pool", "options"),
    [
        ("kv", ["--continuous-batching", "--cb-block-size", "16", "--cb-num-blocks", "64"]),
        ("generate", []),
    ],
    ids=["continuous_batching", "generate"],
)
def test_the_server_answers_as_without_the_agent_and_is_checked(engine: Engine, pool: str, options: list[str]) -> None:
    model = engine.models / "llama"
    prompts = [" ".join(f"t{token}" for token in range(start, start + 40)) for start in (10, 200, 10)]
    answers = []
    with HttpOtlpReceiver() as receiver:
        for agent in (["-m", "kvcanary_agent", "run"], []):
            port = free_port()
            program = Path(sys.executable).parent / "transformers"
            where = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
            exporting = {**receiver.environment(), "OTEL_METRIC_EXPORT_INTERVAL": "200", "KVCANARY_CONTENT": "full"}
            command: list[str | Path] = [sys.executable, *agent, program, "serve", model, *options, *where]
            with start(command, {**ENVIRONMENT, **(exporting if agent else {})}) as process:
                answers.append([complete(port, model, prompt) for prompt in prompts])
                if agent:
                    assert receiver.wait_for(checked("content", 1000), EXPORTED_WITHIN_S), process.tail()
        assert answers[0] == answers[1]
        assert receiver.points_of("kvcanary.checks", kvcanary_pool=pool)
        assert receiver.events("kvcanary.violation") == []
