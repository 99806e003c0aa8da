"""The tokens that requests are known to consist of."""

from __future__ import annotations

import torch


def known_at(
    tokens: torch.Tensor,
    known_rows: torch.Tensor,
    lengths: torch.Tensor | None,
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The token that a request has at each position, of ``positions``' shape, int64.

    -1 where unknown, -2 where the request has no such position.

    Args:
        tokens: ``[requests, max_tokens]`` integer, -1 where unknown.
        known_rows: ``[rows]``: the row of ``tokens`` of each row of the step.
        lengths: ``[rows]``: how many tokens each request has, or None if that is not known.
        rows: The step's row of each position, broadcastable to ``positions``.
        positions: int64, not negative.
    """
    width = tokens.shape[1]
    if width:
        known = tokens[known_rows.to(torch.int64)[rows], positions.clamp(0, width - 1)].to(torch.int64)
        known = torch.where((positions < width) & (known >= 0), known, -1)
    else:
        known = torch.full_like(positions, -1)
    if lengths is None:
        return known
    return torch.where(positions < lengths.to(torch.int64)[rows], known, -2)
