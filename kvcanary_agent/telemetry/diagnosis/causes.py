"""The causes that a diagnosis can name: what each is called, and what an operator can try next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One explanation.

    Attributes:
        cause: A stable identifier, a key of :data:`CAUSES`.
        sentence: What happened and what to look at, naming block, requests, steps, layer and part as far as known.
        confidence: From 0 (a guess) to 1 (nothing else explains it).
    """

    cause: str
    sentence: str
    confidence: float

    @property
    def title(self) -> str:
        return CAUSES[self.cause].title

    @property
    def next_steps(self) -> tuple[str, ...]:
        return CAUSES[self.cause].next_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Explanations, the likeliest first; at least one."""

    causes: tuple[Cause, ...]

    @property
    def cause(self) -> str:
        return self.causes[0].cause

    @property
    def sentence(self) -> str:
        return self.causes[0].sentence

    @property
    def confidence(self) -> float:
        return self.causes[0].confidence


@dataclass(frozen=True, slots=True)
class CauseText:
    """What is said about a cause wherever it occurs.

    Attributes:
        title: A few words, no sentence.
        next_steps: What to try, the most telling first; each a sentence without its full stop.
    """

    title: str
    next_steps: tuple[str, ...]


_FULL = "set KVCANARY_CONTENT=full, so that changed bytes are seen in the step in which they change"
_NO_PREFIX_CACHE = "run once with the prefix cache off: if the violations end, its keys or its evictions are at fault"
_SERIAL = "run with one request at a time: if the violations end, two requests or two streams race"

CAUSES: dict[str, CauseText] = {
    "address_outside_pool": CauseText(
        "an address outside of the pool",
        (
            "find who computes the slot mapping of this request: an uninitialised, stale or negative entry",
            "compare the block size that the scheduler uses with that of the attention backend",
        ),
    ),
    "allocator_misuse": CauseText(
        "the block allocator was used against its rules",
        (
            "log the allocator's calls for this block, with their call stacks",
            "look at the paths that end a request early: abort, preemption, timeout, disconnect",
        ),
    ),
    "block_overwritten": CauseText(
        "part of a block was overwritten outside of the forward",
        (
            "list what copies to the pool beside the model: swap, offload, connectors, defragmentation",
            "check the copies' sizes and strides for this layer against the pool's layout",
            _FULL,
        ),
    ),
    "block_reused_during_transfer": CauseText(
        "a block was reused while a transfer still used it",
        (
            "keep a reference to the block until the copy's event has completed, not until it was enqueued",
            "look at preemption and abort of requests that are being stored or loaded",
            "run once with the connector or the offloading off",
        ),
    ),
    "block_table_swapped": CauseText(
        "entries of a block table are swapped or stale",
        (
            "look at what reorders rows or blocks in the batch: condensing, preemption, beam or parallel sampling",
            "check that device and host copies of the block table are updated in the same step",
        ),
    ),
    "cache_survived_weight_update": CauseText(
        "cached K/V outlived a change of weights",
        (
            "reset the prefix cache when weights are loaded, and drain or recompute running requests",
            "check that external tiers (offload, connectors) are reset too",
        ),
    ),
    "copy_incomplete": CauseText(
        "a copy of a block did not bring all bytes",
        (
            "check that the block copy covers all layers, K and V, and scales",
            "check that the copy is ordered before the forward that reads its destination",
        ),
    ),
    "double_allocation": CauseText(
        "a block was handed out twice",
        (
            "log alloc and free of this block, with their call stacks",
            "look at references that prefix hits take: a hit on a free block must take it off the free list",
            _NO_PREFIX_CACHE,
        ),
    ),
    "double_free": CauseText(
        "a block was freed twice",
        (
            "look at the paths that end a request early and then again: abort and finish, preemption and abort",
            "check who frees blocks by number beside the request that holds them",
        ),
    ),
    "foreign_block": CauseText(
        "a block table names a block that was never handed to the request",
        (
            "check the row of this request in the batch's block table: shifted by one, or left by another request",
            "check that rows are cleared when a request leaves the batch",
        ),
    ),
    "freed_while_in_use": CauseText(
        "a block was freed while a request still reads it",
        (
            "find who freed the block: a reference taken back once too often, too short a window, a preemption",
            "check that a preempted or resumed request gets a new block table before it is computed again",
            _NO_PREFIX_CACHE,
        ),
    ),
    "late_write": CauseText(
        "a write of an earlier owner landed late",
        (
            "look for work on another stream, or in another process, that outlives its request",
            "delay the reuse of freed blocks until the device has finished the step that used them",
            _FULL,
        ),
    ),
    "many_blocks_overwritten": CauseText(
        "bytes in several blocks were overwritten",
        (
            "list what copies to the pool beside the model: swap, offload, connectors, defragmentation",
            "run the device's memory checker (compute-sanitizer) over a short load",
            _FULL,
        ),
    ),
    "misdirected_write": CauseText(
        "a token was written to another slot than it should be",
        (
            "check the slot mapping on the device at the time the cache write runs, not when it was prepared",
            "look at kernels that write K/V outside of the cache update: fused rotary, quantisation",
            _FULL,
        ),
    ),
    "nonfinite_in_null_block": CauseText(
        "NaN or infinity in the null block",
        (
            "find who writes to it: padded rows computed from uninitialised memory",
            "zero the null block, or mask padded rows before the cache write: attention multiplies by it",
        ),
    ),
    "nonfinite_values": CauseText(
        "the model computed NaN or infinity",
        (
            "run the prompt alone and look at the first layer that is not finite",
            "check scales of a quantised cache, and the dtype's range",
        ),
    ),
    "null_block_handed_out": CauseText(
        "the null block was handed out",
        (
            "check which block this engine takes for the null block, and that the allocator never frees it",
            "compare the agent's null block (in the incident file) with the engine's",
        ),
    ),
    "padding_writes_live_slot": CauseText(
        "padding writes to a slot in use",
        (
            "reset the slot mapping beyond the batch to the skip value before each padded (graph) run",
            "check which block this engine takes for the null block",
            "run once without CUDA graphs: if the violations end, a captured slot mapping is stale",
        ),
    ),
    "positions_wrong": CauseText(
        "a token was computed at a wrong position",
        (
            "look at what advances positions: speculative decoding, asynchronous scheduling, chunked prefill",
            "compare the request's computed length on host and device",
        ),
    ),
    "prefix_hit_on_freed_block": CauseText(
        "the prefix cache hit a block that was freed",
        (
            "take a block's entries out of the prefix index when it is freed without being kept",
            _NO_PREFIX_CACHE,
        ),
    ),
    "prefix_index_wrong": CauseText(
        "the prefix index promises what the block does not hold",
        (
            "take a block's entry out of the index when the block is handed out anew",
            "check that the entry's key is computed over the whole prefix, and over full blocks only",
            _NO_PREFIX_CACHE,
        ),
    ),
    "prefix_shared_across_namespaces": CauseText(
        "a prefix was shared between adapters, salts or images",
        (
            "add the adapter, the cache salt and the hashes of multimodal inputs to the prefix cache's key",
            _NO_PREFIX_CACHE,
        ),
    ),
    "published_before_written": CauseText(
        "a prefix was shared before it was written",
        (
            "publish or store a block only when the step that writes it cannot be dropped any more",
            "look at aborts and preemptions between the claim and the write",
        ),
    ),
    "rank_divergence": CauseText(
        "ranks that must agree do not",
        (
            "compare the transfers and block tables of the ranks in this step: one missed a load or an update",
            "check that a failed load on one rank makes all ranks recompute",
        ),
    ),
    "read_before_write": CauseText(
        "a request reads what nobody has written yet",
        (
            "compare the computed length that the scheduler assumes with what was written, copied or loaded",
            "look at loads that are still on their way when the request is scheduled",
        ),
    ),
    "rejected_tokens_kept": CauseText(
        "rejected tokens still count as computed",
        (
            "check that the computed length is set back when draft tokens are rejected",
            "keep blocks with rejected tokens out of the prefix cache",
            "run once without speculative decoding",
        ),
    ),
    "slot_mapping_wrong": CauseText(
        "slot mapping and block table disagree",
        (
            "check that both are built from the same state, and uploaded in the same step",
            "look at asynchronous scheduling: one of them may be a step old",
        ),
    ),
    "stray_write": CauseText(
        "a stray write or a memory error",
        (
            "look at the device's error counters (ECC, row remaps) and its logs",
            _FULL,
            "run the device's memory checker (compute-sanitizer) over a short load",
        ),
    ),
    "tail_shared_without_copy": CauseText(
        "two requests write into one block",
        (
            "copy a partly filled block before a second request writes to it (parallel sampling, beams, forks)",
            "never take a block that is not full from the prefix cache",
        ),
    ),
    "transfer_damaged": CauseText(
        "bytes came back from another tier changed",
        (
            "check sizes, strides and dtypes of the copy for this layer",
            "keep checksums in the other tier",
        ),
    ),
    "transfer_incomplete": CauseText(
        "a transfer brought back only some of the layers",
        (
            "wait for every layer's load before the layer is computed",
            "check what is done when a load fails half-way: the request has to be recomputed",
        ),
    ),
    "unexplained": CauseText(
        "no rule explains it",
        ("read the evidence; the block's events and the neighbouring slots tell who used the block",),
    ),
    "write_dropped": CauseText(
        "a write never arrived",
        (
            "look for cache updates that are skipped: a slot of -1, an early return, a fused kernel's fallback",
            _SERIAL,
        ),
    ),
    "write_outside_the_step": CauseText(
        "a slot was written that no request was to write",
        (
            "check the slot mapping on the device at the time the cache write runs",
            "run the device's memory checker (compute-sanitizer) over a short load",
        ),
    ),
    "wrong_input_tokens": CauseText(
        "the model was fed other tokens than the request's",
        (
            "compare the step's token ids with the prompt: an offset in chunked prefill, a stale sampled token",
            _SERIAL,
        ),
    ),
    "wrong_prefix_hit": CauseText(
        "the prefix cache hit another prefix",
        (
            "check the key: a hash that collides, or that leaves out what stood before the block",
            "take a block's entry out of the index when the block is handed out anew",
            _NO_PREFIX_CACHE,
        ),
    ),
}
