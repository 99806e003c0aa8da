"""The tokens that requests consist of, on the pool's device, where the engine has none there that can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvcanary_agent.canary.step import ForwardStep, KnownTokens

_FIRST_ROWS = 16
_FIRST_WIDTH = 256


class Histories:
    """One row of tokens for each request that has been scheduled and is not finished.

    A prompt is known from the start; what a request generates is known once it has been the input of a step, because
    until then only the device knows it. Nothing waits for the device.
    """

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        """Args:
        device: The pool's.
        max_bytes: How large the table of tokens may grow; positions beyond what fits stay unknown.
        """
        self._device = device
        self._max_bytes = max_bytes
        # In-place updates must work in and outside inference mode, whichever the engine is in now.
        with torch.inference_mode(False):
            # The last column takes what lies beyond the width.
            self._tokens = torch.full((_FIRST_ROWS, _FIRST_WIDTH + 1), -1, dtype=torch.int32, device=device)
            self._prompt_lens = torch.zeros(_FIRST_ROWS, dtype=torch.int64, device=device)
        self._row_of: dict[str, int] = {}
        self._free = list(range(_FIRST_ROWS))
        self._batch: tuple[tuple[str, ...], torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return self._tokens.numel() * self._tokens.element_size()

    def start(self, request: str, prompt: Sequence[int]) -> None:
        """A request with this prompt is scheduled for the first time, or one of this id is replaced."""
        self.finish([request])
        if not self._free:
            self._double_rows()
        row = self._row_of[request] = self._free.pop()
        self._widen(len(prompt))
        width = min(len(prompt), self._width)
        self._tokens[row].fill_(-1)
        self._tokens[row, :width].copy_(self._on_device(prompt[:width], torch.int32))
        self._prompt_lens[row] = len(prompt)

    def finish(self, requests: Iterable[str]) -> None:
        """These requests will not be scheduled any more; one that is not known is none."""
        for request in requests:
            row = self._row_of.pop(request, None)
            if row is not None:
                self._free.append(row)
                self._batch = None

    def known_tokens(self, requests: Sequence[str], prefix_lens: torch.Tensor) -> KnownTokens:
        """What is known of the requests of a step, before `written` is told of it.

        Args:
            requests: ``[rows]`` ids.
            prefix_lens: ``[rows]`` integer: how much of each was computed by earlier steps.
        """
        rows = self._rows(requests)
        return KnownTokens(
            tokens=self._tokens[:, : self._width],
            rows=rows,
            # What lies beyond was drafted and rejected, or is only now being computed.
            lengths=torch.maximum(self._prompt_lens[rows], prefix_lens.to(torch.int64)),
        )

    def written(self, step: ForwardStep, longest: int) -> None:
        """The tokens of ``step`` are those of its requests, as far as later steps count them as computed.

        Args:
            step: As it was described.
            longest: At least the length of the longest of its requests with this step.
        """
        self._widen(longest)
        lengths = (step.query_offsets[1:] - step.query_offsets[:-1]).to(torch.int64)
        rows = torch.repeat_interleave(self._rows(step.requests), lengths, output_size=step.token_ids.shape[0])
        columns = step.positions.to(torch.int64).clamp(0, self._width)
        self._tokens[rows, columns] = step.token_ids.to(torch.int32)

    @property
    def _width(self) -> int:
        return self._tokens.shape[1] - 1

    def _rows(self, requests: Sequence[str]) -> torch.Tensor:
        batch = tuple(requests)
        if self._batch is None or self._batch[0] != batch:
            for request in batch:
                if request not in self._row_of:
                    self.start(request, ())
            rows = self._on_device([self._row_of[request] for request in batch], torch.int64)
            self._batch = batch, rows
        return self._batch[1]

    def _double_rows(self) -> None:
        count = self._tokens.shape[0]
        if 2 * self.num_bytes > self._max_bytes:
            self._tokens = self._tokens[:, : self._width // 2 + 1]
        with torch.inference_mode(False):
            self._tokens = torch.cat([self._tokens, torch.full_like(self._tokens, -1)])
            self._prompt_lens = torch.cat([self._prompt_lens, torch.zeros_like(self._prompt_lens)])
        self._free.extend(range(count, 2 * count))

    def _widen(self, width: int) -> None:
        while self._width < width and 2 * self.num_bytes <= self._max_bytes:
            with torch.inference_mode(False):
                more = self._tokens.new_full((self._tokens.shape[0], self._width), -1)
                self._tokens = torch.cat([self._tokens[:, :-1], more, self._tokens[:, -1:]], dim=1)

    def _on_device(self, numbers: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.tensor(numbers, dtype=dtype, device=self._device)
        # From pinned memory, because the host would wait for a copy from any other.
        return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(self._device, non_blocking=True)
