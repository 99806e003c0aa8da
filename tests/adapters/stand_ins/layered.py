"""A stand-in engine: a list of block tensors for each layer, head-major, a pool that writes, and a free list."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

BLOCK, LAYERS, HEADS, DIM = 4, 2, 2, 8


class KVCache:
    def __init__(self, num_blocks: int, device: str = "cpu") -> None:
        shape = (num_blocks, HEADS, BLOCK, DIM)
        self.keys = [torch.zeros(shape, device=device) for _ in range(LAYERS)]
        self.values = [torch.zeros(shape, device=device) for _ in range(LAYERS)]
        self.unused = list(range(1, num_blocks))

    def take(self, count: int) -> list[int]:
        return [self.unused.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self.unused.extend(blocks)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        block, offset = slots // BLOCK, slots % BLOCK
        self.keys[layer][block, :, offset] = key
        self.values[layer][block, :, offset] = value

    def grow(self) -> None:
        """Twice the blocks, in tensors of their own."""
        old = self.keys[0].shape[0]
        self.keys = [torch.cat([tensor, torch.zeros_like(tensor)]) for tensor in self.keys]
        self.values = [torch.cat([tensor, torch.zeros_like(tensor)]) for tensor in self.values]
        self.unused += range(old, 2 * old)

    def release(self) -> None:
        self.keys, self.values = [], []


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    left: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass
class Batch:
    names: list[str]
    tables: list[list[int]]
    tokens: torch.Tensor
    starts: list[int]
    counts: list[int]


class Model:
    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def forward(self, batch: Batch) -> None:
        positions = torch.cat(
            [torch.arange(start, start + count) for start, count in zip(batch.starts, batch.counts, strict=True)]
        )
        row = torch.repeat_interleave(torch.tensor(batch.counts))
        slots = torch.tensor(
            [
                batch.tables[index][position // BLOCK] * BLOCK + position % BLOCK
                for index, position in zip(row.tolist(), positions.tolist(), strict=True)
            ]
        )
        for layer in range(LAYERS):
            base = (batch.tokens[:, None, None] + 1) * 0.37 + positions[:, None, None] * 0.11 + layer
            content = torch.sin(base * torch.arange(1, HEADS * DIM + 1).view(HEADS, DIM))
            self.cache.write(layer, slots, content, content.cos())


class Engine:
    def __init__(self, num_blocks: int = 16) -> None:
        self.cache = KVCache(num_blocks)
        self.model = Model(self.cache)
        self.running: list[Request] = []

    def add(self, name: str, tokens: list[int], left: int) -> Request:
        request = Request(name, list(tokens), left)
        self.running.append(request)
        return request

    def step(self) -> None:
        for request in self.running:
            self.reserve(request)
        rows = self.running
        self.model.forward(
            Batch(
                names=[request.name for request in rows],
                tables=[request.blocks for request in rows],
                tokens=torch.tensor([token for request in rows for token in request.tokens[request.computed :]]),
                starts=[request.computed for request in rows],
                counts=[len(request.tokens) - request.computed for request in rows],
            )
        )
        for request in rows:
            request.computed = len(request.tokens)
            read = self.cache.keys[-1][request.blocks].nan_to_num().double().sum()
            request.tokens.append(int(read.mul(1000).long().remainder(97)))
            request.left -= 1
            if not request.left:
                self.finish(request)
        self.running = [request for request in rows if request.left]

    def reserve(self, request: Request) -> None:
        missing = -(-len(request.tokens) // BLOCK) - len(request.blocks)
        if missing > 0:
            request.blocks += self.cache.take(missing)

    def finish(self, request: Request) -> None:
        self.cache.give_back(request.blocks)
        request.blocks = []
