"""The tokens that requests are known to consist of."""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.plan import KnownTokens


def known_at(known: KnownTokens, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The token that a request has at each position, of ``positions``' shape, int64.

    -1 where unknown, -2 where the request has no such position.

    Args:
        known: What is known of the step's rows.
        rows: The step's row of each position, broadcastable to ``positions``.
        positions: int64, not negative.
    """
    width = known.tokens.shape[1]
    if width:
        tokens = known.tokens[known.rows.to(torch.int64)[rows], positions.clamp(0, width - 1)].to(torch.int64)
        tokens = torch.where((positions < width) & (tokens >= 0), tokens, -1)
    else:
        tokens = torch.full_like(positions, -1)
    if known.lengths is None:
        return tokens
    return torch.where(positions < known.lengths.to(torch.int64)[rows], tokens, -2)
