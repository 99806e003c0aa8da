"""What vLLM's connectors are going to copy in a step, read from the metadata that each gets from its scheduler half."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any


class Due(Enum):
    """When the bytes of a load must be complete."""

    STARTED = auto()
    """When ``start_load_kv`` has returned."""
    FORWARD_OVER = auto()
    """Layer by layer, when each has waited for its own: when the forward is over, all of them."""
    FINISHED = auto()
    """When the connector says that the request's transfer has finished; only then the request is scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Blocks that are copied to or from another tier.

    Attributes:
        key: What identifies the copy there: equal for a store and the loads of what it has stored.
        blocks: In the pool.
        group_id: vLLM's number of the group; None if any group may own the blocks.
        request: For whom it is loaded, if the metadata says.
        tokens: What the blocks hold, from position 0 of a request on; None if the metadata does not say.
        folder: Where the connector keeps what is copied under the key, if that is a folder of its own.
    """

    key: Hashable
    blocks: list[int]
    group_id: int | None = None
    request: str | None = None
    tokens: list[int] | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copies of one step."""

    loads: list[Copy] = field(default_factory=list)
    stores: list[Copy] = field(default_factory=list)


Reader = Callable[[Any, Any], Copies]
"""From a connector and its metadata of a step."""


def reader_of(connector: Any) -> tuple[Reader | None, Due]:
    """How to read the metadata of a connector, or None if nobody knows, and when its loads are due."""
    for cls in type(connector).__mro__:
        known = _READERS.get(cls.__name__)
        if known is not None and cls.__module__.startswith("vllm."):
            reader, due = known
            waits = type(connector).wait_for_layer_load is not cls.wait_for_layer_load  # type: ignore[attr-defined]
            return reader, Due.FORWARD_OVER if due is Due.STARTED and waits else due
    return None, Due.FINISHED


def _example(connector: Any, metadata: Any) -> Copies:
    """``ExampleConnector``: whole prompts in whole blocks, in a folder named after their tokens."""
    copies = Copies()
    for request in metadata.requests:
        size = connector._block_size
        blocks = (request.slot_mapping[::size] // size).tolist()
        tokens = request.token_ids.tolist()
        if not blocks or len(tokens) != len(blocks) * size:
            continue  # the first part of a chunked prompt: never complete under this key
        octets = request.token_ids.numpy().tobytes() + "-".join(request.mm_hashes).encode()
        folder = Path(connector._generate_foldername_debug(request.token_ids, request.mm_hashes))
        copy = Copy(
            key=("prompt", hashlib.sha256(octets).digest()),
            blocks=blocks,
            group_id=0,
            # Tokens alone do not say what an image's positions hold.
            tokens=None if request.mm_hashes else tokens,
            folder=folder if folder.is_dir() else None,
        )
        (copies.stores if request.is_store else copies.loads).append(copy)
    return copies


def _offloading(connector: Any, metadata: Any) -> Copies:
    """``OffloadingConnector``: jobs between blocks and chunks of a host pool, of one block or more."""
    blocks_per_chunk = connector.connector_worker.spec.blocks_per_chunk
    copies = Copies()
    for job in metadata.load_jobs.values():
        copies.loads.extend(_of_chunks(job.src_spec, job.dst_spec, blocks_per_chunk, job.req_id))
    for job in metadata.store_jobs.values():
        copies.stores.extend(_of_chunks(job.dst_spec, job.src_spec, blocks_per_chunk, job.req_id))
    return copies


def _of_chunks(there: Any, here: Any, blocks_per_chunk: int, request: str) -> Iterator[Copy]:
    """Each block of a job, under its place in the host pool.

    Args:
        there: Spec of the chunks, those of each group in a run.
        here: Spec of the blocks likewise; the first of a group may lie inside of its chunk.
    """
    chunks, blocks = iter(there.block_ids.tolist()), iter(here.block_ids.tolist())
    for size, first in zip(here.group_sizes, here.block_indices, strict=True):
        chunk = None
        for index in range(first, first + size):
            if chunk is None or index % blocks_per_chunk == 0:
                chunk = next(chunks)
            key = ("chunk", chunk, index % blocks_per_chunk)
            yield Copy(key=key, blocks=[next(blocks)], request=request)


_READERS: dict[str, tuple[Reader, Due]] = {
    "ExampleConnector": (_example, Due.STARTED),
    "OffloadingConnector": (_offloading, Due.FINISHED),
}
