"""One model step, as an adapter describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownTokens:
    """The tokens that the requests of a step consist of, as the engine knows them, on the pool's device.

    Attributes:
        tokens: ``[requests, max_tokens]``, any integer dtype; -1 where the engine does not know the token (yet).
        rows: ``[rows]`` integer: the row of ``tokens`` that belongs to each row of the step.
        lengths: ``[rows]`` integer: how many tokens of each row exist. A request that reads a position beyond its
            length reads what it never consisted of. None when the engine cannot say; then nothing beyond what
            ``tokens`` holds is checked.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStep:
    """What a step means for one group of layers.

    Attributes:
        block_table: ``[rows, max_blocks]`` integer: position p of row r lives in slot
            ``block_table[r, p // block_size] * block_size + p % block_size``.
        write_slots: ``[tokens]`` integer: the slot that each new token is written to; -1 if the write is skipped.
        pad_slots: ``[any]`` integer: slots that padded rows beyond the batch will write to. Legal are -1 and slots
            of the null block.
        store_table: Puts what ``block_table`` says into the table that the engine reads, where that is not the same
            memory; for drills, which damage it. None where it is the same, or where that cannot be done.
    """

    block_table: torch.Tensor
    write_slots: torch.Tensor
    pad_slots: torch.Tensor | None = None
    store_table: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardStep:
    """One forward pass of a model over a batch of requests.

    Row r reads positions ``[0, prefix_lens[r])`` through its block table and then writes its own new tokens, those
    from ``query_offsets[r]`` to ``query_offsets[r + 1]``. Dummy, profiling and graph-capture runs are not steps.
    All tensors are on the pool's device and are read, never written or kept.

    Attributes:
        requests: ``[rows]`` the engine's request ids, on the host.
        prefix_lens: ``[rows]`` integer: tokens of each row that were computed before this step.
        query_offsets: ``[rows + 1]`` integer: prefix sum of the number of new tokens of each row.
        token_ids: ``[tokens]`` integer.
        positions: ``[tokens]`` integer.
        groups: One entry per group of the layout, in its order.
        known_tokens: The requests' own histories, where the engine has them.
        namespaces: ``[rows]`` what, beside its tokens, the K/V of a request depends on (LoRA adapter, cache salt,
            multimodal inputs), as an opaque string; None if nothing.
    """

    requests: Sequence[str]
    prefix_lens: torch.Tensor
    query_offsets: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: Sequence[GroupStep]
    known_tokens: KnownTokens | None = None
    namespaces: Sequence[str | None] | None = None
