"""``vllm serve`` with the agent."""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.engines.servers import free_port, wait_until_it_serves
from tests.engines.vllm.harness import (
    ENGINE,
    EXPORTED_WITHIN_S,
    MAX_TOKENS,
    PROMPTS,
    READ_AT_LEAST,
    Engine,
    checked,
    offline_environment,
    start,
)
from tests.otlp_receiver import GrpcOtlpReceiver


def complete(port: int, model: Path, prompt: list[int]) -> str:
    body = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_a_server_answers_as_without_the_agent_and_exports_its_checks(engine: Engine) -> None:
    expected = engine.generate()["texts"][: len(PROMPTS)]
    model, port = engine.models / "llama", free_port()
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items() if value is not True]
    command: list[str | Path] = [
        *(sys.executable, "-m", "kvcanary_agent", "run", Path(sys.executable).with_name("vllm"), "serve", model),
        *(*options, "--enforce-eager", "--host=127.0.0.1", f"--port={port}"),
    ]
    with GrpcOtlpReceiver() as receiver:
        environment = {**receiver.environment(), "OTEL_METRIC_EXPORT_INTERVAL": "200", **offline_environment()}
        with start(command, environment) as server:
            server.wait_for("Application startup complete")
            wait_until_it_serves(port)
            with ThreadPoolExecutor(len(PROMPTS)) as clients:
                texts = list(clients.map(lambda prompt: complete(port, model, prompt), PROMPTS))
            arrived = receiver.wait_for(checked("chain", READ_AT_LEAST), EXPORTED_WITHIN_S)
        assert arrived, server.tail()

    assert texts == expected
    assert receiver.events("kvcanary.violation") == []
    assert receiver.latest("kvcanary.violations") is None
