"""What one step reads and writes in one group of layers, as tensors; the vocabulary of all backends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class Fault(IntEnum):
    """Why a slot failed. Among the faults of a read, and among those of a write, the first that applies is reported."""

    # Before a write
    WRITE_ADDRESS = 0
    """The slot is not the one that block table and position give, or lies outside the pool."""
    WRITE_NOT_HELD = 1
    """The writing request does not hold the block."""
    WRITE_TWICE = 2
    """Two rows of the step write different tokens to the slot."""
    WRITE_SHARED = 3
    """A request that shares the block writes another token over one that is there."""
    WRITE_POSITION = 4
    """The position is not the one after the tokens computed so far."""
    WRITE_TOKEN = 5
    """The token is not the one that the request has at this position."""
    PAD_OUTSIDE = 6
    """Padding will write to a slot that is neither in the null block nor in use."""
    PAD_LIVE = 7
    """Padding will write to a slot that holds a token."""
    # Before a read
    READ_ADDRESS = 8
    READ_NOT_HELD = 9
    UNWRITTEN = 10
    POSITION = 11
    TOKEN = 12
    SEED = 13
    """The chain starts from another namespace or epoch."""
    CHAIN = 14
    CONTENT = 15
    # After a write
    LOST_WRITE = 16
    NONFINITE = 17
    # After an event
    TRANSFER = 18


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Who reads and writes in a step.

    Attributes:
        step: The canary's number of the step.
        owners: ``[rows]`` int32, each request's number.
        seeds: ``[rows]`` int64, the chain before position 0: a hash of each request's namespace and epoch.
        prefix_lens: ``[rows]`` int64.
        block_table: ``[rows, max_blocks]`` int64.
        held: ``[holders, blocks]`` bool, which blocks each request holds; None if the adapter does not tell.
        held_rows: ``[rows]`` int64, the row of ``held`` of each request; -1 if unknown.
        references: ``[blocks]`` int32, how many references each block has; 0 if unknown.
        first_holders: ``[blocks]`` int32, the row of ``held`` of the request that the block was allocated to, while it
            holds it; -1 if unknown.
    """

    step: int
    owners: torch.Tensor
    seeds: torch.Tensor
    prefix_lens: torch.Tensor
    block_table: torch.Tensor
    held: torch.Tensor | None
    held_rows: torch.Tensor
    references: torch.Tensor
    first_holders: torch.Tensor

    def not_held(self, rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor | None:
        """Which of these ``[n]`` pairs of row and block are known not to be held, or None if nothing is known."""
        if self.held is None:
            return None
        holder = self.held_rows[rows]
        return (holder >= 0) & ~self.held[holder.clamp(min=0), blocks]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownTokens:
    """The tokens that requests are known to consist of.

    Attributes:
        tokens: ``[requests, max_tokens]`` integer, -1 where unknown.
        rows: ``[rows]`` integer: the row of ``tokens`` of each row of the step.
        lengths: ``[rows]`` integer: how many tokens each request has; None if that is not known.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writes:
    """What a step writes.

    Attributes:
        rows: ``[tokens]`` int64: the row of each new token.
        offsets: ``[rows + 1]`` int64: the new tokens of row r are those from ``offsets[r]`` to ``offsets[r + 1]``.
        tokens, positions, slots: ``[tokens]`` int64; slots outside the pool are not written.
        known: The tokens that the requests are known to consist of; None if the engine knows none.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    known: KnownTokens | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """The writes of a step that go to a slot of the pool, and what the slots' records said before.

    Attributes:
        slots: ``[writes]`` int64.
        owners: ``[writes]`` int32, positions: ``[writes]`` int64, of the new tokens.
        other_token: ``[writes]`` bool: a record said before that the slot holds another token.
        other_write: ``[writes]`` bool: a record said before that it holds another token or position, or nothing was
            ever recorded there. False where an earlier step was abandoned, so that nobody knows.
    """

    step: int
    slots: torch.Tensor
    owners: torch.Tensor
    positions: torch.Tensor
    other_token: torch.Tensor
    other_write: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """What a step reads, block by block: an *entry* is one block that a row reads.

    Attributes:
        rows, blocks: ``[entries]`` int64; a block outside the pool is replaced by block 0 and marked in ``outside``.
        positions: ``[entries, block_size]`` int64.
        live: ``[entries, block_size]`` bool: the row reads this slot.
        low: ``[rows]`` int64: the first position each row reads.
        outside: ``[entries]`` bool.
        table_blocks: ``[entries]`` int64: the blocks as the table has them.
        sound: ``[entries, block_size]`` bool: live and, so far, without a fault.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    positions: torch.Tensor
    live: torch.Tensor
    low: torch.Tensor
    outside: torch.Tensor
    table_blocks: torch.Tensor
    sound: torch.Tensor
