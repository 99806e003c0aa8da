"""Sizes of the model, of the KV pool and of a step."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the random transformer. The same `seed` gives the same weights."""

    vocab_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    mlp_size: int = 128
    seed: int = 0

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine.

    block_size: tokens a block of the KV pool holds.
    num_blocks: blocks in the pool, the null block included.
    max_num_seqs: most sequences in one step.
    max_batched_tokens: token budget of one step; a longer prompt is prefilled in chunks.
    max_model_len: most tokens of one sequence, prompt and output together.
    device: the torch device of weights and pool.

    Raises ValueError if one sequence of `max_model_len` tokens would not fit the pool: it could never finish.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    block_size: int = 8
    num_blocks: int = 128
    max_num_seqs: int = 8
    max_batched_tokens: int = 64
    max_model_len: int = 512
    device: str = "cpu"

    def __post_init__(self) -> None:
        capacity = (self.num_blocks - 1) * self.block_size
        if self.max_model_len > capacity:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but {self.num_blocks} blocks of {self.block_size} tokens hold "
                f"{capacity} beside the null block; raise num_blocks or lower max_model_len"
            )
