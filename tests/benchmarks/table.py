"""Prints what the canary costs on this machine: ``python -m tests.benchmarks.table [--gpu]``."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from kvcanary_agent.kernels.checks import Checks
from kvcanary_agent.settings import Content, Settings
from tests.benchmarks.measures import (
    DecodeStep,
    fingerprint_speeds,
    growth,
    interleaved,
    metadata_costs,
    record_shares,
    speed_over_sglang,
)
from tests.kernels.histories import Heard, Setting, hear, without_content_of_broken_chains

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
    """Each section by itself: one that fails is named, and the others are printed all the same."""
    row("device", torch.cuda.get_device_name())
    sections: list[tuple[str, Callable[[], None]]] = [("histories", partial(histories_agree, "cuda"))]
    sections += [(f"{context:,} tokens", partial(steps_on_gpu, context)) for context in (8_192, 32_768, 131_072)]
    for name, section in sections:
        start = time.perf_counter()
        try:
            section()
        except Exception as error:
            traceback.print_exc()
            row(f"{name}: FAILED", type(error).__name__)
        row(f"{name}: took", f"{time.perf_counter() - start:.0f} s")
        sys.stdout.flush()
        gc.collect()
        torch.cuda.empty_cache()


def histories_agree(device: str, *, seeds: int = 8, steps: int = 6) -> None:
    """The kernels on the device against the reference on the CPU: violations, records and fingerprints, bit for bit."""
    from kvcanary_agent.kernels.triton import TritonChecks

    for layout in ("token_major", "k_transposed", "raw_pages", "fp8_with_head_scales", "two_groups_over_one_storage"):
        differing = []
        for seed in range(seeds):
            setting = Setting(
                layout=layout,
                block_size=4,
                content="full" if seed % 2 else "scrub",
                known_tokens=True,
                reports_ownership=True,
                window=None,
                seed=seed,
                steps=steps,
            )
            with patch("kvcanary_agent.kernels.reference.reads._foreign_runs", lambda *arguments: arguments[-1]):
                reference = hear(setting, Checks)
            with torch.device(device):
                found = hear(setting, TritonChecks)
            if not heard_alike(found, reference):
                differing.append(seed)
        row(f"{seeds} histories, {layout}", f"seeds {differing} DIFFER" if differing else "as the reference")


def heard_alike(found: Heard, wanted: Heard) -> bool:
    """Whether both have heard the same in all, a device later than a CPU, and keep the same records."""

    def all_of(heard: Heard) -> list[tuple[int, ...]]:
        kept = without_content_of_broken_chains([[entry for of_pass in heard.entries for entry in of_pass]])
        return sorted(kept[0])

    return (
        all_of(found) == all_of(wanted)
        and all(torch.equal(a.cpu(), b) for a, b in zip(found.tables, wanted.tables, strict=True))
        and all(torch.equal(a.cpu(), b) for a, b in zip(found.fingerprints, wanted.fingerprints, strict=True))
    )


def steps_on_gpu(context: int) -> None:
    """Time on the device of whole steps, how long the host is held up by them, and a captured forward between them."""
    step = DecodeStep(
        rows=4, context=context, layers=32, heads=8, dim=128, block=16, content="scrub",
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    words = step.data.view(torch.int64)
    read = device_seconds(words.sum)
    pool = words.numel() * 8
    row(f"plain read of the pool, {pool / 1e9:.1f} GB", f"{pool / read / 1e12:.2f} TB/s")
    contents: tuple[Content, ...] = ("scrub", "full")
    for content in contents:
        step.canary.settings = Settings(content=content)
        step.sink.seconds.clear()
        seconds = device_seconds(step)
        row(f"decode step, 4 x {context:,} tokens, content={content}", f"{seconds * 1e6:.0f} us")
        row(
            "  of which the host, in the canary's passes",
            f"{statistics.median(step.sink.seconds.values()) * 1e6:.0f} us",
        )
        row("  speed, as a share of the plain read of the pool", f"{read / seconds:.2f}")
    blocks, offsets = (each.clone() for each in step._slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.data[:, blocks, :, offsets] += 1
    for _ in range(5):
        step.before()
        blocks.copy_(step._slots[0])
        offsets.copy_(step._slots[1])
        graph.replay()
        step.canary.after_forward()
    torch.cuda.synchronize()
    step.canary.sweep()
    step.canary._hear(wait=True)
    found = [f"{kind} x{count}" for kind, count in Counter(v.kind for v in step.sink.violations).items()]
    row("violations, the steps around a captured forward included", ", ".join(found) or "none")


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
