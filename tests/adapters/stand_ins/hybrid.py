"""A stand-in engine: layer 0 attends to everything, layer 1 to a window; each has a tensor and block tables of its own.

A block that has left the window is freed while its request goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

BLOCK, HEADS, DIM, WINDOW = 4, 2, 8, 6
LAYERS = ("full", "window")


class Allocator:
    def __init__(self, layer: str, num_blocks: int) -> None:
        self.layer = layer
        self.unused = list(range(num_blocks))

    def take(self, owner: str) -> int:
        return self.unused.pop(0)

    def give_back(self, owner: str, blocks: list[int]) -> None:
        self.unused.extend(blocks)


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    left: int
    computed: int = 0
    blocks: dict[str, list[int]] = field(default_factory=lambda: {layer: [] for layer in LAYERS})


class Engine:
    def __init__(self, num_blocks: int = 12) -> None:
        self.caches = {layer: torch.zeros(num_blocks, 2, BLOCK, HEADS * DIM) for layer in LAYERS}
        self.allocators = {layer: Allocator(layer, num_blocks) for layer in LAYERS}
        self.running: list[Request] = []

    def add(self, name: str, tokens: list[int], left: int) -> Request:
        self.running.append(Request(name, list(tokens), left))
        return self.running[-1]

    def step(self) -> None:
        for request in self.running:
            for layer, allocator in self.allocators.items():
                while len(request.blocks[layer]) * BLOCK < len(request.tokens):
                    request.blocks[layer].append(allocator.take(request.name))
        self.forward(self.running)
        for request in self.running:
            request.computed = len(request.tokens)
            read = self.caches["full"][request.blocks["full"]].nan_to_num().double().sum()
            request.tokens.append(int(read.mul(1000).long().remainder(97)))
            request.left -= 1
            self.leave_window(request)
            if not request.left:
                for layer, allocator in self.allocators.items():
                    allocator.give_back(request.name, [block for block in request.blocks[layer] if block >= 0])
        self.running = [request for request in self.running if request.left]

    def leave_window(self, request: Request) -> None:
        for index in range(max(0, request.computed - WINDOW + 1) // BLOCK):
            block = request.blocks["window"][index]
            if block >= 0:
                self.allocators["window"].give_back(request.name, [block])
                request.blocks["window"][index] = -1

    def forward(self, requests: list[Request]) -> None:
        for request in requests:
            for position in range(request.computed, len(request.tokens)):
                for number, layer in enumerate(LAYERS):
                    base = (request.tokens[position] + 1) * 0.37 + position * 0.11 + number
                    content = torch.sin(base * torch.arange(1, HEADS * DIM + 1))
                    block = request.blocks[layer][position // BLOCK]
                    self.write(layer, block, position % BLOCK, content)

    def write(self, layer: str, block: int, offset: int, content: torch.Tensor) -> None:
        self.caches[layer][block, 0, offset] = content
        self.caches[layer][block, 1, offset] = content.cos()
