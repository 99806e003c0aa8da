"""Fingerprints of caches that are one tensor per layer, a column for each position."""

from __future__ import annotations

import torch

from .hashing import octets_of
from .reference.fingerprint import fingerprint
from .tuned.fingerprint import Fingerprinter

# Bytes at a time: the reference widens each byte to eight.
_CHUNK_BYTES = 1 << 24
_on_cpu = Fingerprinter([], [])


def column_prints(tensor: torch.Tensor) -> torch.Tensor:
    """The fingerprint of what each row holds for each position, ``[rows, columns]`` int64.

    Args:
        tensor: ``[rows, heads, columns, dim]`` of any dtype, any strides.
    """
    rows, heads, columns, dim = tensor.shape
    prints = torch.empty((rows, columns), dtype=torch.int64, device=tensor.device)
    width = max(1, _CHUNK_BYTES // max(1, rows * heads * dim * tensor.element_size()))
    for start in range(0, columns, width):
        chunk = tensor[:, :, start : start + width].transpose(1, 2).flatten(0, 1)
        found = _on_cpu.of_rows(octets_of(chunk)) if chunk.device.type == "cpu" else fingerprint(chunk)
        prints[:, start : start + width] = found.view(rows, -1)
    return prints
