"""A stand-in engine: slots without blocks, keys and values packed in the last axis, one table row for every possible
request, prefill and decode apart, and a warm-up before it serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYERS, HEADS, DIM = 2, 2, 8


class TokenPool:
    def __init__(self, size: int) -> None:
        self.kv_buffers = [torch.zeros(size + 1, HEADS, 2 * DIM) for _ in range(LAYERS)]
        self.free_slots = list(range(1, size + 1))

    def alloc(self, count: int) -> torch.Tensor:
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken)

    def free(self, loc: torch.Tensor) -> None:
        self.free_slots += loc.tolist()


@dataclass(eq=False)
class Req:
    rid: str
    tokens: list[int]
    left: int
    row: int
    computed: int = 0


@dataclass
class ForwardBatch:
    reqs: list[Req]
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    extend_lens: list[int]
    out_cache_loc: torch.Tensor
    input_ids: torch.Tensor
    warm_up: bool = False


class Runner:
    def __init__(self, pool: TokenPool) -> None:
        self.pool = pool
        self.req_to_token = torch.zeros(8, 64, dtype=torch.int32)
        for _ in range(2):
            nothing = torch.zeros(1, dtype=torch.int64)
            self.forward_decode(ForwardBatch([], nothing, nothing, [1], nothing, nothing, warm_up=True))

    def forward_extend(self, batch: ForwardBatch) -> None:
        self.compute(batch)

    def forward_decode(self, batch: ForwardBatch) -> None:
        self.compute(batch)

    def compute(self, batch: ForwardBatch) -> None:
        for layer in range(LAYERS):
            base = (batch.input_ids[:, None, None] + 1) * 0.37 + layer
            content = torch.sin(base * torch.arange(1, HEADS * 2 * DIM + 1).view(HEADS, 2 * DIM))
            self.write(layer, batch.out_cache_loc, content)

    def write(self, layer: int, loc: torch.Tensor, content: torch.Tensor) -> None:
        self.pool.kv_buffers[layer][loc] = content


class Engine:
    def __init__(self) -> None:
        self.pool = TokenPool(64)
        self.runner = Runner(self.pool)
        self.rows = list(range(8))
        self.running: list[Req] = []

    def add(self, rid: str, tokens: list[int], left: int) -> Req:
        request = Req(rid, list(tokens), left, self.rows.pop(0))
        self.runner.forward_extend(self.batch([request]))
        self.computed([request])
        self.running.append(request)
        return request

    def step(self) -> None:
        self.runner.forward_decode(self.batch(self.running))
        self.computed(self.running)
        for request in [request for request in self.running if not request.left]:
            self.pool.free(self.runner.req_to_token[request.row, : request.computed].clone())
            self.rows.append(request.row)
            self.running.remove(request)

    def batch(self, reqs: list[Req]) -> ForwardBatch:
        lens = [len(request.tokens) - request.computed for request in reqs]
        loc = self.pool.alloc(sum(lens))
        for request, part in zip(reqs, torch.split(loc, lens), strict=True):
            self.runner.req_to_token[request.row, request.computed : len(request.tokens)] = part.int()
        return ForwardBatch(
            reqs=reqs,
            req_pool_indices=torch.tensor([request.row for request in reqs]),
            seq_lens=torch.tensor([len(request.tokens) for request in reqs]),
            extend_lens=lens,
            out_cache_loc=loc,
            input_ids=torch.tensor([token for request in reqs for token in request.tokens[request.computed :]]),
        )

    def computed(self, reqs: list[Req]) -> None:
        for request in reqs:
            request.computed = len(request.tokens)
            slots = self.runner.req_to_token[request.row, : request.computed].long()
            read = self.pool.kv_buffers[-1][slots].nan_to_num().double().sum()
            request.tokens.append(int(read.mul(1000).long().remainder(97)))
            request.left -= 1
