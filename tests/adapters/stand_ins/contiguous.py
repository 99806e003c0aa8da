"""A stand-in engine: each request has a row of a cache of its own, as long as the longest request can be."""

from __future__ import annotations

import torch

LAYERS, HEADS, DIM, LONGEST, ROWS = 2, 2, 8, 24, 4


class Cache:
    def __init__(self) -> None:
        self.k = torch.zeros(LAYERS, ROWS, HEADS, LONGEST, DIM, dtype=torch.bfloat16)
        self.v = torch.zeros(LAYERS, ROWS, HEADS, LONGEST, DIM, dtype=torch.bfloat16)


class Decoder:
    def __init__(self) -> None:
        self.cache = Cache()
        self.rows: list[str | None] = [None] * ROWS
        self.tokens: dict[str, list[int]] = {}

    def start(self, name: str, prompt: list[int]) -> None:
        row = self.rows.index(None)
        self.rows[row] = name
        self.tokens[name] = list(prompt)
        self.prefill(name, row, torch.tensor(prompt))
        self.tokens[name].append(self.sample(row, len(prompt)))

    def decode(self) -> None:
        rows = [row for row, name in enumerate(self.rows) if name is not None]
        names = [name for name in self.rows if name is not None]
        last = torch.tensor([self.tokens[name][-1] for name in names])
        starts = torch.tensor([len(self.tokens[name]) - 1 for name in names])
        self.decode_step(names, torch.tensor(rows), last, starts, [self.tokens[name] for name in names])
        for row, name in zip(rows, names, strict=True):
            self.tokens[name].append(self.sample(row, len(self.tokens[name])))

    def stop(self, name: str) -> list[int]:
        self.rows[self.rows.index(name)] = None
        return self.tokens.pop(name)

    def prefill(self, name: str, row: int, prompt: torch.Tensor) -> None:
        self.compute(torch.full_like(prompt, row), prompt, torch.arange(prompt.shape[0]))

    def decode_step(
        self,
        names: list[str],
        rows: torch.Tensor,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        histories: list[list[int]],
    ) -> None:
        self.compute(rows, tokens, starts)

    def compute(self, rows: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        for layer in range(LAYERS):
            base = (tokens[:, None, None] + 1) * 0.37 + positions[:, None, None] * 0.11 + layer
            content = torch.sin(base * torch.arange(1, HEADS * DIM + 1).view(HEADS, DIM)).bfloat16()
            self.store(layer, rows, positions, content)

    def store(self, layer: int, rows: torch.Tensor, positions: torch.Tensor, content: torch.Tensor) -> None:
        self.cache.k[layer, rows, :, positions] = content
        self.cache.v[layer, rows, :, positions] = content.cos()

    def sample(self, row: int, length: int) -> int:
        read = self.cache.k[:, row, :, :length].nan_to_num().double().sum()
        return int(read.mul(1000).long().remainder(97))
