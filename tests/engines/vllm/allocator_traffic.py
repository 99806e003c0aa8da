"""A program that drives an in-process vLLM engine step by step: allocator_traffic.py JOB.

``JOB`` is a file of JSON: ``engine`` (keyword arguments of ``LLM``) and ``acts``, names of the functions below, run in
this order in one engine. Those after "healthy" break the allocator, or the prefix index, on purpose, and mend it again
behind its back. Prints one line, ``RESULT`` and JSON: the ``tokens`` of every request by its name; or an ``error``.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

BLOCK = 32


class Driver:
    """An engine, and what its requests have answered."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.tokens: dict[str, list[list[int]]] = {}

    def add(self, name: str, prompt: list[int], *, max_tokens: int = 8, **options: Any) -> None:
        """Add a request; ``salt`` and ``n`` are understood."""
        from vllm import SamplingParams

        n = options.get("n", 1)
        sampling = SamplingParams(
            temperature=0 if n == 1 else 1, seed=7, n=n, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if "salt" in options:
            given["cache_salt"] = options["salt"]
        self.engine.add_request(name, given, sampling)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.tokens[output.request_id] = [list(part.token_ids) for part in output.outputs]

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def ask(self, name: str, prompt: list[int], **options: Any) -> list[int]:
        """The answer to a request that runs alone."""
        self.add(name, prompt, **options)
        self.finish()
        return self.tokens[name][0]

    def blocks_of(self, name: str) -> list[Any]:
        (held,) = [r for r in self.scheduler.running if r.request_id.startswith(f"{name}-")]
        return [block for block in self.manager.get_blocks(held.request_id).blocks[0] if not block.is_null]


def prompt_of(seed: int, blocks: int) -> list[int]:
    return [3 + (seed * 7919 + i * 31) % 200 for i in range(blocks * BLOCK + 5)]


def healthy(driver: Driver) -> None:
    """Conversations, several samples, aborts and their names used again, salts, resets and new weights."""
    history = {name: prompt_of(seed, 3) for seed, name in enumerate(("ann", "bob", "cid"))}
    for turn in range(3):
        for name, said in history.items():
            driver.add(f"{name}{turn}", said)
        driver.finish()
        for name in history:
            history[name] += driver.tokens[f"{name}{turn}"][0] + prompt_of(turn, 1)
    driver.add("samples", prompt_of(9, 2), n=3)
    driver.finish()
    for name in ("left", "stays", "goes"):
        driver.add(name, prompt_of(10, 4), max_tokens=40)
    driver.step(5)
    driver.engine.abort_request(["left", "goes"])
    driver.add("left", prompt_of(11, 4))
    driver.finish()
    for salt in ("x", "y", "x"):
        driver.ask(f"salt_{salt}", prompt_of(12, 3), salt=salt)
    driver.ask("unsalted", prompt_of(12, 3))
    for reset_running in (False, True):
        driver.add(f"reset_{reset_running}", prompt_of(10, 4), max_tokens=10)
        if reset_running:
            driver.step(3)
        driver.llm.reset_prefix_cache(reset_running_requests=reset_running)
        driver.finish()
    driver.llm.collective_rpc("reload_weights")
    driver.llm.reset_prefix_cache()
    driver.ask("new_weights", prompt_of(10, 4))


def crowded(driver: Driver) -> None:
    """More requests than the pool holds: most are preempted and resumed, some aborted while they wait."""
    for i in range(10):
        driver.add(f"crowd{i}", prompt_of(20 + i % 3, 2 + i % 4), max_tokens=48)
    driver.step(30)
    driver.engine.abort_request(["crowd3", "crowd7"])
    driver.finish()


def stale_weights(driver: Driver) -> None:
    """A prefix is hit that was computed under earlier weights, which were changed as a trainer's extension does it."""
    driver.ask("old_weights", prompt_of(30, 3))
    driver.llm.apply_model(lambda model: model.load_weights([]))
    driver.ask("stale_weights", prompt_of(30, 3))
    driver.llm.reset_prefix_cache()


def forgotten_salt(driver: Driver) -> None:
    """The prefix cache's key leaves the salt out."""
    keys = "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys"
    with mock.patch(keys, return_value=(None, 0)):
        driver.ask("first_salt", prompt_of(31, 3), salt="x")
        driver.ask("forgotten_salt", prompt_of(31, 3), salt="y")
    driver.llm.reset_prefix_cache()


def wrong_hit(driver: Driver) -> None:
    """The prefix index leads to a block of another prompt."""
    driver.add("right", prompt_of(32, 3))
    driver.add("other", prompt_of(33, 3))
    driver.step(2)
    right, other = driver.blocks_of("right"), driver.blocks_of("other")
    driver.finish()
    driver.pool.cached_block_hash_to_block._cache[right[1].block_hash] = other[1]
    driver.ask("wrong_hit", prompt_of(32, 3))
    driver.llm.reset_prefix_cache()


def double_free(driver: Driver) -> None:
    """One block of a running request is freed that the request has not given back."""
    driver.add("freed_once", prompt_of(34, 3), max_tokens=12)
    driver.add("double_free", prompt_of(34, 3), max_tokens=12)
    driver.step(2)
    block = driver.blocks_of("double_free")[0]
    assert block.ref_cnt == 2
    driver.pool.free_blocks([block])
    block.ref_cnt += 1
    driver.finish()
    driver.llm.reset_prefix_cache()


def double_allocation(driver: Driver) -> None:
    """A block that a running request writes to is in the free list, and the next request gets it."""
    driver.add("robbed", prompt_of(35, 2), max_tokens=12)
    driver.step(2)
    block = driver.blocks_of("robbed")[-1]
    block.ref_cnt = 0
    driver.pool.free_block_queue.prepend_n([block])
    driver.add("double_allocation", prompt_of(36, 1), max_tokens=4)
    driver.step(2)
    block.ref_cnt = 2
    driver.finish()
    driver.llm.reset_prefix_cache()


def missing_touch(driver: Driver) -> None:
    """A prefix hit takes no reference."""
    driver.ask("cached", prompt_of(37, 3))
    untouched: list[Any] = []
    driver.pool.touch = untouched.extend
    driver.add("missing_touch", prompt_of(37, 3))
    driver.step()
    del driver.pool.touch
    type(driver.pool).touch.__wrapped__(driver.pool, untouched)
    driver.finish()
    driver.llm.reset_prefix_cache()


ACTS: dict[str, Callable[[Driver], None]] = {
    act.__name__: act
    for act in (
        healthy,
        crowded,
        stale_weights,
        forgotten_salt,
        wrong_hit,
        double_free,
        double_allocation,
        missing_touch,
    )
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    driver = Driver(job["engine"])
    result: dict[str, object]
    try:
        for act in job["acts"]:
            ACTS[act](driver)
        result = {"tokens": driver.tokens}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    # One write, so that no other process's output gets in between.
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
