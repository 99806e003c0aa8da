"""Turns a schedule into tensors and runs the model on them."""

from collections.abc import Sequence as List

import torch

from kvcanary_agent.demo.block_manager import NULL_BLOCK
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.kv_pool import KVPool
from kvcanary_agent.demo.model import Batch, Transformer
from kvcanary_agent.demo.sequence import Sequence


class ModelRunner:
    """Owns the model and its KV pool. Block tables come from the scheduler; nothing here decides about blocks."""

    def __init__(self, config: EngineConfig) -> None:
        self._block_size = config.block_size
        self._device = config.device
        self.pool = KVPool(
            num_layers=config.model.num_layers,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_kv_heads=config.model.num_kv_heads,
            head_dim=config.model.head_dim,
            device=config.device,
        )
        self.model = Transformer(config.model, max_positions=config.max_model_len, device=config.device)

    def build_batch(self, rows: List[tuple[Sequence, int]]) -> Batch:
        """The batch that computes, for each sequence, that many tokens after those computed."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_offsets = [0]
        for seq, num_tokens in rows:
            span = range(seq.num_computed, seq.num_computed + num_tokens)
            token_ids += seq.token_ids[span.start : span.stop]
            positions += span
            slots += [seq.block_table[p // self._block_size] * self._block_size + p % self._block_size for p in span]
            query_offsets.append(len(token_ids))
        max_blocks = max(len(seq.block_table) for seq, _ in rows)
        tables = [seq.block_table + [NULL_BLOCK] * (max_blocks - len(seq.block_table)) for seq, _ in rows]
        return Batch(
            request_ids=tuple(seq.request_id for seq, _ in rows),
            block_tables=self._tensor(tables, torch.int32),
            prefix_lens=self._tensor([seq.num_computed for seq, _ in rows], torch.int32),
            query_offsets=self._tensor(query_offsets, torch.int32),
            token_ids=self._tensor(token_ids, torch.int64),
            positions=self._tensor(positions, torch.int64),
            slot_mapping=self._tensor(slots, torch.int64),
            max_query_len=max(num_tokens for _, num_tokens in rows),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Run the model once; returns the logits of each row's last token, [rows, vocab] float64."""
        return self.model.forward(batch, self.pool)

    @torch.inference_mode()
    def copy_blocks(self, pairs: List[tuple[int, int]]) -> None:
        """Copy blocks of the pool, (source, destination) each, in every layer."""
        sources, destinations = self._tensor(pairs, torch.int64).unbind(1)
        self.pool.copy_blocks(sources, destinations)

    def _tensor(self, values: List[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
