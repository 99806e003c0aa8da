"""Records of a pool of which nothing is known but the methods that write to it."""

from __future__ import annotations

from typing import Any

import torch

from kvcanary_agent.canary import Canary, ForwardStep, GroupStep


class RecordedWrites:
    """Turns calls that write into steps: each slot written is a request that reads nothing and has one new token.

    A step begins at the first call and ends when every layer was written, or one is written for a second time. Tokens
    and positions are unknown, so a slot is given the same at every write, and no write of the same bytes is a lost one.
    """

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        group = canary.layout.groups[0]
        self._size, self._device = group.block_size, group.device
        self._num_layers = len({part.layer for part in group.parts})
        self._written: set[int] = set()
        # A first write of the bytes that are there already is no lost write either: nobody knows what is there.
        canary.before_forward(self._step(torch.arange(group.num_slots, device=self._device), "unknown"))
        canary.abandon_step()

    def begin(self, slots: Any, layer: int | None, method: str) -> None:
        """A call is about to write.

        Args:
            slots: ``[tokens]`` integers; negative where nothing is written.
            layer: Which layer; None: all of them.
            method: Who writes, for reports.

        Raises:
            KVCanaryError: In raise mode, if anything is wrong.
        """
        layers = set(range(self._num_layers)) if layer is None else {layer}
        if layer is not None and not 0 <= layer < self._num_layers:
            raise ValueError(f"layer: {layer} is no layer of the pool, which has {self._num_layers}")
        if self._written & layers:
            self._finish()
        if not self._written:
            found = torch.as_tensor(slots, device=self._device).flatten()
            self._canary.before_forward(self._step(found.clone(), method))
        self._written |= layers

    def end(self) -> None:
        """A call has written. Raises as `begin` does."""
        if len(self._written) >= self._num_layers:
            self._finish()

    def _finish(self) -> None:
        self._written.clear()
        self._canary.after_forward()

    def _step(self, slots: torch.Tensor, method: str) -> ForwardStep:
        slots = slots.to(torch.int64).clamp(min=-1)
        offsets = slots % self._size
        return ForwardStep(
            requests=[method] * slots.shape[0],
            prefix_lens=offsets,
            query_offsets=torch.arange(slots.shape[0] + 1, device=self._device),
            token_ids=torch.zeros_like(slots),
            positions=offsets,
            groups=[
                GroupStep(
                    block_table=torch.div(slots, self._size, rounding_mode="floor")[:, None],
                    write_slots=slots,
                )
            ],
        )
