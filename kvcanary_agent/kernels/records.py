"""The canary's own memory: what was written to each slot, by whom and when."""

from __future__ import annotations

import torch

from .hashing import as_words, word_keys

UNKNOWN = -1
"""Generation of a slot that came from elsewhere: there is no record that anything could be compared with."""


class Records:
    """Records of one group of layers, a structure of arrays on the pool's device.

    A slot's record counts only while its ``generation`` is that of its block; handing the block out again makes the
    old record void without erasing it, so that it remains as evidence.

    Attributes:
        token: ``[slots]`` int64. position, owner: ``[slots]`` int32; ``owner`` is the writing request's number.
        step: ``[slots]`` int32: the canary's step of the write.
        seed: ``[slots]`` int64: where the chain starts from, a hash of namespace and epoch.
        chain, chain_after: ``[slots]`` int64: the chain before and after this token.
        generation: ``[slots]`` int32; ``block_generation``: ``[blocks]`` int32.
        fingerprints: ``[parts, slots]`` int64; ``fingerprinted``: ``[slots]`` bool, False between a write and the
            forward's end.
        order: ``[slots]`` int32, scratch: which of its step's new tokens wrote the slot.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        views: list[torch.Tensor],
        number_types: list[torch.dtype] | None = None,
        carries_tokens: list[bool] | None = None,
    ) -> None:
        """Make empty records.

        Args:
            num_blocks, block_size, device: Of the group.
            views: ``[blocks, block_size, *payload]`` of each part whose bytes are to be fingerprinted.
            number_types: What each part's bytes mean as numbers; None: the views' dtypes.
            carries_tokens: Whether each part's bytes must differ where the token differs; None: all do.
        """
        self.number_types = number_types or [view.dtype for view in views]
        self.carries_tokens = carries_tokens or [True] * len(views)
        num_slots = num_blocks * block_size
        self.block_size, self.num_blocks, self.num_slots, self.device = block_size, num_blocks, num_slots, device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token, self.seed = zeros(num_slots, dtype=torch.int64), zeros(num_slots, dtype=torch.int64)
        self.position, self.owner = zeros(num_slots), zeros(num_slots)
        self.step, self.generation = zeros(num_slots), zeros(num_slots)
        self.block_generation = torch.ones(num_blocks, dtype=torch.int32, device=device)
        self.chain, self.chain_after = zeros(num_slots, dtype=torch.int64), zeros(num_slots, dtype=torch.int64)
        self.order = zeros(num_slots)
        self.fingerprinted = zeros(num_slots, dtype=torch.bool)
        self.fingerprints = zeros(len(views), num_slots, dtype=torch.int64)
        self.views = [as_words(view) for view in views]
        keys_of_length: dict[int, torch.Tensor] = {}
        self.keys = []
        for view in self.views:
            words = -(-view[0, 0].numel() * view.element_size() // 4)
            self.keys.append(keys_of_length.setdefault(words, word_keys(words, device)))

    def forget(self) -> None:
        """Nothing was ever written, as far as anybody knows."""
        for values in (*self.per_slot, self.fingerprints):
            values.zero_()

    @property
    def per_slot(self) -> tuple[torch.Tensor, ...]:
        """Every ``[slots]`` tensor that describes a write, for moving records along with their blocks."""
        return (
            self.token,
            self.position,
            self.owner,
            self.step,
            self.seed,
            self.generation,
            self.chain,
            self.chain_after,
            self.fingerprinted,
        )

    @property
    def generation_index(self) -> int:
        """Where ``generation`` stands in ``per_slot``: it alone means something else in another block."""
        return 5

    @property
    def num_bytes(self) -> int:
        keys = {id(keys): keys for keys in self.keys}.values()
        tensors = (*self.per_slot, self.order, self.block_generation, self.fingerprints, *keys)
        return sum(t.numel() * t.element_size() for t in tensors)
