"""What vLLM's connectors are about to copy, read from vLLM's own metadata."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_agent.adapters.vllm.connector_copies import Copies, Due, reader_of
from tests.engines.vllm.connectors import Faulty, LayerByLayer


def made(cls: Any) -> Any:
    """An instance that no engine stands behind."""
    return cls.__new__(cls)


def offloading_copies(*, blocks_per_chunk: int, **jobs: Any) -> Copies:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    connector = made(OffloadingConnector)
    connector.connector_worker = SimpleNamespace(spec=SimpleNamespace(blocks_per_chunk=blocks_per_chunk))
    reader, due = reader_of(connector)
    assert reader is not None
    assert due is Due.FINISHED
    return reader(connector, OffloadingConnectorMetadata(**{"load_jobs": {}, "store_jobs": {}, **jobs}))


def test_a_load_is_due_when_it_was_started_unless_layers_wait_for_theirs() -> None:
    assert reader_of(made(Faulty))[1] is Due.STARTED
    assert reader_of(made(LayerByLayer))[1] is Due.FORWARD_OVER


def test_nobody_reads_the_metadata_of_other_connectors() -> None:
    class ExampleConnector:
        """Of the same name, but not vLLM's."""

    assert reader_of(ExampleConnector())[0] is None


@pytest.mark.parametrize("tokens_missing", [0, 32])
def test_a_prompt_is_stored_in_whole_blocks_and_not_at_all_before_all_of_them_are_there(tokens_missing: int) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata, ReqMeta

    connector = made(Faulty)
    connector._block_size = 32
    connector._storage_path = "nowhere"
    tokens = torch.arange(64 + tokens_missing)
    slots = torch.cat([torch.arange(32) + 32 * block for block in (7, 4)])
    request = ReqMeta(token_ids=tokens, slot_mapping=slots, is_store=True, mm_hashes=[])
    reader, _ = reader_of(connector)
    assert reader is not None

    copies = reader(connector, ExampleConnectorMetadata([request]))

    assert copies.loads == []
    assert [(copy.blocks, copy.tokens) for copy in copies.stores] == (
        [] if tokens_missing else [([7, 4], tokens.tolist())]
    )


def test_blocks_are_found_again_under_their_place_in_the_host_pool() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    # Two groups, in chunks of two blocks; the second one's first block is the second of its chunk.
    store = TransferJob("a", GPULoadStoreSpec([1, 2, 3, 5, 6], [3, 2], [0, 1]), CPULoadStoreSpec([10, 11, 20, 21]))
    load = TransferJob("b", CPULoadStoreSpec([21]), GPULoadStoreSpec([9], [1, 0], [2, 0]))

    copies = offloading_copies(blocks_per_chunk=2, store_jobs={1: store}, load_jobs={2: load})

    assert [(copy.key, copy.blocks) for copy in copies.stores] == [
        (("chunk", 10, 0), [1]),
        (("chunk", 10, 1), [2]),
        (("chunk", 11, 0), [3]),
        (("chunk", 20, 1), [5]),
        (("chunk", 21, 0), [6]),
    ]
    assert [(copy.key, copy.blocks, copy.request) for copy in copies.loads] == [(("chunk", 21, 0), [9], "b")]
