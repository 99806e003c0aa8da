"""A program with the demo engine in it that has every kind of trouble the agent counts, then serves until it is ended.

Its KV cache is corrupted once, beside what ``KVCANARY_DRILL`` does. What the demo engine cannot bring about (details
that did not fit a buffer, blocks that left a prefix cache, a class that cannot be patched) is reported through the
agent as an adapter would. Prints ``READY`` when all of it has happened.
"""

from __future__ import annotations

import time

from kvcanary_agent import runtime
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.corruption import flip_byte
from kvcanary_agent.demo.engine import Engine


class Unpatchable:
    """Has not the method that an adapter looks for."""


def serve(engine: Engine, number: int) -> None:
    for row in range(4):
        engine.add_request([row + 1] * 24, max_tokens=12, n=1, request_id=f"{number}-{row}")
    while not engine.is_idle:
        engine.step()


def main() -> None:
    engine = Engine(EngineConfig())
    serve(engine, 0)
    engine.add_request([9] * 40, max_tokens=20, n=1, request_id="victim")
    flipped = None
    while not engine.is_idle:
        flipped = flipped or flip_byte(engine)
        engine.step()
    assert flipped is not None
    runtime.telemetry().open_pool("demo", "", "small buffer", 0, 1).lost_violations(3)
    runtime.evicted("demo", [7], {"evicted": 1, "held": 2})
    runtime.patch_class("demo", Unpatchable, {"missing": lambda call, receiver: call()})
    print("READY", flush=True)
    number = 1
    while True:
        serve(engine, number)
        number += 1
        time.sleep(0.1)


if __name__ == "__main__":
    main()
