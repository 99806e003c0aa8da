"""The tokens that requests consist of, as an engine's scheduler keeps them in lists, on the pool's device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcanary_agent.canary.step import KnownTokens
from kvcanary_agent.kernels.transit import lists_to_device

_TokensOf = Callable[[Any], tuple[Sequence[int], Sequence[int]]]

_FIRST_ROWS = 16
_FIRST_WIDTH = 256


class Histories:
    """One row of tokens for each request that was in a batch and is still alive; each step adds only what is new.

    Where steps overlap, the scheduler learns of a token a step late: until then it is unknown.
    """

    def __init__(self, device: torch.device, max_bytes: int, tokens_of: _TokensOf) -> None:
        """Start with none.

        Args:
            device: The pool's.
            tokens_of: A request's prompt and what it has generated since.
            max_bytes: How large the table of tokens may grow. Positions beyond what fits stay unknown, and nothing is
                known of a step of more requests than fit.
        """
        self._device = device
        self._tokens_of = tokens_of
        self._max_bytes = max_bytes
        self._tokens = torch.full((_FIRST_ROWS, _FIRST_WIDTH), -1, dtype=torch.int32, device=device)
        self._rows: dict[int, _Row] = {}
        self._free = list(range(_FIRST_ROWS))

    @property
    def num_bytes(self) -> int:
        return self._tokens.numel() * self._tokens.element_size()

    def known_tokens(self, requests: Sequence[Any]) -> KnownTokens | None:
        """The tokens of these requests of the scheduler, in the order of the step's rows; None if they do not fit."""
        rows = [row for request in requests if (row := self._row_of(request)) is not None]
        if len(rows) < len(requests):
            return None
        parts = [self._tokens_of(request) for request in requests]
        self._widen(max((len(prompt) + len(output) for prompt, output in parts), default=0))
        width = self._tokens.shape[1]
        at_rows: list[int] = []
        at_columns: list[int] = []
        new: list[int] = []
        for (prompt, output), row in zip(parts, rows, strict=True):
            length, known = min(len(prompt) + len(output), width), row.length
            if length > known:
                added = [*prompt[known:length], *output[max(known - len(prompt), 0) : max(length - len(prompt), 0)]]
                at_rows += [row.index] * len(added)
                at_columns += range(known, length)
                new += added
                row.length = length
        rows_at, columns_at, tokens, step_rows = lists_to_device(
            [at_rows, at_columns, new, [row.index for row in rows]], self._device
        )
        if new:
            self._tokens[rows_at, columns_at] = tokens.to(torch.int32)
        return KnownTokens(tokens=self._tokens, rows=step_rows)

    def _row_of(self, request: Any) -> _Row | None:
        row = self._rows.get(id(request))
        if row is not None and row.request() is request:
            return row
        if row is not None:
            self._release(id(request))
        if not self._free:
            for key in [key for key, row in self._rows.items() if row.request() is None]:
                self._release(key)
        if not self._free and self._may_double():
            self._double_rows()
        if not self._free:
            return None
        row = self._rows[id(request)] = _Row(self._free.pop(), weakref.ref(request))
        return row

    def _release(self, key: int) -> None:
        row = self._rows.pop(key)
        self._tokens[row.index].fill_(-1)
        self._free.append(row.index)

    def _may_double(self) -> bool:
        return 2 * self.num_bytes <= self._max_bytes

    def _double_rows(self) -> None:
        count = self._tokens.shape[0]
        self._tokens = torch.cat([self._tokens, torch.full_like(self._tokens, -1)])
        self._free.extend(range(count, 2 * count))

    def _widen(self, width: int) -> None:
        while self._tokens.shape[1] < width and self._may_double():
            self._tokens = torch.cat([self._tokens, torch.full_like(self._tokens, -1)], dim=1)


class _Row:
    """Where a request's tokens are, and how many are there."""

    __slots__ = ("index", "length", "request")

    def __init__(self, index: int, request: weakref.ref[Any]) -> None:
        self.index, self.request, self.length = index, request, 0
