"""A toy engine over a pool of any layout: it allocates, shares, computes and frees as engines do, and tells a canary.

What it writes for a token is a fixed function of the token, the prefix before it, its namespace, the weights' epoch and
the part, so that the same prefix always gives the same bytes, and nothing else does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcanary_agent.canary import (
    Canary,
    CheckCounts,
    ForwardStep,
    GroupStep,
    Kind,
    KnownTokens,
    KVGroup,
    KVLayout,
    KVPart,
    Sink,
    Violation,
)
from kvcanary_agent.settings import Settings

LAYERS, HEADS, DIM = 2, 2, 8
BLOCK_SIZE = 4


class RecordingSink(Sink):
    """Keeps all it hears."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.passes: list[tuple[str, int, CheckCounts, tuple[Violation, ...]]] = []
        self.found_at_flush: list[int] = []
        self.lost = 0
        self.record_bytes = self.pool_bytes = 0

    def violation(self, violation: Violation) -> None:
        self.violations.append(violation)

    def flush(self) -> None:
        self.found_at_flush.append(len(self.violations))

    def pass_finished(
        self, phase: str, step: int, start_ns: int, end_ns: int, counts: CheckCounts, violations: tuple[Violation, ...]
    ) -> None:
        assert start_ns <= end_ns
        self.passes.append((phase, step, counts, violations))

    def lost_violations(self, count: int) -> None:
        self.lost += count

    def records_memory(self, num_bytes: int, pool_bytes: int) -> None:
        self.record_bytes, self.pool_bytes = num_bytes, pool_bytes

    def drill(self, kind: str, step: int, description: str) -> None:
        raise AssertionError("a canary injects nothing by itself")

    def kinds(self) -> list[Kind]:
        return [violation.kind for violation in self.violations]

    def failed(self) -> dict[str, int]:
        """Failed slots of all passes, by check, where there are any."""
        total: dict[str, int] = {}
        for _, _, counts, _ in self.passes:
            for check, (slots, failed) in counts.slots.items():
                assert 0 <= failed <= slots
                if failed:
                    total[check] = total.get(check, 0) + failed
        return total


# Layouts. Each maker returns the groups of a pool of that many blocks.


def _layers(layer_parts: Callable[[int], Sequence[tuple[str, torch.Tensor]]]) -> tuple[KVPart, ...]:
    return tuple(
        KVPart(layer=f"layers.{layer}", part=part, view=view)
        for layer in range(LAYERS)
        for part, view in layer_parts(layer)
    )


def _full(parts: tuple[KVPart, ...], size: int, **group: Any) -> tuple[KVGroup, ...]:
    return (KVGroup(name="full", block_size=size, parts=parts, **group),)


def token_major(blocks: int, size: int, dtype: torch.dtype = torch.float32, **group: Any) -> tuple[KVGroup, ...]:
    data = torch.zeros(LAYERS, 2, blocks, size, HEADS, DIM, dtype=dtype)
    return _full(_layers(lambda layer: (("k", data[layer, 0]), ("v", data[layer, 1]))), size, **group)


def head_major(blocks: int, size: int, **group: Any) -> tuple[KVGroup, ...]:
    data = torch.zeros(LAYERS, 2, blocks, HEADS, size, DIM, dtype=torch.bfloat16).transpose(3, 4)
    return _full(_layers(lambda layer: (("k", data[layer, 0]), ("v", data[layer, 1]))), size, **group)


def packed_blocks_outermost(blocks: int, size: int, **group: Any) -> tuple[KVGroup, ...]:
    data = torch.zeros(blocks, LAYERS, size, HEADS, 2 * DIM, dtype=torch.bfloat16)
    return _full(
        _layers(lambda layer: (("k", data[:, layer, ..., :DIM]), ("v", data[:, layer, ..., DIM:]))), size, **group
    )


def interleaved(blocks: int, size: int, **group: Any) -> tuple[KVGroup, ...]:
    data = torch.zeros(LAYERS, blocks, size, HEADS, DIM, 2, dtype=torch.float16)
    return _full(_layers(lambda layer: (("k", data[layer, ..., 0]), ("v", data[layer, ..., 1]))), size, **group)


def k_transposed(blocks: int, size: int, **group: Any) -> tuple[KVGroup, ...]:
    k = torch.zeros(LAYERS, blocks, DIM, size, dtype=torch.float32).transpose(2, 3)
    v = torch.zeros(LAYERS, blocks, size, DIM, dtype=torch.float32)
    return _full(_layers(lambda layer: (("k", k[layer]), ("v", v[layer]))), size, **group)


def raw_pages(blocks: int, size: int, **group: Any) -> tuple[KVGroup, ...]:
    """Bytes only: a page holds all layers of a block, behind a header of odd length."""
    payload = HEADS * DIM * 2
    segment = size * payload
    page = 37 + LAYERS * 2 * segment
    data = torch.zeros(blocks * page, dtype=torch.uint8)

    def view(layer: int, part: int) -> torch.Tensor:
        return data.as_strided((blocks, size, payload), (page, payload, 1), 37 + (layer * 2 + part) * segment)

    parts = tuple(
        KVPart(layer=f"layers.{layer}", part=name, view=view(layer, part), number_type=torch.bfloat16)
        for layer in range(LAYERS)
        for part, name in enumerate(("k", "v"))
    )
    return _full(parts, size, **group)


def fp8_with_head_scales(blocks: int, size: int, **group: Any) -> tuple[KVGroup, ...]:
    data = torch.zeros(LAYERS, 2, blocks, size, HEADS, DIM, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(LAYERS, 2, blocks, HEADS, size).transpose(3, 4)

    def parts(layer: int) -> Sequence[tuple[str, torch.Tensor]]:
        values, scale = data[layer], scales[layer]
        return (("k", values[0]), ("v", values[1]), ("k_scale", scale[0]), ("v_scale", scale[1]))

    return _full(_layers(parts), size, **group)


def int8_with_slot_scales(blocks: int, size: int, **group: Any) -> tuple[KVGroup, ...]:
    data = torch.zeros(LAYERS, 2, blocks, size, HEADS, DIM, dtype=torch.int8)
    scales = torch.zeros(blocks, size, LAYERS, 2, dtype=torch.float16)

    def parts(layer: int) -> Sequence[tuple[str, torch.Tensor]]:
        values, scale = data[layer], scales[:, :, layer]
        return (("k", values[0]), ("v", values[1]), ("k_scale", scale[..., 0]), ("v_scale", scale[..., 1]))

    return _full(_layers(parts), size, **group)


def two_groups_over_one_storage(blocks: int, size: int, window: int = 6, **group: Any) -> tuple[KVGroup, ...]:
    """Full attention and a sliding window; a block belongs to whichever group it is handed out to."""
    data = torch.zeros(LAYERS, 2, blocks, size, HEADS, DIM)

    def parts(kind: str) -> tuple[KVPart, ...]:
        return tuple(
            KVPart(layer=f"{kind}.{layer}", part=name, view=data[layer, part])
            for layer in range(LAYERS)
            for part, name in enumerate(("k", "v"))
        )

    return (
        KVGroup(name="full", block_size=size, parts=parts("full"), **group),
        KVGroup(name="sliding", block_size=size, parts=parts("sliding"), window=window, **group),
    )


MakeGroups = Callable[..., tuple[KVGroup, ...]]
LAYOUTS: dict[str, MakeGroups] = {
    maker.__name__: maker
    for maker in (
        token_major,
        head_major,
        packed_blocks_outermost,
        interleaved,
        k_transposed,
        raw_pages,
        fp8_with_head_scales,
        int8_with_slot_scales,
        two_groups_over_one_storage,
    )
}


# The engine


@dataclass(slots=True, kw_only=True)
class Request:
    name: str
    tokens: list[int]
    namespace: str | None
    groups: int
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.groups)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a step.

    Attributes:
        count: How many tokens are computed.
        start: The first position computed; None: where the request stands.
        slots, positions, tokens: What the engine hands to the model instead of what is right (faults, of group 0).
        drop: Positions whose write is declared but does not happen.
    """

    request: str
    count: int = 1
    start: int | None = None
    slots: Sequence[int] | None = None
    positions: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    drop: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    group: int
    slot: int
    token: int
    prefix: tuple[int, ...]
    namespace: str | None


class ToyEngine:
    """An engine with its pool and its canary. By default every byte read is checked, and there is no patrol."""

    def __init__(
        self,
        layout: str | MakeGroups = token_major,
        *,
        blocks: int = 24,
        block_size: int = BLOCK_SIZE,
        reports_ownership: bool = True,
        known_tokens: bool = True,
        settings: dict[str, Any] | None = None,
        **group: Any,
    ) -> None:
        maker = LAYOUTS[layout] if isinstance(layout, str) else layout
        self.groups = maker(blocks, block_size, **group)
        self.block_size = block_size
        self.sink = RecordingSink()
        self.layout = KVLayout(engine="toy", groups=self.groups, reports_ownership=reports_ownership)
        self.canary = Canary(
            self.layout, Settings(**{"content": "full", "sweep_slots_per_step": 0, **(settings or {})}), self.sink
        )
        self.knows_tokens = known_tokens
        self.requests: dict[str, Request] = {}
        self.epoch = 0
        # Where groups lie over one storage, what happens to a block matters to all of them.
        self._groups_share_bytes = len(self.groups) > 1
        null_block = self.groups[0].null_block
        self.free_blocks = [block for block in range(blocks) if block != null_block]

    # Allocation

    def request(self, name: str, tokens: Iterable[int], namespace: str | None = None) -> Request:
        self.requests[name] = Request(name=name, tokens=list(tokens), namespace=namespace, groups=len(self.groups))
        return self.requests[name]

    def allocate(self, name: str, count: int) -> list[int]:
        """Hand out ``count`` new blocks in every group; those of the first group."""
        taken = []
        for group in range(len(self.groups)):
            blocks, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
            assert len(blocks) == count, "the pool of the test is too small"
            self.requests[name].tables[group] += blocks
            for told, teller in self._who_is_told(group, name):
                self.canary.allocated(blocks, group=told, request=teller)
            taken.append(blocks)
        return taken[0]

    def share(self, name: str, donor: str, count: int) -> None:
        """A prefix hit on the donor's first ``count`` blocks."""
        request = self.requests[name]
        for group, table in enumerate(self.requests[donor].tables):
            request.tables[group] += table[:count]
            for told, teller in self._who_is_told(group, name):
                self.canary.shared(table[:count], group=told, request=teller)
        request.computed += count * self.block_size

    def free(self, name: str, *, cached: bool = False, recycle: bool = True) -> None:
        """Give everything back; with ``recycle`` the blocks are the next to be handed out."""
        request = self.requests[name]
        for group, table in enumerate(request.tables):
            self.give_back(group, table, name, cached=cached, recycle=recycle)
        request.tables = [[] for _ in self.groups]
        request.computed = 0

    def give_back(
        self, group: int, blocks: Sequence[int], name: str, *, cached: bool = False, recycle: bool = True
    ) -> None:
        for told, teller in self._who_is_told(group, name):
            self.canary.freed(blocks, group=told, request=teller, cached=cached)
        if recycle:
            self.free_blocks = [*blocks, *self.free_blocks]

    def _who_is_told(self, group: int, name: str) -> list[tuple[int, str | None]]:
        """The groups that hear of an event, and in whose name."""
        if not self._groups_share_bytes:
            return [(group, name)]
        return [(told, name if told == group else None) for told in range(len(self.groups))]

    # Steps

    def start(
        self, name: str, tokens: Iterable[int], namespace: str | None = None, *, blocks: int | None = None
    ) -> Request:
        """A request arrives, gets its blocks and is prefilled in one step."""
        request = self.request(name, tokens, namespace)
        self.allocate(name, blocks or -(-len(request.tokens) // self.block_size))
        self.step(Row(request=name, count=len(request.tokens)))
        return request

    def decode(self, *names: str, steps: int = 1) -> None:
        """Sample tokens, one for each request and step."""
        for _ in range(steps):
            for name in names:
                request = self.requests[name]
                request.tokens.append((17 * request.tokens[-1] + len(request.tokens)) % 1000)
                if request.computed // self.block_size >= len(request.tables[0]):
                    self.allocate(name, 1)
            self.step(*[Row(request=name) for name in names])

    def plan(self, *rows: Row, pad_slots: Sequence[int] | None = None) -> tuple[ForwardStep, list[_Write]]:
        """The step as an adapter describes it, and the writes that the forward will do."""
        requests = [self.requests[row.request] for row in rows]
        starts = [r.computed if row.start is None else row.start for r, row in zip(requests, rows, strict=True)]
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self.groups]
        writes = []
        for request, row, start in zip(requests, rows, starts, strict=True):
            right = range(start, start + row.count)
            tokens = list(row.tokens or request.tokens[start : start + row.count])
            token_ids += tokens
            positions += row.positions or right
            for group, table in enumerate(request.tables):
                row_slots = [table[p // self.block_size] * self.block_size + p % self.block_size for p in right]
                if row.slots is not None and group == 0:
                    row_slots = list(row.slots)
                slots[group] += row_slots
                writes += [
                    _Write(
                        group=group,
                        slot=slot,
                        token=token,
                        prefix=(*request.tokens[:start], *tokens[:index]),
                        namespace=request.namespace,
                    )
                    for index, (slot, token) in enumerate(zip(row_slots, tokens, strict=True))
                    if start + index not in row.drop
                ]
        step = ForwardStep(
            requests=[row.request for row in rows],
            prefix_lens=torch.tensor(starts, dtype=torch.int32),
            query_offsets=torch.tensor([0, *[row.count for row in rows]]).cumsum(0).to(torch.int32),
            token_ids=torch.tensor(token_ids, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int64),
            groups=[
                GroupStep(
                    block_table=_rectangle([request.tables[group] for request in requests], 0),
                    write_slots=torch.tensor(slots[group], dtype=torch.int64),
                    pad_slots=None if pad_slots is None else torch.tensor(pad_slots),
                )
                for group in range(len(self.groups))
            ],
            known_tokens=KnownTokens(
                tokens=_rectangle([request.tokens for request in requests], -1),
                rows=torch.arange(len(rows)),
                lengths=torch.tensor([len(request.tokens) for request in requests]),
            )
            if self.knows_tokens and rows
            else None,
            namespaces=[request.namespace for request in requests],
        )
        return step, writes

    def step(self, *rows: Row, pad_slots: Sequence[int] | None = None) -> None:
        """One forward pass, watched."""
        step, writes = self.plan(*rows, pad_slots=pad_slots)
        self.canary.before_forward(step)
        self.forward(writes)
        for row in rows:
            request = self.requests[row.request]
            request.computed = (request.computed if row.start is None else row.start) + row.count
        self.canary.after_forward()

    def forward(self, writes: Iterable[_Write]) -> None:
        for write in writes:
            block, offset = divmod(write.slot, self.block_size)
            group = self.groups[write.group]
            if not 0 <= block < group.num_blocks:
                continue
            for index, part in enumerate(group.parts):
                # Groups over one storage have the same parts under other names: so do their bytes.
                text = f"{write.token} {write.prefix} {write.namespace} {self.epoch} {index}"
                part.view[block, offset] = _payload(part, zlib.crc32(text.encode()))

    # Faults

    def poke(self, slot: int, part: int, *, byte: int = 0, mask: int = 1, group: int = 0) -> None:
        """Bytes change behind everyone's back."""
        view = self.groups[group].parts[part].view
        block, offset = divmod(slot, self.block_size)
        payload = view[block, offset].contiguous()
        payload.reshape(-1).view(torch.uint8)[byte] ^= mask
        view[block, offset] = payload

    def slot(self, name: str, position: int, group: int = 0) -> int:
        table = self.requests[name].tables[group]
        return table[position // self.block_size] * self.block_size + position % self.block_size


def _rectangle(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0)
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], dtype=torch.int32).view(
        len(rows), width
    )


def _payload(part: KVPart, seed: int) -> torch.Tensor:
    """Finite numbers of the part's dtype that depend on the seed."""
    shape = part.view.shape[2:]
    count = shape.numel()
    numbers = torch.randint(-127, 128, (count,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    if part.number_type is not None:
        numbers = numbers[: count // part.number_type.itemsize].to(part.number_type)
        return numbers.view(torch.uint8).view(shape)
    if "scale" in part.part:
        return ((numbers + 200) / 256).to(part.view.dtype).view(shape)
    return numbers.to(part.view.dtype).view(shape)
