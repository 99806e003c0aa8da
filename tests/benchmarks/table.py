"""Prints what the canary costs on this machine: ``python -m tests.benchmarks.table [--gpu]``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from kvcanary_agent.settings import Content
from tests.benchmarks.measures import (
    DecodeStep,
    fingerprint_speeds,
    growth,
    interleaved,
    metadata_costs,
    record_shares,
    speed_over_sglang,
)

ROUNDS = 15


def row(name: str, value: str) -> None:
    print(f"{name:<72}{value:>24}")


def on_cpu() -> None:
    torch.set_num_threads(1)
    for name, share in record_shares().items():
        row(f"records and scratch, {name}", f"{share:.2%}")
    for name, speed in fingerprint_speeds(ROUNDS).items():
        row(f"fingerprint, {name}: speed", f"{speed:.2f} reads")
    costs = metadata_costs(ROUNDS)
    row("verify metadata, 64 x 4,096 slots: time", f"{costs['verify']:.1f} gathers")
    row("enter a prefill of 32,768 tokens: time", f"{costs['enter']:.1f} copies")
    row("verify twice the slots, 4k to 1M: time at most", f"{max(growth(5).values()):.2f} times")
    for operation, factor in speed_over_sglang(ROUNDS).items():
        row(f"{operation}, against SGLang's own canary: time of a slot", f"1/{factor:,.0f}")
    contents: tuple[Content, ...] = ("off", "scrub", "full")
    for content in contents:
        step = DecodeStep(rows=8, context=1000, layers=8, heads=2, dim=64, block=32, content=content, pages=True)
        read = step.data.view(torch.int64)
        seconds = interleaved({"step": step, "read": read.sum}, 5 if content == "full" else 40)
        row(
            f"decode step of vLLM's CPU layout, 8 x 1,000 tokens, 67 MB, content={content}: time",
            f"{step.seconds() * 1e3:.2f} ms, {step.seconds() / seconds['read']:.3f} reads",
        )


def on_gpu() -> None:
    """Time on the device of whole steps, and how long the host is held up by them."""
    for context in (8_192, 32_768, 131_072):
        step = DecodeStep(
            rows=4, context=context, layers=32, heads=8, dim=128, block=16, content="scrub",
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        words = step.data.view(torch.int64)
        read = device_seconds(words.sum)
        pool = words.numel() * 8
        row(f"plain read of the pool, {pool / 1e9:.1f} GB", f"{pool / read / 1e12:.2f} TB/s")
        row(f"decode step, 4 x {context:,} tokens, content=scrub", f"{device_seconds(step) * 1e6:.0f} us")
        step.canary.settings = type(step.canary.settings)(content="full")
        seconds = device_seconds(step)
        row(f"decode step, 4 x {context:,} tokens, content=full", f"{read / seconds:.2f} of the read's speed")
        assert step.sink.violations == []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = words[0, :1024].sum()
        step.before()
        graph.replay()
        step.after()
        torch.cuda.synchronize()
        sound = not step.sink.violations
        row("a CUDA graph replayed between the two passes", "no violations" if sound else "VIOLATIONS")
        del step, words, graph, total
        torch.cuda.empty_cache()


def device_seconds(call: Callable[[], object], rounds: int = 20) -> float:
    """Time of a call among many: the host enqueues, the device works."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="measure a GPU instead of the CPU")
    on_gpu() if parser.parse_args().gpu else on_cpu()
