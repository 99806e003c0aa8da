"""A host tier for vLLM's ``OffloadingConnector``, whose own copies blocks with CUDA: this one copies them on a CPU.

An engine finds it by ``spec_module_path``. With ``wrong_load: n`` in the connector's configuration, the n-th load
brings one byte that was not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostTier(CPUOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where types are checked
    def get_worker(self, kv_caches: Any) -> Any:
        return CopyingWorker(
            [tensor.tensor for tensor in kv_caches.tensors], self.num_chunks, self.extra_config.get("wrong_load", 0)
        )


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]  # as above
    """Copies when it is asked what has finished, which is as late as it may be."""

    def __init__(self, pools: list[torch.Tensor], num_chunks: int, wrong_load: int) -> None:
        self._pools = pools
        self._host = [torch.zeros(num_chunks, *pool.shape[1:], dtype=pool.dtype) for pool in pools]
        self._due: dict[int, Callable[[], None]] = {}
        self._loads, self._wrong_load = 0, wrong_load

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        def copy() -> None:
            for pool, host in zip(self._pools, self._host, strict=True):
                host[dst_spec.block_ids] = pool[src_spec.block_ids]

        self._due[job_id] = copy
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        def copy() -> None:
            for pool, host in zip(self._pools, self._host, strict=True):
                pool[dst_spec.block_ids] = host[src_spec.block_ids]
            self._loads += 1
            if self._loads == self._wrong_load:
                self._pools[-1][int(dst_spec.block_ids[0])].view(torch.uint8)[5] ^= 64

        self._due[job_id] = copy
        return True

    def get_finished(self) -> list[Any]:
        finished = list(self._due)
        self.wait(set(finished))
        return [TransferResult(job_id=job, success=True) for job in finished]

    def wait(self, job_ids: set[int]) -> None:
        for job in sorted(job_ids & self._due.keys()):
            self._due.pop(job)()
