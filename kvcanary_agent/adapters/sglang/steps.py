"""What a `ForwardBatch` means to the canary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcanary_agent.adapters.histories import Histories
from kvcanary_agent.adapters.sglang.pool import NotCovered, Pool
from kvcanary_agent.adapters.token_tables import pages_of
from kvcanary_agent.canary.step import ForwardStep, GroupStep

_NO_STEPS = frozenset({"IDLE", "PREBUILT"})
_EXTENDS = frozenset({"EXTEND", "MIXED"})


def is_step(batch: Any) -> bool:
    """Whether anything is computed for a request: an idle rank only takes part in collectives."""
    return batch.forward_mode.name not in _NO_STEPS and bool(batch.rids)


def describe_step(runner: Any, pool: Pool, batch: Any, requests: Sequence[Any], histories: Histories) -> ForwardStep:
    """The step that a ``ModelRunner`` is about to compute.

    Token table and window map are copied as far as they are used: under overlap scheduling the scheduler rewrites them
    while the forward runs.

    Args:
        runner: The engine's ``ModelRunner``.
        pool: Its pool.
        batch: The ``ForwardBatch``.
        requests: The scheduler's requests of the batch, in order.
        histories: The tokens known so far.

    Raises:
        NotCovered: If the step is of a kind that this adapter does not know.
    """
    mode = batch.forward_mode.name
    lengths, drafts = batch.seq_lens, 0
    if mode == "DECODE":
        prefix_lens = lengths - 1
        offsets = torch.arange(batch.batch_size + 1, device=lengths.device)
    elif mode in _EXTENDS:
        prefix_lens = batch.extend_prefix_lens
        offsets = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0), (1, 0))
    elif mode == "TARGET_VERIFY":
        # The last token and the drafts that follow it: those that are rejected are overwritten by the next step.
        drafts = batch.spec_info.draft_token_num
        prefix_lens, lengths = lengths, lengths + drafts
        offsets = torch.arange(batch.batch_size + 1, device=lengths.device) * drafts
    else:
        raise NotCovered(f"steps of the mode {mode}")
    table = _token_table(runner, batch, drafts)
    groups = [
        _group_step(runner, pool, index, batch, table, prefix_lens, lengths) for index in range(len(pool.layout.groups))
    ]
    return ForwardStep(
        requests=batch.rids,
        prefix_lens=prefix_lens,
        query_offsets=offsets,
        token_ids=batch.input_ids,
        positions=batch.positions,
        groups=groups,
        known_tokens=histories.known_tokens(requests),
        namespaces=[_namespace(request) for request in requests],
    )


def _token_table(runner: Any, batch: Any, drafts: int) -> torch.Tensor:
    """The slot of every position of each row, ``[rows, positions]``, as far as the longest row and its drafts go."""
    table: torch.Tensor = runner.req_to_token_pool.req_to_token
    longest = table.shape[1] if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.max()) + drafts
    size = runner.page_size
    return table[:, : -(-longest // size) * size].index_select(0, batch.req_pool_indices)


def _group_step(
    runner: Any,
    pool: Pool,
    index: int,
    batch: Any,
    table: torch.Tensor,
    prefix_lens: torch.Tensor,
    lengths: torch.Tensor,
) -> GroupStep:
    group = pool.layout.groups[index]
    if index != pool.sliding:
        pages = pages_of(group, table, prefix_lens, lengths)
        return GroupStep(
            block_table=pages,
            write_slots=batch.out_cache_loc,
            store_table=lambda: _store(runner, batch, pages, group.block_size),
        )
    mapping = runner.token_to_kv_pool.full_to_swa_index_mapping
    slots = mapping[batch.out_cache_loc]
    return GroupStep(
        block_table=pages_of(group, mapping[table], prefix_lens, lengths),
        # Slot 0 stands for a token that has left the window, or was never in it.
        write_slots=torch.where(slots > 0, slots, -1),
    )


def _store(runner: Any, batch: Any, pages: torch.Tensor, page_size: int) -> None:
    """Put a table of pages into the engine's table of tokens."""
    slots = (pages[:, :, None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)
    table = runner.req_to_token_pool.req_to_token
    table[batch.req_pool_indices, : slots.shape[1]] = slots.to(table.dtype)


def _namespace(request: Any) -> str | None:
    """What the engine's prefix cache tells requests apart by, beside their tokens; adapters are part of the key."""
    key, salt = request.extra_key, getattr(request, "cache_salt", None)
    return None if key is None and salt is None else repr((key, salt))
