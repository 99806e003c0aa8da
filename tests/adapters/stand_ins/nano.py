"""A stand-in engine: block manager with a prefix cache, slot mapping, one tensor for the keys and values of all layers,
and what a forward needs in a global context."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import torch

BLOCK, LAYERS, HEADS, DIM, VOCABULARY = 4, 3, 2, 8, 97


class Context:
    slot_mapping: torch.Tensor
    cu_seqlens: torch.Tensor


CONTEXT = Context()
_ids = count()


@dataclass(eq=False)
class Seq:
    token_ids: list[int]
    max_tokens: int
    seq_id: int = field(default_factory=lambda: next(_ids))
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_computed: int = 0


class BlockManager:
    def __init__(self, num_blocks: int) -> None:
        self.free_ids = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.prefixes: dict[tuple[int, ...], int] = {}

    def allocate(self, seq: Seq) -> None:
        """Blocks for all tokens of `seq`; whole blocks of a known prefix are shared, all but the last token's."""
        hits = True
        for start in range(0, len(seq.token_ids), BLOCK):
            prefix = tuple(seq.token_ids[: start + BLOCK])
            block = self.prefixes.get(prefix) if start + BLOCK < len(seq.token_ids) else None
            hits = hits and block is not None
            if hits and block is not None:
                seq.num_cached_tokens += BLOCK
                if block in self.free_ids:
                    self.free_ids.remove(block)
            else:
                block = self._take()
            self.refs[block] += 1
            seq.block_table.append(block)
        seq.num_computed = seq.num_cached_tokens

    def may_append(self, seq: Seq) -> None:
        if len(seq.token_ids) > len(seq.block_table) * BLOCK:
            block = self._take()
            self.refs[block] += 1
            seq.block_table.append(block)

    def computed(self, seq: Seq) -> None:
        """Full blocks can be shared from now on."""
        for index in range(seq.num_computed // BLOCK):
            self.prefixes.setdefault(tuple(seq.token_ids[: (index + 1) * BLOCK]), seq.block_table[index])

    def deallocate(self, seq: Seq) -> None:
        for block in reversed(seq.block_table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free_ids.append(block)
        seq.block_table.clear()

    def _take(self) -> int:
        block = self.free_ids.pop(0)
        self.prefixes = {prefix: known for prefix, known in self.prefixes.items() if known != block}
        return block


class ModelRunner:
    def __init__(self, num_blocks: int) -> None:
        self.kv_cache = torch.zeros(2, LAYERS, num_blocks, BLOCK, HEADS, DIM)

    def run(self, seqs: list[Seq]) -> list[int]:
        ids, positions, slots, offsets = [], [], [], [0]
        for seq in seqs:
            for position in range(seq.num_computed, len(seq.token_ids)):
                ids.append(seq.token_ids[position])
                positions.append(position)
                slots.append(self.slot_of(seq, position))
            offsets.append(len(ids))
        CONTEXT.slot_mapping, CONTEXT.cu_seqlens = torch.tensor(slots), torch.tensor(offsets, dtype=torch.int32)
        self.run_model(torch.tensor(ids), torch.tensor(positions))
        return [self._sample(seq) for seq in seqs]

    def run_model(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        for layer in range(LAYERS):
            base = (input_ids[:, None, None] + 1) * 0.37 + positions[:, None, None] * 0.11 + layer
            content = torch.sin(base * torch.arange(1, HEADS * DIM + 1).view(HEADS, DIM))
            for which in (0, 1):
                flat = self.kv_cache[which, layer].view(-1, HEADS, DIM)
                self.write(flat, CONTEXT.slot_mapping, content + which)

    def slot_of(self, seq: Seq, position: int) -> int:
        return seq.block_table[position // BLOCK] * BLOCK + position % BLOCK

    def write(self, flat: torch.Tensor, slots: torch.Tensor, content: torch.Tensor) -> None:
        flat[slots] = content

    def _sample(self, seq: Seq) -> int:
        read = self.kv_cache[:, :, seq.block_table].flatten(2, 3)[:, :, : len(seq.token_ids)]
        return int(read.double().nan_to_num().sum().mul(1000).long().remainder(VOCABULARY))


class Engine:
    def __init__(self, num_blocks: int = 24) -> None:
        self.runner = ModelRunner(num_blocks)
        self.manager = BlockManager(num_blocks)
        self.running: list[Seq] = []

    def add(self, token_ids: list[int], max_tokens: int) -> Seq:
        seq = Seq(list(token_ids), max_tokens + len(token_ids))
        self.manager.allocate(seq)
        self.running.append(seq)
        return seq

    def step(self) -> None:
        for seq, token in zip(self.running, self.runner.run(self.running), strict=True):
            seq.num_computed = len(seq.token_ids)
            self.manager.computed(seq)
            seq.token_ids.append(token)
            if len(seq.token_ids) < seq.max_tokens:
                self.manager.may_append(seq)
            else:
                self.manager.deallocate(seq)
        self.running = [seq for seq in self.running if len(seq.token_ids) < seq.max_tokens]
