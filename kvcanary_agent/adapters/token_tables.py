"""Engines whose kernels look up a slot for each token, seen as the block tables that the canary reads."""

from __future__ import annotations

import torch

from kvcanary_agent.canary.layout import KVGroup


def pages_of(group: KVGroup, table: torch.Tensor, prefix_lens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The page of every run of ``page_size`` positions: ``[rows, pages]``.

    Kernels look up each token by itself, so a page counts only if each of its tokens that is in use is where it belongs
    in the page: otherwise it is -1, an address outside the pool.

    Args:
        group: Whose pages.
        table: ``[rows, positions]`` integer: the slot of each position.
        prefix_lens: ``[rows]`` integer: tokens computed before the step; for the start of the window.
        lengths: ``[rows]`` integer: the tokens of each row, new ones included.
    """
    size = group.block_size
    if size == 1:
        return table
    # The table of the longest possible request need not end with a page.
    table = torch.nn.functional.pad(table, (0, -table.shape[1] % size))
    by_page = table.view(table.shape[0], -1, size)
    positions = torch.arange(table.shape[1], device=table.device).view(-1, size)
    in_use = positions < lengths[:, None, None]
    if group.window is not None:
        in_use &= positions > (prefix_lens - group.window)[:, None, None]
    offsets = positions % size
    pages = by_page.div(size, rounding_mode="floor")
    # What is used of a page is in order from its last slot in use; the first ones may have left a window.
    page = torch.where(in_use, pages, -1).amax(2)
    astray = in_use & (by_page != page[:, :, None] * size + offsets)
    return torch.where(astray.any(2), -1, page)
