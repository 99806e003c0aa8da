"""``python -m sglang.launch_server`` with the agent, under clients of which some hang up."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.engines.processes import checked, start
from tests.engines.servers import free_port, wait_until_it_serves
from tests.engines.sglang.harness import (
    ENGINE,
    EXPORTED_WITHIN_S,
    MAX_TOKENS,
    PROMPTS,
    READ_AT_LEAST,
    Engine,
    engine_environment,
)
from tests.otlp_receiver import HttpOtlpReceiver


def body(prompt: list[int], *, tokens: int, stream: bool = False) -> str:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": stream})


def generate(port: int, prompt: list[int]) -> list[int]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate",
        body(prompt, tokens=MAX_TOKENS).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return list(json.load(response)["output_ids"])


def hang_up(port: int, prompt: list[int]) -> None:
    """Ask for a long answer and leave after the first piece of it."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    long_answer = body([*prompt, 9], tokens=400, stream=True)
    client.request("POST", "/generate", long_answer, {"Content-Type": "application/json"})
    client.getresponse().readline()
    client.close()


def test_a_server_is_checked_while_clients_come_and_go(engine: Engine) -> None:
    port = free_port()
    arguments = {**ENGINE, "model_path": engine.models / "llama", "port": port}
    options = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in arguments.items()
    ]
    command: list[str | Path] = [
        *(sys.executable, "-m", "kvcanary_agent", "run", "-m", "sglang.launch_server"),
        *options,
    ]
    with HttpOtlpReceiver() as receiver:
        environment = {**receiver.environment(), "OTEL_METRIC_EXPORT_INTERVAL": "200", **engine_environment()}
        with start(command, environment) as server:
            wait_until_it_serves(port)
            with ThreadPoolExecutor(2 * len(PROMPTS)) as clients:
                leaving = [clients.submit(hang_up, port, prompt) for prompt in PROMPTS]
                staying = [clients.submit(generate, port, prompt) for prompt in PROMPTS]
                answers = [client.result() for client in staying]
                for client in leaving:
                    client.result()
            again = [generate(port, prompt) for prompt in PROMPTS]
            arrived = receiver.wait_for(checked("chain", 2 * READ_AT_LEAST), EXPORTED_WITHIN_S)
        assert arrived, server.tail()

    assert [len(answer) for answer in answers] == [MAX_TOKENS] * len(PROMPTS)
    assert again == answers
    assert receiver.events("kvcanary.violation") == []
    assert receiver.latest("kvcanary.coverage", kvcanary_subject="pool kv") == 1
