"""An HTTP server around the engine. It prints one line of JSON, {"host", "port", "pid"}, once it accepts connections.

    POST /generate  {"prompt": text or [token ids], "max_tokens", "n"?, "request_id"?} -> {"request_id", "outputs"}
    POST /fault     {"kind": "flip_byte" or "double_allocation", ...keywords of that function in `corruption`}
    GET  /health    what the engine is doing
    GET  /metrics   what the process has recorded with the global OpenTelemetry meter provider, as the SDK's JSON
    GET  /logs      what the process has emitted to the global OpenTelemetry logger provider, oldest first, likewise

The bytes of a text prompt, in UTF-8, are its token ids. A fault strikes before the first step that finds a running
request to fit it; the reply comes then. Errors are {"error"}, with status 400 for a wrong request and 500 for a failed
step.
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from opentelemetry import metrics
from opentelemetry._logs import set_logger_provider
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.corruption import DoubleAllocation, FlippedByte, double_allocation, flip_byte
from kvcanary_agent.demo.engine import Engine, RequestOutput

HOST = "127.0.0.1"

Fault = Callable[[Engine], FlippedByte | DoubleAllocation | None]
FAULTS: dict[str, Callable[..., FlippedByte | DoubleAllocation | None]] = {
    "flip_byte": flip_byte,
    "double_allocation": double_allocation,
}


class StepError(Exception):
    """The step failed that a request was part of."""


class EngineLoop:
    """The thread that owns the engine. Its methods may be called from any thread; what they return is a future."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, Future[RequestOutput]] = {}
        self._faults: list[tuple[Fault, Future[FlippedByte | DoubleAllocation]]] = []
        self._generated_tokens = metrics.get_meter("kvcanary_agent.demo").create_counter(
            "demo.generated_tokens", unit="{token}", description="Tokens of finished requests"
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def generate(
        self, prompt: list[int], *, max_tokens: int, n: int, request_id: str | None
    ) -> "Future[RequestOutput]":
        """Serve one request. Fails with ValueError if the engine refuses it, with StepError if a step fails."""
        future: Future[RequestOutput] = Future()

        def add() -> None:
            try:
                added_id = self._engine.add_request(prompt, max_tokens=max_tokens, n=n, request_id=request_id)
            except ValueError as error:
                future.set_exception(error)
            else:
                self._requests[added_id] = future

        self._commands.put(add)
        return future

    def inject(self, fault: Fault) -> "Future[FlippedByte | DoubleAllocation]":
        """Try `fault` before every step until it finds a request that fits, and answer with what it did."""
        future: Future[FlippedByte | DoubleAllocation] = Future()
        self._commands.put(lambda: self._faults.append((fault, future)))
        return future

    def health(self) -> "Future[dict[str, Any]]":
        future: Future[dict[str, Any]] = Future()

        def look() -> None:
            scheduler = self._engine.scheduler
            future.set_result(
                {
                    "status": "ok",
                    "running": len(scheduler.running),
                    "waiting": len(scheduler.waiting),
                    "preemptions": scheduler.num_preemptions,
                    "free_blocks": self._engine.block_manager.num_free,
                    "waiting_faults": len(self._faults),
                }
            )

        self._commands.put(look)
        return future

    def stop(self) -> None:
        """End the thread after the step it is in. Unfinished requests stay unanswered."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            while self._engine.is_idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
                self._try_faults()
            self._try_faults()
            try:
                finished = self._engine.step()
            except Exception as error:
                traceback.print_exc()
                self._fail_all(error)
            else:
                for output in finished:
                    self._generated_tokens.add(sum(map(len, output.outputs)))
                    self._requests.pop(output.request_id).set_result(output)

    def _try_faults(self) -> None:
        untried, self._faults = self._faults, []
        for fault, future in untried:
            try:
                injected = fault(self._engine)
            except (TypeError, ValueError) as error:
                future.set_exception(error)
                continue
            if injected is None:
                self._faults.append((fault, future))
            else:
                future.set_result(injected)

    def _fail_all(self, error: Exception) -> None:
        """Answer every request with `error`; the server goes on with an engine that has forgotten all of them."""
        self._engine.abort_all()
        for future in self._requests.values():
            future.set_exception(StepError(f"{type(error).__name__}: {error}"))
        self._requests.clear()


class Server(ThreadingHTTPServer):
    """Listens on the loopback interface only, at `port`, or at a free one for 0."""

    daemon_threads = True

    def __init__(
        self, port: int, loop: EngineLoop, metric_reader: InMemoryMetricReader, log_records: InMemoryLogRecordExporter
    ) -> None:
        super().__init__((HOST, port), Handler)
        self.loop = loop
        self.metric_reader = metric_reader
        self.log_records = log_records


class Handler(BaseHTTPRequestHandler):
    """Answers one connection, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    # Buffered, so that headers and body leave in one packet: in two, Nagle's algorithm holds back the second for 40 ms.
    wbufsize = -1
    server: Server

    def do_GET(self) -> None:
        self._answer({"/health": self._health, "/metrics": self._metrics, "/logs": self._logs})

    def do_POST(self) -> None:
        self._answer({"/generate": self._generate, "/fault": self._fault})

    def log_message(self, format: str, *args: Any) -> None:
        """No access log: standard error is for failures."""

    def _answer(self, routes: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        route = routes.get(self.path)
        if route is None:
            self._send(404, {"error": f"{self.command} {self.path} is unknown; try {' or '.join(routes)}"})
            return
        try:
            arguments = json.loads(body or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("the body must be a JSON object")
            answer = route(arguments)
        except (TypeError, ValueError) as error:
            self._send(400, {"error": str(error)})
        except StepError as error:
            self._send(500, {"error": str(error)})
        else:
            self._send(200, answer)

    def _send(self, status: int, answer: Any) -> None:
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _generate(self, arguments: dict[str, Any]) -> Any:
        prompt, n = arguments.pop("prompt", None), arguments.pop("n", 1)
        max_tokens, request_id = arguments.pop("max_tokens", None), arguments.pop("request_id", None)
        if arguments:
            raise ValueError(f"unknown: {', '.join(arguments)}; known are prompt, max_tokens, n and request_id")
        if isinstance(prompt, str):
            prompt = list(prompt.encode())
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise ValueError("prompt must be a text or a list of token ids")
        if not isinstance(max_tokens, int) or not isinstance(n, int):
            raise ValueError("max_tokens and n must be whole numbers")
        if not isinstance(request_id, str | None):
            raise ValueError("request_id must be a text")
        future = self.server.loop.generate(prompt, max_tokens=max_tokens, n=n, request_id=request_id)
        return asdict(future.result())

    def _fault(self, arguments: dict[str, Any]) -> Any:
        kind = arguments.pop("kind", None)
        if kind not in FAULTS:
            raise ValueError(f"kind is {kind!r}, but must be one of {', '.join(FAULTS)}")
        injected = self.server.loop.inject(partial(FAULTS[kind], **arguments)).result()
        return {"kind": kind, **asdict(injected)}

    def _health(self, _: dict[str, Any]) -> Any:
        return self.server.loop.health().result()

    def _metrics(self, _: dict[str, Any]) -> Any:
        data = self.server.metric_reader.get_metrics_data()
        return json.loads(data.to_json()) if data is not None else {}

    def _logs(self, _: dict[str, Any]) -> Any:
        return [json.loads(record.to_json()) for record in self.server.log_records.get_finished_logs()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the demo engine over HTTP on the loopback interface.")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free port")
    port = parser.parse_args().port

    # The matrices are small: a second thread costs more than it does.
    torch.set_num_threads(1)
    metric_reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([metric_reader]))
    log_records = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]  # untyped in the SDK
    logger_provider = LoggerProvider()
    logger_provider.add_log_record_processor(SimpleLogRecordProcessor(log_records))
    set_logger_provider(logger_provider)
    loop = EngineLoop(Engine(EngineConfig()))
    with Server(port, loop, metric_reader, log_records) as server:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        try:
            print(json.dumps({"host": HOST, "port": server.server_port, "pid": os.getpid()}), flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            loop.stop()


if __name__ == "__main__":
    main()
