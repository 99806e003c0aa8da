"""What a batch of continuous batching means to the canary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvcanary_agent.adapters.histories import Histories
from kvcanary_agent.adapters.token_tables import pages_of
from kvcanary_agent.adapters.transformers.paged_pool import PagedGroup
from kvcanary_agent.canary.step import ForwardStep, GroupStep


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of a batch, as the scheduler has them.

    Attributes:
        states: The engine's ``RequestState`` of each row.
        past: How many tokens of each row were computed before.
        queries: How many each row computes now.
    """

    states: Sequence[Any]
    past: Sequence[int]
    queries: Sequence[int]

    @property
    def lengths(self) -> list[int]:
        return [past + query for past, query in zip(self.past, self.queries, strict=True)]

    def wraps(self, row: int, ring: int) -> bool:
        """Whether new tokens of the row are written over ones that the same step reads."""
        return self.queries[row] > 1 and self.past[row] > 0 and self.past[row] + self.queries[row] > ring


def batch_of(inputs_and_outputs: Any) -> Batch:
    """The batch that has been prepared last.

    Args:
        inputs_and_outputs: The engine's ``ContinuousBatchingIOs``, or a pair of them for asynchronous batching.
    """
    pairs = getattr(inputs_and_outputs, "io_pairs", None)
    prepared = inputs_and_outputs if pairs is None else pairs[inputs_and_outputs.current_pair].host_io
    states = [each.state for each in prepared.requests_in_batch]
    queries = [each.query_length for each in prepared.requests_in_batch]
    # The scheduler has counted the batch already.
    past = [state.position_offset - query for state, query in zip(states, queries, strict=True)]
    return Batch(states, past, queries)


def describe_step(
    groups: Sequence[PagedGroup], batch: Batch, inputs: Any, token_ids: torch.Tensor, histories: Histories
) -> ForwardStep:
    """The step that a ``ModelRunner`` is about to compute.

    Args:
        groups: Of the pool.
        batch: Its requests.
        inputs: The engine's ``batch_data``, keyword arguments of the model's forward.
        token_ids: ``[at least as many as are computed]`` integer.
        histories: The tokens known so far.
    """
    total, rows = sum(batch.queries), len(batch.states)
    device = token_ids.device
    prefix_lens, lengths = _on_device([batch.past, batch.lengths], device)
    return ForwardStep(
        requests=[state.request_id for state in batch.states],
        prefix_lens=prefix_lens,
        query_offsets=inputs["cu_seq_lens_q"][: rows + 1],
        token_ids=token_ids[:total],
        positions=inputs["position_ids"][0, :total],
        groups=[_group_step(each, batch, inputs, prefix_lens, lengths) for each in groups],
        known_tokens=histories.known_tokens(batch.states),
    )


def _group_step(
    described: PagedGroup, batch: Batch, inputs: Any, prefix_lens: torch.Tensor, lengths: torch.Tensor
) -> GroupStep:
    allocator, size = described.allocator, described.group.block_size
    total, rows = sum(batch.queries), len(batch.states)
    device = prefix_lens.device
    if inputs["block_table"] is not None:
        return _decode_group_step(described, inputs["block_table"][allocator.index][:rows], prefix_lens)
    written = _slots(allocator, inputs["write_index"][allocator.index])
    if described.ring is not None:
        skipped = [batch.wraps(row, described.ring) for row, query in enumerate(batch.queries) for _ in range(query)]
        if any(skipped):
            written[:total].masked_fill_(torch.tensor(skipped).to(device, non_blocking=True), -1)
        tables = [
            _unrolled(described, state, length) for state, length in zip(batch.states, batch.lengths, strict=True)
        ]
        return GroupStep(block_table=_padded(tables, device), write_slots=written[:total], pad_slots=written[total:])
    read = inputs["read_index"][allocator.index]
    if not read.numel():
        tables = [allocator.block_table[state.request_id] for state in batch.states]
        return GroupStep(block_table=_padded(tables, device), write_slots=written[:total], pad_slots=written[total:])
    starts = inputs["cu_seq_lens_k"][described.attention][:rows].to(torch.int64)
    columns = torch.arange(max(batch.lengths), device=device)
    at = (starts[:, None] + columns).clamp(max=read.shape[0] - 1)
    slots = torch.where(columns < lengths[:, None], _slots(allocator, read)[at], -1)
    pages = pages_of(described.group, slots, prefix_lens, lengths)
    return GroupStep(
        block_table=pages,
        write_slots=written[:total],
        pad_slots=written[total:],
        store_table=partial(_store, allocator, pages, read, starts.tolist, batch.lengths, size),
    )


def _decode_group_step(described: PagedGroup, table: torch.Tensor, prefix_lens: torch.Tensor) -> GroupStep:
    """One token a row, whose kernel reads and writes through a table of pages."""
    size, per_block = (
        described.group.block_size,
        described.allocator.block_physical_stride // described.group.block_size,
    )
    blocks = table.div(per_block, rounding_mode="floor")
    blocks = torch.where((table >= 0) & (table % per_block == 0), blocks, -1).to(torch.int64)
    column = (prefix_lens // size).clamp(max=table.shape[1] - 1)
    newest = blocks.gather(1, column[:, None]).flatten()
    return GroupStep(
        block_table=blocks,
        write_slots=newest * size + prefix_lens % size,
        store_table=partial(_store_pages, table, blocks, per_block),
    )


def _store_pages(table: torch.Tensor, blocks: torch.Tensor, per_block: int) -> None:
    """Put a table of blocks into the table of pages that the engine reads."""
    table.copy_(torch.where(blocks >= 0, blocks * per_block, -1))


def _slots(allocator: Any, rows: torch.Tensor) -> torch.Tensor:
    """The slots of rows of the cache, ``[n]`` int64; -1 for the row that padding is written to.

    A row of another layer is as good as one outside the pool.
    """
    size, stride = allocator.tokens_per_page, allocator.block_physical_stride
    block = rows.div(stride, rounding_mode="floor")
    offset = rows - block * stride
    outside = allocator._kv_token_views[allocator.layer_indices[0]][0].shape[0] + rows
    slots = torch.where(offset < size, block * size + offset, outside)
    return torch.where(rows == allocator.write_trash_index, -1, slots)


def _unrolled(described: PagedGroup, state: Any, length: int) -> list[int]:
    """The block of each page of positions of a request whose pages are a ring."""
    pages, size = described.allocator.block_table[state.request_id], described.group.block_size
    in_ring = (described.ring or 0) // size
    return [pages[page % in_ring] for page in range(-(-length // size))]


def _padded(tables: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """``[rows, blocks]`` int64; -1 beyond a row's own blocks."""
    width = max((len(table) for table in tables), default=0) or 1
    padded = [[*table, *[-1] * (width - len(table))] for table in tables]
    return torch.tensor(padded, dtype=torch.int64).to(device, non_blocking=True)


def _on_device(lists: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(lists, dtype=torch.int64).to(device, non_blocking=True)


def _store(
    allocator: Any, pages: torch.Tensor, read: torch.Tensor, starts: Any, lengths: Sequence[int], size: int
) -> None:
    """Put a table of pages into the rows that the engine reads."""
    for row, (start, length) in enumerate(zip(starts(), lengths, strict=True)):
        positions = torch.arange(length, device=pages.device)
        read[start : start + length] = (
            pages[row, positions // size] * allocator.block_physical_stride + positions % size
        )
