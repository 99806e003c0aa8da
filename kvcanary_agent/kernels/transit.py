"""Between host and device without waiting: numbers that go there, and what comes back one look later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_asynchronous(device: torch.device) -> bool:
    """Whether the device works on while the host does, so that looking at a tensor means waiting for it."""
    return device.type == "cuda"


def to_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers of the host as a ``[n]`` int64 tensor."""
    if not is_asynchronous(device):
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    # From pinned memory, because the host would wait for a copy from any other.
    return torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)


def lists_to_device(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Each list as a ``[n]`` int64 tensor, all of them in one copy."""
    numbers = to_device([number for each in lists for number in each], device)
    return torch.split_with_sizes(numbers, [len(each) for each in lists])


def to_host(source: torch.Tensor) -> torch.Tensor:
    """The same in host memory, good for nothing but to be copied back until the device has arrived here."""
    if not is_asynchronous(source.device):
        return source
    kept = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
    return kept.copy_(source, non_blocking=True)


class Answer:
    """A small device tensor on its way to the host: looking does not wait for the device.

    Attributes:
        on_its_way: Asked for, and not yet seen.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self.on_its_way = False
        if is_asynchronous(source.device):
            self._host = torch.zeros(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's, unannotated

    def ask(self) -> None:
        """Send off what the source will hold when the device arrives here."""
        self.on_its_way = True
        if is_asynchronous(self._source.device):
            self._host.copy_(self._source, non_blocking=True)
            self._arrived.record()

    def look(self, *, rows: int | None = None, wait: bool = False) -> Any:
        """The values that were asked for, or the first rows of them, as lists; None if they are still on their way."""
        values = self._source
        if is_asynchronous(values.device):
            if wait:
                self._arrived.synchronize()
            elif not self._arrived.query():
                return None
            values = self._host
        self.on_its_way = False
        return values[:rows].tolist()
