"""Before a forward: writes are entered, and what their slots hold now is fingerprinted, in one launch."""

# Triton's language has types of its own, which annotations cannot say.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton.language as tl

from .common import kernel
from .content import record_content_kernel
from .writes import enter_tile


@kernel
def enter_measured_writes_kernel(
    table, num_blocks, block_size, block_generation,
    owners, seeds, prefix_lens, num_rows, block_table, table_stride, width,
    write_rows, offsets, new_tokens, positions, slots, num_tokens,
    sums, totals,
    fingerprints, num_parts, parts, all_keys, flags,
    ring, ring_count, tallies, capacity, group, step, record_tally,
    TILE: tl.constexpr, WORD: tl.constexpr, PARTS: tl.constexpr, WORD_TILE: tl.constexpr,
):  # fmt: skip
    """`enter_writes_kernel` and, for `MEASURE_ONLY`, `record_content_kernel`, neither of which reads what the other
    writes: a grid of (tokens, 2)."""
    if tl.program_id(1) == 0:
        if tl.program_id(0) * TILE < num_tokens:
            enter_tile(
                table, num_blocks, block_size, block_generation, owners, seeds, prefix_lens, num_rows, block_table,
                table_stride, width, write_rows, offsets, new_tokens, positions, slots, num_tokens, sums, totals, ring,
                ring_count, tallies, capacity, group, step, TILE,
            )  # fmt: skip
    else:
        record_content_kernel(
            table, num_blocks, block_size, fingerprints, num_parts, parts, all_keys, slots, positions, write_rows,
            owners, flags, ring, ring_count, tallies, capacity, group, step, record_tally, True, WORD, PARTS, WORD_TILE,
        )  # fmt: skip
