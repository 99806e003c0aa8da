"""Digests of stored K/V in a file beside the data, so that the engine that loads it can be another process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from kvcanary_agent.canary.layout import KVLayout
from kvcanary_agent.kernels import reference
from kvcanary_agent.kernels.records import Records


class DigestFile:
    """Reads and writes the digests of one group of layers of one rank.

    The file holds fingerprints alone, no tokens, and says what they were made of: those of another model, another
    arrangement of the pool or another version of the fingerprints are left alone.
    """

    def __init__(self, layout: KVLayout, group: int) -> None:
        described = layout.groups[group]
        self._name = f"kvcanary-{described.name}-{layout.rank}of{layout.world_size}.pt"
        self._made_of = {
            "scheme": _scheme(),
            "parts": [
                (part.name, list(part.view.shape[1:]), list(part.view.stride()), str(part.view.dtype))
                for part in described.parts
            ],
        }

    def write(self, folder: Path, fingerprints: torch.Tensor) -> None:
        """Write the fingerprints of a sequence of blocks, ``[parts, blocks, block_size]`` int64, whole or not at all.

        Raises:
            OSError: If the file cannot be written.
        """
        descriptor, unfinished = tempfile.mkstemp(dir=folder, prefix=f".{self._name}.")
        with open(descriptor, "wb") as file:
            torch.save({"made_of": self._made_of, "fingerprints": fingerprints.clone()}, file)
        os.replace(unfinished, folder / self._name)

    def read(self, folder: Path, num_blocks: int) -> torch.Tensor | None:
        """What was written there; None if there is nothing that can be compared with so many blocks."""
        try:
            kept = torch.load(folder / self._name, weights_only=True)
            made_of, fingerprints = kept["made_of"], kept["fingerprints"]
            comparable = made_of == self._made_of and fingerprints.dtype == torch.int64 and fingerprints.dim() == 3
            return fingerprints if comparable and fingerprints.shape[1] == num_blocks else None
        except Exception:  # no file, or one that is cut off, or somebody else's: whatever torch makes of it
            return None


def _scheme() -> list[int]:
    """The fingerprints of some fixed bytes: equal for two versions that compute them alike."""
    probe = torch.arange(2 * 3 * 40, dtype=torch.int32).view(1, 2, 3, 40)
    records = Records(1, 2, torch.device("cpu"), [probe])
    reference.remeasure(records, torch.arange(2))
    return [int(value) for value in records.fingerprints[0]]
