"""The memory of all keys and values."""

import torch

KEY, VALUE = 0, 1


class KVPool:
    """Keys and values of every token of every running and cached sequence.

    data: [layers, 2, blocks, block_size, kv_heads, head_dim], bfloat16; index 0 of the second dimension holds keys,
        index 1 values. Slot s is token s % block_size of block s // block_size.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, device: str
    ) -> None:
        self.data = torch.zeros(
            num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim, dtype=torch.bfloat16, device=device
        )

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one token per slot.

        slots: [tokens] int64. keys, values: [tokens, kv_heads, head_dim], rounded to the pool's dtype.
        """
        self.data[layer, KEY].flatten(0, 1)[slots] = keys.to(self.data.dtype)
        self.data[layer, VALUE].flatten(0, 1)[slots] = values.to(self.data.dtype)

    def read(self, layer: int, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the keys and the values of each row of `block_tables`, [rows, max_blocks] int32.

        Returns two tensors [rows, max_blocks * block_size, kv_heads, head_dim], null blocks included.
        """
        return (
            self.data[layer, KEY][block_tables].flatten(1, 2),
            self.data[layer, VALUE][block_tables].flatten(1, 2),
        )

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy whole blocks in every layer, all sources read before a destination is written.

        sources, destinations: [pairs] int64.
        """
        self.data[:, :, destinations] = self.data[:, :, sources]
