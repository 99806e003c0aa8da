"""One continuation of one request, and where its keys and values are."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    request_id: unique among living sequences; the forks of request "a" are "a/1", "a/2", ...
    root_id, sample_index: the request that was added, and which of its continuations this is.
    token_ids: the prompt, then the outputs.
    n: continuations that this sequence stands for: those it will fork off once its prompt is computed, and itself.
    block_table: blocks of the KV pool; the token at position p is in block_table[p // block_size].
    num_computed: tokens whose keys and values are in those blocks.
    block_hashes: chained hashes of the leading full blocks of `token_ids`, as many as were asked for so far.
    """

    request_id: str
    root_id: str
    sample_index: int = 0
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    n: int = 1
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.num_tokens - self.num_prompt_tokens >= self.max_tokens

    def fork(self, sample_index: int) -> "Sequence":
        """The sequence that continues the same tokens as sample `sample_index`. It has no blocks yet."""
        return Sequence(
            request_id=f"{self.root_id}/{sample_index}",
            root_id=self.root_id,
            sample_index=sample_index,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=self.max_tokens,
            num_computed=self.num_computed,
            block_hashes=list(self.block_hashes),
        )
