"""Which blocks an allocator has handed out, where it keeps its lists on the device and does not say to whom."""

from __future__ import annotations

import torch


class Occupancy:
    """One bit for each block of a group, followed from an allocator's events without a name in them.

    A block is known from its first event on, so that an agent that attaches late reports nothing wrong.
    """

    def __init__(self, num_blocks: int, null_block: int | None, device: torch.device) -> None:
        self._num_blocks, self._null_block = num_blocks, null_block
        # One more than there are blocks: -1, which stands for no block, is the last.
        self._in_use = torch.ones(num_blocks + 1, dtype=torch.bool, device=device)
        self._known = torch.zeros(num_blocks + 1, dtype=torch.bool, device=device)

    @property
    def held(self) -> torch.Tensor:
        """``[1, blocks]`` bool: the block is in use, as far as events have told; one row for all requests alike."""
        return self._in_use[None, : self._num_blocks]

    @property
    def num_bytes(self) -> int:
        return self._in_use.numel() + self._known.numel()

    def taken(self, blocks: torch.Tensor) -> torch.Tensor:
        """The allocator hands out ``blocks``, ``[n]`` int64, -1 for none: which ones it must not, ``[n]`` bool.

        Those are blocks in use, blocks named before in the same call, and the null block.
        """
        wrong = self._in_use[blocks] & self._known[blocks] | _repeated(blocks)
        if self._null_block is not None:
            wrong |= blocks == self._null_block
        wrong &= blocks >= 0
        self._in_use.index_fill_(0, blocks, True)
        self._known.index_fill_(0, blocks, True)
        return wrong

    def returned(self, blocks: torch.Tensor) -> torch.Tensor:
        """The allocator takes back ``blocks``, ``[n]`` int64, -1 for none: which are free already, ``[n]`` bool."""
        wrong = (~self._in_use[blocks] | _repeated(blocks)) & (blocks >= 0)
        self._in_use.index_fill_(0, blocks, False)
        self._known.index_fill_(0, blocks, True)
        self._in_use[-1:].fill_(True)
        return wrong

    def all_returned(self) -> None:
        """The allocator starts anew: nothing is in use."""
        self._in_use.zero_()
        self._known.fill_(True)

    def forget(self) -> None:
        """Nothing is known about any block any more."""
        self._in_use.fill_(True)
        self._known.zero_()


def _repeated(blocks: torch.Tensor) -> torch.Tensor:
    """Which elements of ``[n]`` are equal to an earlier one, ``[n]`` bool."""
    order = blocks.argsort(stable=True)
    ordered = blocks[order]
    again = torch.zeros_like(blocks, dtype=torch.bool)
    again[order[1:]] = ordered[1:] == ordered[:-1]
    return again
