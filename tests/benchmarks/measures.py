"""What the canary costs, each figure a ratio to a plain read or copy of the same bytes in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from kvcanary_agent.canary import (
    Canary,
    CheckCounts,
    ForwardStep,
    GroupStep,
    KnownTokens,
    KVGroup,
    KVLayout,
    KVPart,
    Violation,
)
from kvcanary_agent.kernels.checks import Checks
from kvcanary_agent.kernels.dispatch import checks_for
from kvcanary_agent.kernels.hashing import as_words
from kvcanary_agent.kernels.plan import Rows, Writes
from kvcanary_agent.kernels.records import Records
from kvcanary_agent.kernels.ring import ViolationRing
from kvcanary_agent.kernels.tuned import TunedChecks
from kvcanary_agent.kernels.tuned.fingerprint import Fingerprinter
from kvcanary_agent.settings import Content, Settings
from tests.canary.toy import RecordingSink

BLOCK = 16

# What SGLang 0.5.23's own kv-canary costs on a CPU, in seconds a slot: its torch reference, one thread, 4,096 slots,
# made to run there for this measurement. Times of another day, good for an order of magnitude. A slot's bytes are those
# of one half of one layer.
SGLANG_VERIFY_METADATA = 53e-6
SGLANG_VERIFY_1024_BYTES = 220e-6
SGLANG_WRITE = 69e-6


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call. They take turns, so that whatever else the machine does hits all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(of_call) for name, of_call in times.items()}


def payloads() -> dict[str, torch.Tensor]:
    """One part of a pool in several layouts, ``[blocks, block_size, *payload]``, 32 MB of payload each."""
    blocks = 1024
    data = torch.randint(-(2**15), 2**15, (blocks, BLOCK, 8, 128), dtype=torch.int16)
    head_major = data.view(blocks, 8, BLOCK, 128).transpose(1, 2)
    packed = torch.randint(-(2**15), 2**15, (blocks, BLOCK, 8, 256), dtype=torch.int16)[..., :128]
    return {"contiguous": data, "head-major": head_major, "K packed with V": packed}


def fingerprint_speeds(rounds: int) -> dict[str, float]:
    """Speed of fingerprinting blocks, in random order except for ``contiguous``, as a share of a plain read."""
    views = payloads()
    read = views["contiguous"].view(torch.int64)
    generator = torch.Generator().manual_seed(0)
    calls: dict[str, Callable[[], object]] = {"read": read.sum}
    for name, view in views.items():
        blocks = torch.arange(view.shape[0])
        if name != "contiguous":
            blocks = torch.randperm(view.shape[0], generator=generator)
        # As many parts as a Llama-3-8B's pool has, so that scratch is as large as there.
        fingerprinter = Fingerprinter([as_words(view)] * 64, [torch.bfloat16] * 64)
        calls[name] = partial(fingerprinter.of_blocks, 0, blocks)
    seconds = interleaved(calls, rounds)
    return {name: seconds["read"] / seconds[name] for name in views}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Requests of one length whose records are entered, ready to be verified, or entered again."""

    records: Records
    checks: Checks
    rows: Rows
    writes: Writes

    def enter(self) -> None:
        self.checks.enter(self.rows, self.writes, None, None, False)

    def verify(self) -> None:
        """Look at every slot, also at those that were as they should be the last time."""
        if isinstance(self.checks, TunedChecks):
            self.checks._screen.forget()
        self.checks.verify_reads(self.rows, None, None)

    def gather(self) -> torch.Tensor:
        """A plain gather of all that `verify` looks at."""
        table = self.records.table.view(self.records.num_blocks, -1)
        return table.index_select(0, self.rows.block_table.view(-1))

    def copy(self) -> None:
        """A plain copy of the records that `enter` writes: out of their slots, and back."""
        self.records.table.index_copy_(0, self.writes.slots, self.records.table.index_select(0, self.writes.slots))


def batch(num_rows: int, length: int, *, new: int, device: str = "cpu") -> Batch:
    """Rows of ``length`` tokens whose last ``new`` ones are written by the step."""
    blocks = -(-length // BLOCK)
    records = Records(num_rows * blocks, BLOCK, torch.device(device), [])
    checks = checks_for(records, ViolationRing(64, records.device), 0, lambda *_: None)
    order = torch.randperm(num_rows * blocks, generator=torch.Generator().manual_seed(1)).to(device)
    block_table = order.view(num_rows, blocks)

    def step_of(prefix: int, count: int) -> tuple[Rows, Writes]:
        positions = torch.arange(prefix, prefix + count, device=device).repeat(num_rows)
        write_rows = torch.arange(num_rows, device=device).repeat_interleave(count)
        rows = Rows(
            step=1,
            owners=torch.arange(1, num_rows + 1, dtype=torch.int32, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
            prefix_lens=torch.full((num_rows,), prefix, device=device),
            block_table=block_table,
            held=None,
            held_rows=torch.full((num_rows,), -1, device=device),
            references=torch.zeros(num_rows * blocks, dtype=torch.int32, device=device),
            first_holders=torch.full((num_rows * blocks,), -1, dtype=torch.int32, device=device),
        )
        writes = Writes(
            rows=write_rows,
            offsets=torch.arange(0, num_rows * count + 1, count, device=device)
            if count
            else torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
            tokens=positions % 50_000,
            positions=positions,
            slots=block_table[write_rows, positions // BLOCK] * BLOCK + positions % BLOCK,
            known=None,
        )
        return rows, writes

    rows, writes = step_of(0, length)
    checks.enter(rows, writes, None, None, False)
    if new < length:
        rows, writes = step_of(length, 0)
    return Batch(records=records, checks=checks, rows=rows, writes=writes)


def metadata_costs(rounds: int) -> dict[str, float]:
    """Time of verifying 64 x 4,096 slots, in gathers, and of entering 32,768 tokens, in copies of their records."""
    reads, prefill = batch(64, 4096, new=0), batch(1, 32_768, new=32_768)
    seconds = interleaved(
        {"verify": reads.verify, "gather": reads.gather, "enter": prefill.enter, "copy": prefill.copy}, rounds
    )
    return {"verify": seconds["verify"] / seconds["gather"], "enter": seconds["enter"] / seconds["copy"]}


def growth(rounds: int, *, largest: int = 1 << 20) -> dict[int, float]:
    """How many times longer it takes to verify twice the slots, by the larger number of slots."""
    sizes = [4096]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    batches = {size: batch(max(1, size // 4096), 4096, new=0) for size in sizes}
    seconds = interleaved({str(size): of_size.verify for size, of_size in batches.items()}, rounds)
    return {size: seconds[str(size)] / seconds[str(size // 2)] for size in sizes[1:]}


def speed_over_sglang(rounds: int) -> dict[str, float]:
    """How many times less a slot costs than with `SGLANG_VERIFY_METADATA` and its like, whose checks are fewer."""
    reads, prefill = batch(1, 4096, new=0), batch(1, 4096, new=4096)
    view = torch.randint(-(2**15), 2**15, (4096 // BLOCK, BLOCK, 4, 128), dtype=torch.int16)
    # As many parts as a Llama-3-8B's pool has, so that scratch is as large as there.
    fingerprinter = Fingerprinter([as_words(view)] * 64, [torch.bfloat16] * 64)
    compared = partial(fingerprinter.of_blocks, 0, torch.randperm(view.shape[0]))
    seconds = interleaved({"verify": reads.verify, "write": prefill.enter, "content": compared}, rounds)
    return {
        "verify": 4096 * SGLANG_VERIFY_METADATA / seconds["verify"],
        "write": 4096 * SGLANG_WRITE / seconds["write"],
        "content": 4096 * SGLANG_VERIFY_1024_BYTES / seconds["content"],
    }


class _Clock(RecordingSink):
    """Adds up the passes of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[int, float] = {}

    def pass_finished(
        self, phase: str, step: int, start_ns: int, end_ns: int, counts: CheckCounts, violations: tuple[Violation, ...]
    ) -> None:
        self.seconds[step] = self.seconds.get(step, 0.0) + (end_ns - start_ns) / 1e9


class DecodeStep:
    """A decode step: requests of one context length each write one token to a pool of several layers."""

    def __init__(
        self,
        *,
        rows: int,
        context: int,
        layers: int,
        heads: int,
        dim: int,
        block: int,
        content: Content,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        pages: bool = False,
    ) -> None:
        """Compute the context of all rows.

        Args:
            rows, context, layers, heads, dim, block, content, dtype, device: Of the pool and of the requests.
            pages: K and V apart in each head's page, K as ``[dim, block]`` and V as ``[block, dim]``, as vLLM's
                attention on CPUs keeps them; otherwise side by side in each slot.
        """
        per_row = -(-(context + 512) // block)
        data = torch.randn(layers, rows * per_row + 1, heads, block, 2 * dim, device=device, dtype=dtype)
        if pages:
            halves = data.view(layers, -1, heads, 2, block * dim)
            k = halves[..., 0, :].view(layers, -1, heads, dim, block).permute(0, 1, 4, 2, 3)
            v = halves[..., 1, :].view(layers, -1, heads, block, dim).transpose(2, 3)
        else:
            k, v = (data.transpose(2, 3)[..., half * dim :][..., :dim] for half in range(2))
        parts = tuple(
            KVPart(layer=f"layers.{layer}", part=name, view=view[layer])
            for layer in range(layers)
            for name, view in (("k", k), ("v", v))
        )
        group = KVGroup(name="full", block_size=block, parts=parts, null_block=0)
        self.sink = _Clock()
        self.canary = Canary(KVLayout(engine="benchmark", groups=(group,)), Settings(content=content), self.sink)
        self.data, self._block, self._rows, self._device = data, block, rows, device
        self._views = k, v
        self._block_table = torch.arange(1, rows * per_row + 1, dtype=torch.int32, device=device).view(rows, per_row)
        self._tokens = torch.arange(per_row * block, dtype=torch.int32, device=device).repeat(rows, 1) % 1000
        self._requests = [f"request-{row}" for row in range(rows)]
        self._length = 0
        self.before(context)
        self.data += 1
        self.canary.after_forward()

    def before(self, count: int = 1) -> None:
        """Check a step that computes so many tokens of each request."""
        positions = torch.arange(self._length, self._length + count, device=self._device).repeat(self._rows)
        write_rows = torch.arange(self._rows, device=self._device).repeat_interleave(count)
        blocks = self._block_table[write_rows, positions // self._block].to(torch.int64)
        self._slots = blocks, positions % self._block
        self.canary.before_forward(
            ForwardStep(
                requests=self._requests,
                prefix_lens=torch.full((self._rows,), self._length, dtype=torch.int32, device=self._device),
                query_offsets=torch.arange(0, self._rows * count + 1, count, dtype=torch.int32, device=self._device),
                token_ids=(positions % 1000).to(torch.int32),
                positions=positions,
                groups=[GroupStep(block_table=self._block_table, write_slots=blocks * self._block + self._slots[1])],
                known_tokens=KnownTokens(
                    tokens=self._tokens,
                    rows=torch.arange(self._rows, device=self._device),
                    lengths=torch.full((self._rows,), self._length + count, device=self._device),
                ),
            )
        )
        self._length += count

    def after(self) -> None:
        """Write, then check what was written."""
        blocks, offsets = self._slots
        for view in self._views:
            view[:, blocks, offsets] += 1
        self.canary.after_forward()

    def __call__(self) -> None:
        self.before()
        self.after()

    def seconds(self) -> float:
        """Median time of the canary's own passes in the steps so far, the first one (the prefill) left out."""
        return statistics.median([seconds for step, seconds in self.sink.seconds.items() if step > 1])


def record_shares() -> dict[str, float]:
    """Records and scratch as a share of the pool they describe."""
    shapes = {
        "Llama-3-8B (32 layers, 8 heads of 128, bf16)": (64, (8, 128), torch.bfloat16),
        "MLA (61 layers of 576, bf16)": (61, (576,), torch.bfloat16),
        "tiny (2 layers, 2 heads of 16, bf16)": (4, (2, 16), torch.bfloat16),
    }
    shares = {}
    for name, (parts, payload, dtype) in shapes.items():
        views = [torch.empty((2048 // BLOCK, BLOCK, *payload), dtype=dtype) for _ in range(parts)]
        group = KVGroup(
            name="full",
            block_size=BLOCK,
            parts=tuple(KVPart(layer=str(part), part="k", view=view) for part, view in enumerate(views)),
        )
        sink = RecordingSink()
        canary = Canary(KVLayout(engine="benchmark", groups=(group,)), Settings(), sink)
        # The ring is one for all of a pool, whatever its size.
        shares[name] = (sink.record_bytes - canary._ring.num_bytes) / sink.pool_bytes
    return shares
