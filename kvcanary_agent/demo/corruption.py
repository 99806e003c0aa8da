"""Faults that break the engine behind its own back, as a stray write or a bug in the allocator would.

Both are to be called between two steps. They change what the engine already decided, so that nothing in the engine
notices: requests go on, with wrong tokens.
"""

from dataclasses import dataclass

import torch

from kvcanary_agent.demo.engine import Engine
from kvcanary_agent.demo.kv_pool import KEY, VALUE
from kvcanary_agent.demo.sequence import Sequence

PARTS = {"key": KEY, "value": VALUE}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedByte:
    """Where a byte of the pool was inverted. `request_id` will read it in its next step."""

    request_id: str
    layer: int
    part: str
    position: int
    block: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleAllocation:
    """`request_id` goes on reading `block`, which is now also the next block that `other_request_id` will write."""

    request_id: str
    other_request_id: str
    block: int


def flip_byte(
    engine: Engine,
    *,
    request_id: str | None = None,
    layer: int = 0,
    part: str = "key",
    position: int = 0,
    byte: int = 1,
) -> FlippedByte | None:
    """Invert one byte of what a running sequence has stored for its token at `position`.

    request_id: the sequence; by default the first that has computed the token.
    part: "key" or "value".
    byte: which byte of the slot; the default is the high byte of the first bfloat16: its sign and exponent.

    Returns None if no such sequence is running, with that token computed. Raises ValueError for a place that no pool
    of this engine has.
    """
    pool = engine.runner.pool.data
    if part not in PARTS:
        raise ValueError(f"part is {part!r}, but must be one of {', '.join(PARTS)}")
    num_layers, slot_bytes = pool.shape[0], pool[0, 0, 0, 0].nbytes
    for name, value, size in (
        ("layer", layer, num_layers),
        ("position", position, engine.config.max_model_len),
        ("byte", byte, slot_bytes),
    ):
        if not 0 <= value < size:
            raise ValueError(f"{name} is {value}, but must be from 0 to {size - 1}")

    for seq in engine.scheduler.running:
        if request_id in (None, seq.request_id) and position < seq.num_computed:
            block = seq.block_table[position // engine.config.block_size]
            offset = position % engine.config.block_size
            slot_content = pool[layer, PARTS[part], block, offset].flatten().view(torch.uint8)
            slot_content[byte] ^= 0xFF
            return FlippedByte(
                request_id=seq.request_id,
                layer=layer,
                part=part,
                position=position,
                block=block,
                slot=block * engine.config.block_size + offset,
            )
    return None


def double_allocation(
    engine: Engine, *, request_id: str | None = None, other_request_id: str | None = None
) -> DoubleAllocation | None:
    """Make the allocator hand the first block of one running sequence to another one, as its next block.

    request_id: the sequence that holds the block; by default the first that has computed a token.
    other_request_id: the sequence that gets it too; by default the first other one that will need one more block and
        does not hold this one.

    Returns None if no two such sequences are running.
    """
    manager = engine.block_manager
    for holder in engine.scheduler.running:
        if request_id not in (None, holder.request_id) or not holder.num_computed:
            continue
        block = holder.block_table[0]
        for other in engine.scheduler.running:
            if (
                other_request_id in (None, other.request_id)
                and block not in other.block_table
                and _will_need_another_block(engine, other)
            ):
                manager.free_blocks[block] = None
                manager.free_blocks.move_to_end(block, last=False)
                manager.allocate(other, 1)
                return DoubleAllocation(request_id=holder.request_id, other_request_id=other.request_id, block=block)
    return None


def _will_need_another_block(engine: Engine, seq: Sequence) -> bool:
    # The last token generated is never computed.
    num_tokens_to_store = seq.num_prompt_tokens + seq.max_tokens - 1
    return num_tokens_to_store > len(seq.block_table) * engine.config.block_size
