"""Which sequence holds which block of the KV pool."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as List
from hashlib import blake2b

from kvcanary_agent.demo.sequence import Sequence

NULL_BLOCK = 0
"""Pads block tables. It is never allocated, and what it holds is never used."""


class BlockManager:
    """Paged blocks with reference counts, prefix sharing and copy-on-write.

    A block is free or held by at least one block table. A full block whose tokens are computed is indexed by the
    chained hash of all tokens up to its end, so that a later sequence with the same prefix shares it; a freed block
    stays indexed until it is the least recently used free block and is allocated again.

    Invariants: a sequence writes only to blocks that it alone holds and that are not indexed; blocks that are free are
    those with reference count 0; the null block is neither free nor held.

    free_blocks: the free blocks, a set in the order in which they will be allocated.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The indexed blocks that hold the longest prefix of `seq`, at least one of whose tokens is left to compute."""
        blocks = []
        for block_hash in self._hashes(seq, (seq.num_tokens - 1) // self.block_size):
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_admit(self, seq: Sequence, prefix: List[int], num_tokens: int) -> bool:
        """Whether `seq`, which holds nothing yet, can share `prefix` and then append `num_tokens`."""
        num_revived = sum(block in self.free_blocks for block in prefix)
        num_fresh = self._blocks_for(len(prefix) * self.block_size + num_tokens) - len(prefix)
        return num_revived + num_fresh <= self.num_free

    def can_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `append(seq, num_tokens)` finds enough free blocks."""
        num_fresh = self._blocks_for(seq.num_computed + num_tokens) - len(seq.block_table)
        return num_fresh + len(self._shared_blocks_to_write(seq)) <= self.num_free

    def append(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Give `seq` room of its own for the `num_tokens` after those computed.

        Returns the block copies (source, destination) that have to be made before anything is written.
        """
        copies = [self.copy_on_write(seq, index) for index in self._shared_blocks_to_write(seq)]
        num_fresh = self._blocks_for(seq.num_computed + num_tokens) - len(seq.block_table)
        if num_fresh > 0:
            self.allocate(seq, num_fresh)
        return copies

    def allocate(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Put `num_blocks` fresh blocks at the end of the block table of `seq`, and return them.

        Raises KeyError if too few are free.
        """
        blocks = [self._take_free_block() for _ in range(num_blocks)]
        seq.block_table.extend(blocks)
        return blocks

    def share(self, seq: Sequence, blocks: List[int]) -> None:
        """Put `blocks`, which hold the next tokens of `seq` already, at the end of its block table."""
        for block in blocks:
            self.free_blocks.pop(block, None)
            self._ref_counts[block] += 1
        seq.block_table.extend(blocks)

    def copy_on_write(self, seq: Sequence, index: int) -> tuple[int, int]:
        """Replace the shared block `block_table[index]` of `seq` by a fresh one; returns (source, destination).

        The caller has the contents copied.
        """
        source = seq.block_table[index]
        destination = self._take_free_block()
        seq.block_table[index] = destination
        self._release(source)
        return source, destination

    def free(self, seq: Sequence) -> None:
        """Take all blocks from `seq`. The end of a prefix is given away before its beginning."""
        for block in reversed(seq.block_table):
            self._release(block)
        seq.block_table.clear()

    def index_full_blocks(self, seq: Sequence, num_computed_before: int) -> None:
        """Offer the blocks of `seq` that became full since `num_computed_before` tokens were computed for sharing."""
        num_full = seq.num_computed // self.block_size
        hashes = self._hashes(seq, num_full)
        for index in range(num_computed_before // self.block_size, num_full):
            block, block_hash = seq.block_table[index], hashes[index]
            if block_hash not in self._block_by_hash:
                self._block_by_hash[block_hash] = block
                self._hash_by_block[block] = block_hash

    def is_indexed(self, block: int) -> bool:
        """Whether a later sequence with the same prefix can be given `block`."""
        return block in self._hash_by_block

    def reset_prefix_cache(self) -> None:
        """Forget what the blocks hold: no later sequence shares one of today's blocks."""
        self._block_by_hash.clear()
        self._hash_by_block.clear()

    def _take_free_block(self) -> int:
        block, _ = self.free_blocks.popitem(last=False)
        block_hash = self._hash_by_block.pop(block, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]
        self._ref_counts[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self.free_blocks[block] = None
            if block not in self._hash_by_block:
                # Nobody can hit it any more: use it up before an indexed block.
                self.free_blocks.move_to_end(block, last=False)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _shared_blocks_to_write(self, seq: Sequence) -> list[int]:
        """Indices into the block table of `seq`, from the next token on, of blocks that others hold too."""
        first = seq.num_computed // self.block_size
        return [index for index in range(first, len(seq.block_table)) if self._ref_counts[seq.block_table[index]] > 1]

    def _hashes(self, seq: Sequence, num_blocks: int) -> List[bytes]:
        """Hashes of the first `num_blocks` blocks of tokens of `seq`. Each covers the hash before it: 128 bits."""
        hashes = seq.block_hashes
        for index in range(len(hashes), num_blocks):
            tokens = array("q", seq.token_ids[index * self.block_size : (index + 1) * self.block_size])
            previous = hashes[-1] if hashes else b""
            hashes.append(blake2b(previous + tokens.tobytes(), digest_size=16).digest())
        return hashes[:num_blocks]
