"""The server, as a process of its own, over HTTP."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcanary_agent
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.engine import Engine
from kvcanary_agent.demo.model import Batch
from kvcanary_agent.demo.server import EngineLoop, StepError

TIMEOUT_S = 60


class Client:
    """One running server. Every call opens a connection of its own, so that threads may share the client."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.address = json.loads(process.stdout.readline())

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = HTTPConnection(self.address["host"], self.address["port"], timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.load(response)
        finally:
            connection.close()


def start(*arguments: str) -> "subprocess.Popen[str]":
    # The folder that holds the package comes first, whether or not the package is installed.
    path = [str(Path(kvcanary_agent.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, *(arguments or ("-m", "kvcanary_agent.demo.server"))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
    )


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with start() as process:
        yield Client(process)
        process.terminate()


def outputs_of_an_undisturbed_engine(prompt: list[int], max_tokens: int, n: int = 1) -> list[list[int]]:
    [output] = Engine(EngineConfig()).generate([prompt], max_tokens=max_tokens, n=n)
    return [list(tokens) for tokens in output.outputs]


def test_it_listens_on_the_loopback_interface(client: Client) -> None:
    assert client.address["host"] == "127.0.0.1"


def test_requests_served_together_get_the_outputs_they_get_alone(client: Client) -> None:
    prompts = [[index] * 30 for index in range(10)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(
            pool.map(lambda prompt: client.call("POST", "/generate", {"prompt": prompt, "max_tokens": 15}), prompts)
        )

    assert answers == [
        (200, {"request_id": answer["request_id"], "outputs": outputs_of_an_undisturbed_engine(prompt, 15)})
        for prompt, (_, answer) in zip(prompts, answers, strict=True)
    ]


def test_a_text_prompt_with_several_continuations(client: Client) -> None:
    status, answer = client.call("POST", "/generate", {"prompt": "Grüße", "max_tokens": 5, "n": 3})

    assert status == 200
    assert answer["outputs"] == outputs_of_an_undisturbed_engine(list("Grüße".encode()), 5, n=3)


def test_health_says_what_the_engine_holds(client: Client) -> None:
    status, health = client.call("GET", "/health")

    assert status == 200
    assert health == {
        "status": "ok",
        "running": 0,
        "waiting": 0,
        "preemptions": 0,
        "free_blocks": 127,
        "waiting_faults": 0,
    }


def test_metrics_are_those_of_the_global_meter_provider(client: Client) -> None:
    client.call("POST", "/generate", {"prompt": [1], "max_tokens": 5})

    status, data = client.call("GET", "/metrics")

    assert status == 200
    recorded = [
        metric["name"]
        for resource in data["resource_metrics"]
        for scope in resource["scope_metrics"]
        for metric in scope["metrics"]
    ]
    assert "demo.generated_tokens" in recorded


LOGGING_SERVER = """\
from opentelemetry._logs import get_logger, SeverityNumber
from kvcanary_agent.demo import engine, server

class Engine(engine.Engine):
    def step(self):
        get_logger("test").emit(
            body="a step", severity_number=SeverityNumber.WARN, event_name="test.step", attributes={"test.slot": 7}
        )
        return super().step()

server.Engine = Engine
server.main()
"""


def test_logs_are_what_the_global_logger_provider_was_given() -> None:
    with start("-c", LOGGING_SERVER) as process:
        client = Client(process)
        assert client.call("GET", "/logs") == (200, [])
        client.call("POST", "/generate", {"prompt": [1], "max_tokens": 2})
        status, records = client.call("GET", "/logs")
        process.terminate()

    assert status == 200
    assert len(records) == 2
    assert (records[0]["body"], records[0]["event_name"], records[0]["severity_number"]) == ("a step", "test.step", 13)
    assert records[0]["attributes"] == {"test.slot": 7}


def wait_until_a_fault_waits(client: Client) -> None:
    while client.call("GET", "/health")[1]["waiting_faults"] == 0:
        pass


def test_a_fault_waits_for_a_running_request_and_changes_its_answer(client: Client) -> None:
    prompt = list(range(20))
    with ThreadPoolExecutor(1) as pool:
        fault = pool.submit(client.call, "POST", "/fault", {"kind": "flip_byte", "layer": 1, "position": 25})
        wait_until_a_fault_waits(client)
        _, answer = client.call("POST", "/generate", {"prompt": prompt, "max_tokens": 60, "request_id": "victim"})

    status, injected = fault.result()
    assert status == 200
    assert (injected["kind"], injected["request_id"]) == ("flip_byte", "victim")
    assert (injected["layer"], injected["part"], injected["position"]) == (1, "key", 25)
    [clean] = outputs_of_an_undisturbed_engine(prompt, 60)
    [corrupted] = answer["outputs"]
    assert corrupted[:6] == clean[:6]
    assert corrupted != clean


def test_a_double_allocation_reaches_two_requests_that_run_together(client: Client) -> None:
    def generate(name: str) -> tuple[int, Any]:
        return client.call("POST", "/generate", {"prompt": [ord(name)] * 20, "max_tokens": 200, "request_id": name})

    with ThreadPoolExecutor(3) as pool:
        fault = pool.submit(client.call, "POST", "/fault", {"kind": "double_allocation"})
        wait_until_a_fault_waits(client)
        while not fault.done():
            assert [status for status, _ in pool.map(generate, "ab")] == [200, 200]

    status, injected = fault.result()
    assert status == 200
    assert {injected["request_id"], injected["other_request_id"]} == {"a", "b"}


def test_a_failed_step_fails_its_requests_and_the_next_request_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig())
    loop = EngineLoop(engine)

    def failing_forward(batch: Batch) -> torch.Tensor:
        raise RuntimeError("wrong bytes")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", failing_forward)
        failed = [loop.generate([token], max_tokens=3, n=2, request_id=None) for token in (1, 2)]
        for future in failed:
            with pytest.raises(StepError, match="RuntimeError: wrong bytes"):
                future.result(TIMEOUT_S)

    output = loop.generate([1], max_tokens=3, n=1, request_id=None).result(TIMEOUT_S)
    loop.stop()
    assert [list(tokens) for tokens in output.outputs] == outputs_of_an_undisturbed_engine([1], 3)
    assert engine.block_manager.num_free == 127


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {"prompt": [1], "max_tokens": 10_000}, "at most 512"),
        ("/generate", {"prompt": [1]}, "max_tokens and n must be whole numbers"),
        ("/generate", {"prompt": 1, "max_tokens": 1}, "prompt must be a text or a list of token ids"),
        ("/generate", {"prompt": [1], "max_tokens": 1, "temperature": 1}, "unknown: temperature"),
        ("/generate", [1], "the body must be a JSON object"),
        ("/fault", {"kind": "flip"}, "must be one of flip_byte, double_allocation"),
        ("/fault", {"kind": "flip_byte", "layer": 99}, "layer is 99"),
        ("/fault", {"kind": "flip_byte", "colour": 1}, "colour"),
    ],
)
def test_a_wrong_request_is_answered_400_and_says_why(client: Client, path: str, body: Any, message: str) -> None:
    status, answer = client.call("POST", path, body)

    assert status == 400
    assert message in answer["error"]


def test_an_unknown_path_is_answered_404(client: Client) -> None:
    assert client.call("GET", "/generate") == (
        404,
        {"error": "GET /generate is unknown; try /health or /metrics or /logs"},
    )


def test_it_ends_cleanly_when_terminated() -> None:
    with start() as process:
        Client(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
