"""``vllm serve`` under the agent and under load: python -m tests.engines.vllm.soak, with the engine's Python.

Many clients hold conversations of several turns that share prefixes, and some hang up in the middle of an answer; the
pool is too small for all of them, so blocks are evicted and requests preempted. Ends with status 0 if a million slots
were read and checked, nothing was reported, and a greedy probe is answered before and after the load as by a server
without the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.engines.make_models import VOCABULARY, make_model, models_folder
from tests.engines.servers import free_port, wait_until_it_serves
from tests.engines.vllm.harness import Process, offline_environment, passed_slots, start
from tests.otlp_receiver import HttpOtlpReceiver

SERVER = {
    "block-size": 32,
    "max-model-len": 1024,
    "max-num-seqs": 16,
    "max-num-batched-tokens": 512,
    "dtype": "float32",
    "kv-cache-memory-bytes": 12 << 20,
}
SLOTS_WANTED = 1_000_000
CHECKS = ("address", "unwritten", "position", "token", "chain", "ownership", "content", "write")
LONGEST_PROMPT_WORDS = 760
HANGS_UP = 0.15


class TooLong(Exception):
    """The prompt does not fit the model."""


class Server:
    """A running server of the tiny llama."""

    def __init__(self, process: Process, port: int, model: Path) -> None:
        self.process, self.port, self.model = process, port, model

    def complete(self, prompt: str, max_tokens: int, hang_up_after: int | None = None) -> str | None:
        """The answer to a prompt; None if the client has hung up after so many tokens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = {
            "model": str(self.model),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == http.client.BAD_REQUEST:
                raise TooLong
            if response.status != http.client.OK:
                raise RuntimeError(f"status {response.status}: {response.read(500)!r}")
            text, tokens = "", 0
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                tokens += 1
                if tokens == hang_up_after:
                    return None
        return text


@contextlib.contextmanager
def serving(model: Path, agent: bool, environment: dict[str, str]) -> Iterator[Server]:
    port = free_port()
    vllm = Path(sys.executable).with_name("vllm")
    run = [sys.executable, "-m", "kvcanary_agent", "run"] if agent else [sys.executable]
    options = [f"--{name}={value}" for name, value in SERVER.items()]
    command: list[str | Path] = [*run, vllm, "serve", model, *options]
    command += ["--enforce-eager", "--enable-prefix-caching", "--host=127.0.0.1", f"--port={port}"]
    with start(command, {**offline_environment(), **environment}) as process:
        process.wait_for("Application startup complete")
        # Its output has to be read, or it would block.
        reader = threading.Thread(target=lambda: process.output.extend(process.popen.stdout or ()), daemon=True)
        reader.start()
        wait_until_it_serves(port)
        yield Server(process, port, model)


def words(rng: random.Random, count: int) -> str:
    return "".join(f" t{rng.randrange(3, VOCABULARY)}" for _ in range(count))


def probe(server: Server) -> list[str | None]:
    """Answers to the same prompts, one after another."""
    rng = random.Random(0)
    return [server.complete(words(rng, length), 32) for length in (5, 31, 64, 200, 700)]


class Load:
    """Clients that hold conversations until they are stopped."""

    def __init__(self, server: Server, clients: int) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._server = server
        self._stopped = threading.Event()
        rng = random.Random(1)
        self._systems = [words(rng, length) for length in (40, 130, 260)]
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def run(self, minutes: float, receiver: HttpOtlpReceiver) -> None:
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and not self.errors:
            time.sleep(min(30, max(0.0, end - time.monotonic())))
            slots = {check: int(passed_slots(receiver, check)) for check in CHECKS}
            reported = len(receiver.events("kvcanary.violation"))
            print(f"{dict(self.counts)}, slots {slots}, violations {reported}", flush=True)
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        rng = random.Random(100 + number)
        try:
            while not self._stopped.is_set():
                self._converse(rng)
        except Exception as error:
            self.errors.append(f"client {number}: {type(error).__name__}: {error}")

    def _converse(self, rng: random.Random) -> None:
        text = rng.choice(self._systems)
        self.counts["conversations"] += 1
        while not self._stopped.is_set():
            text += words(rng, rng.randrange(5, 60))
            if text.count("t") > LONGEST_PROMPT_WORDS:
                return
            hang_up_after = rng.randrange(1, 20) if rng.random() < HANGS_UP else None
            try:
                answer = self._server.complete(text, rng.randrange(8, 64), hang_up_after)
            except TooLong:
                return
            self.counts["turns"] += 1
            if answer is None:
                self.counts["disconnects"] += 1
                return
            text += answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long the load lasts (default: 10)")
    parser.add_argument("--clients", type=int, default=32, help="how many at once (default: 32)")
    parser.add_argument("--content", default="scrub", help="KVCANARY_CONTENT (default: scrub)")
    options = parser.parse_args()
    make_model("llama", models_folder())
    model = models_folder() / "llama"

    with serving(model, agent=False, environment={}) as server:
        expected = probe(server)
    with HttpOtlpReceiver() as receiver:
        environment = {
            **receiver.environment(),
            "OTEL_METRIC_EXPORT_INTERVAL": "5000",
            "OTEL_TRACES_EXPORTER": "none",
            "KVCANARY_CONTENT": options.content,
        }
        with serving(model, agent=True, environment=environment) as server:
            before = probe(server)
            load = Load(server, options.clients)
            load.run(options.minutes, receiver)
            after = probe(server)
            receiver.wait_for(lambda receiver: passed_slots(receiver, "chain") >= SLOTS_WANTED, 10)
        violations = receiver.events("kvcanary.violation")
        slots = {check: int(passed_slots(receiver, check)) for check in CHECKS}
    said = [line for line in server.process.output if "kvcanary" in line]
    problems = [
        *load.errors,
        *(f"violation: {violation.body}" for violation in violations[:10]),
        *(["the probe before the load is answered otherwise"] if before != expected else []),
        *(["the probe after the load is answered otherwise"] if after != expected else []),
        *([f"only {slots['chain']} slots were checked"] if slots["chain"] < SLOTS_WANTED else []),
    ]
    print("".join(said))
    print(f"{options.clients} clients, {options.minutes} minutes: {dict(load.counts)}")
    print(f"slots checked: {slots}; violations: {len(violations)}; probes equal: {before == after == expected}")
    print("\n".join(problems) or "clean")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
