"""A small random transformer that reads its keys and values from the paged pool."""

from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, silu

from kvcanary_agent.demo.config import ModelConfig
from kvcanary_agent.demo.kv_pool import KVPool

ROPE_BASE = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one forward reads and writes. The tokens of all rows stand one after another; there is no padding token.

    request_ids: one per row, on the host.
    block_tables: [rows, max_blocks] int32, padded with the null block.
    prefix_lens: [rows] int32, tokens of each row that are in the pool already.
    query_offsets: [rows + 1] int32; the new tokens of row r are query_offsets[r] up to query_offsets[r + 1].
    token_ids, positions, slot_mapping: [tokens] int64; the slot is where the token's keys and values are written.
    max_query_len: most new tokens of a row, on the host.
    """

    request_ids: tuple[str, ...]
    block_tables: torch.Tensor
    prefix_lens: torch.Tensor
    query_offsets: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Matrices of one layer, float64, to be multiplied from the right.

    qkv: [hidden, (heads + 2 * kv_heads) * head_dim]. out: [hidden, hidden].
    gate, up: [hidden, mlp]. down: [mlp, hidden].
    """

    qkv: torch.Tensor
    out: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Transformer:
    """Embeddings, then layers of grouped-query attention with rotary positions and a gated MLP, then a vocabulary head.

    Everything but the pool is float64. How tokens are batched changes the order of floating-point sums; in float64
    that is far too little to change which token is the likeliest, so outputs do not depend on batching.
    """

    def __init__(self, config: ModelConfig, *, max_positions: int, device: str) -> None:
        generator = torch.Generator().manual_seed(config.seed)

        def weight(rows: int, columns: int, scale: float) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * scale).to(device)

        hidden, mlp = config.hidden_size, config.mlp_size
        qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.config = config
        self.embedding = weight(config.vocab_size, hidden, 1.0)
        self.layers = [
            LayerWeights(
                qkv=weight(hidden, qkv_size, hidden**-0.5),
                out=weight(hidden, hidden, hidden**-0.5),
                gate=weight(hidden, mlp, hidden**-0.5),
                up=weight(hidden, mlp, hidden**-0.5),
                down=weight(mlp, hidden, mlp**-0.5),
            )
            for _ in range(config.num_layers)
        ]
        self.head = weight(hidden, config.vocab_size, hidden**-0.5)

        frequencies = ROPE_BASE ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)
        # [positions, head_dim / 2] complex128, one rotation for each pair of dimensions.
        self.rotations = torch.polar(torch.ones_like(angles), angles).to(device)

    def forward(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """Write the new tokens to the pool, and return the logits of each row's last one, [rows, vocab] float64."""
        config = self.config
        head_counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        rotations = self.rotations[batch.positions].unsqueeze(1)
        attention = PagedAttention(batch, pool)
        x = self.embedding[batch.token_ids]
        for index, layer in enumerate(self.layers):
            qkv = (normalise(x) @ layer.qkv).view(len(x), -1, config.head_dim)
            queries, keys, values = torch.split(qkv, head_counts, dim=1)
            pool.write(index, batch.slot_mapping, rotate(keys, rotations), values)
            x = x + attention(index, rotate(queries, rotations)) @ layer.out
            y = normalise(x)
            x = x + (silu(y @ layer.gate) * (y @ layer.up)) @ layer.down
        last_tokens = batch.query_offsets[1:] - 1
        return normalise(x[last_tokens]) @ self.head


class PagedAttention:
    """Causal attention of one batch over the pool, through its block tables. What the layers share is computed once."""

    def __init__(self, batch: Batch, pool: KVPool) -> None:
        num_rows, max_blocks = batch.block_tables.shape
        device = batch.block_tables.device
        query_lens = batch.query_offsets.diff()
        self._pool = pool
        self._block_tables = batch.block_tables
        self._max_query_len = batch.max_query_len
        self._row = torch.repeat_interleave(torch.arange(num_rows, device=device), query_lens)
        self._column = batch.positions - batch.prefix_lens[self._row]

        key_positions = torch.arange(max_blocks * pool.data.shape[3], device=device)
        context_lens = batch.prefix_lens + query_lens
        query_positions = batch.prefix_lens[:, None] + torch.arange(self._max_query_len, device=device)
        # [rows, keys, 1, 1]: slots without a token of the row. A weight of 0 does not hide a NaN that is left there.
        self._outside_context = (key_positions >= context_lens[:, None])[:, :, None, None]
        # [rows, 1, 1, queries, keys]: keys that come after the query.
        self._hidden = (key_positions > query_positions[:, :, None])[:, None, None]

    def __call__(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """queries: [tokens, heads, head_dim]; returns [tokens, heads * head_dim]. The new tokens are in the pool."""
        keys, values = self._pool.read(layer, self._block_tables)
        num_rows, _, num_kv_heads, head_dim = keys.shape
        # Neighbouring query heads share a KV head.
        queries = queries.view(len(queries), num_kv_heads, -1, head_dim)
        grouped = queries.new_zeros(num_rows, self._max_query_len, *queries.shape[1:])
        grouped[self._row, self._column] = queries
        grouped = grouped.permute(0, 2, 3, 1, 4)
        keys = keys.to(queries.dtype).permute(0, 2, 3, 1).unsqueeze(2)
        values = values.to(queries.dtype).masked_fill(self._outside_context, 0.0).transpose(1, 2).unsqueeze(2)
        scores = (grouped @ keys * head_dim**-0.5).masked_fill(self._hidden, float("-inf"))
        attended: torch.Tensor = (scores.softmax(-1) @ values).permute(0, 3, 1, 2, 4)
        return attended[self._row, self._column].flatten(1)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalisation of the last dimension."""
    return rms_norm(x, x.shape[-1:], eps=1e-6)


def rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of pairs of neighbouring dimensions.

    x: [tokens, heads, head_dim] float64. rotations: [tokens, 1, head_dim / 2] complex128.
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2)
