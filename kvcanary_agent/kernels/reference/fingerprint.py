"""The fingerprint of a payload, as plainly as its definition in `kvcanary_agent.kernels.fingerprints`."""

from __future__ import annotations

import torch

from kvcanary_agent.kernels.fingerprints import SEGMENT, byte_keys, num_segments, segment_keys
from kvcanary_agent.kernels.hashing import octets_of


def fingerprint(payload: torch.Tensor) -> torch.Tensor:
    """A 64-bit fingerprint of each row's bytes.

    Args:
        payload: ``[rows, *payload]`` of any dtype, any strides.

    Returns:
        ``[rows]`` int64.
    """
    octets = octets_of(payload).view(torch.int8).to(torch.int64)
    segments = num_segments(octets.shape[1])
    padded = torch.nn.functional.pad(octets, (0, segments * SEGMENT - octets.shape[1])).view(-1, segments, SEGMENT)
    halves = []
    of_byte, of_segment = byte_keys().to(octets), segment_keys(segments).to(octets)
    for half in range(2):
        sums = (padded * of_byte[half]).sum(2)
        halves.append((sums * of_segment[half]).sum(1))
    return (halves[0] & 0xFFFF_FFFF) | (halves[1] << 32)
