"""KV connectors: what a worker's connector stores elsewhere and loads back is compared with what was written.

`connector_copies` reads from a connector's own metadata what it is going to copy. The digests of stored blocks stay in
this process, under the key by which the connector finds them again; where it keeps its data in a folder, they are laid
beside the data too, for engines in other processes (`digest_file`). Of a connector whose metadata nobody can read, the
scheduler's process tells which blocks it fills: those are taken as they come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.connector_copies import Copies, Copy, Due, Reader, reader_of
from kvcanary_agent.adapters.vllm.digest_file import DigestFile
from kvcanary_agent.adapters.vllm.events import StepEvents
from kvcanary_agent.canary.canary import Canary

NamespaceOf = Callable[[str, Any], "str | None"]
"""From a request and its ``LoRARequest``: what, beside its tokens, its K/V depends on."""


class WatchedConnector:
    """A worker's connector, and the loads that it has begun.

    When the bytes must be complete depends on the connector, see `Due`. Until then nothing in the blocks is judged.
    """

    def __init__(
        self, connector: Any, canary: Canary, group_ids: Sequence[int], namespace_of: NamespaceOf, reader: Reader | None
    ) -> None:
        self.canary = canary
        self.part = runtime.FailOpen("vllm", f"KV connector {type(connector).__name__}")
        self.due = Due.FINISHED
        self._connector = weakref.ref(connector)
        self._group_ids = group_ids
        self._namespace_of = namespace_of
        self._read = reader
        self._digests = [DigestFile(canary.layout, index) for index in range(len(group_ids))]
        self._after_forward: list[Copy] = []
        self._until_finished: dict[str, list[Copy]] = {}
        self._tables: dict[str, tuple[Sequence[Sequence[int]], Any]] = {}
        self._inside = False

    def scheduled(self, scheduler_output: Any, events: StepEvents | None) -> None:
        """A step begins; ``events`` are what the scheduler's process has told of it.

        The tokens of what the step will load are entered now, before the step's reads are verified.

        Raises:
            RuntimeError: If nobody tells which blocks the connector fills.
        """
        self._tables = {new.req_id: (new.block_ids, new.lora_request) for new in scheduler_output.scheduled_new_reqs}
        if events is None and self._read is None:
            raise RuntimeError("neither its metadata nor the scheduler's process says which blocks it fills")
        for load in events.external if events is not None else ():
            for index, group_id in enumerate(self._group_ids):
                blocks = [block for block in load.blocks[group_id] if block]
                if blocks:
                    self.canary.arriving(blocks, group=index)
        if self._read is not None and self.due is not Due.FINISHED:
            for copy in self._read(self._connector(), scheduler_output.kv_connector_metadata).loads:
                self._take(copy, complete=False)

    def enter(self) -> bool:
        """Whether this is the outermost of a subclass's and its base class's calls to the same method."""
        inside, self._inside = self._inside, True
        return not inside

    def leave(self) -> None:
        """The outermost call is over."""
        self._inside = False

    def copies(self, connector: Any) -> Copies:
        """What the connector was told to copy in this step."""
        metadata = connector._connector_metadata
        return Copies() if self._read is None or metadata is None else self._read(connector, metadata)

    def started(self, loads: Sequence[Copy]) -> None:
        """``start_load_kv`` has returned."""
        for load in loads:
            if self.due is Due.FINISHED:
                for index in self._groups(load):
                    self.canary.arriving(load.blocks, group=index)
                self._until_finished.setdefault(load.request or "", []).append(load)
            elif self.due is Due.FORWARD_OVER:
                self._after_forward.append(load)
            else:
                self._take(load, complete=True)

    def forward_over(self) -> None:
        """Whatever this step has read must have arrived."""
        loads, self._after_forward = self._after_forward, []
        for load in loads:
            self._take(load, complete=True)

    def finished(self, requests: Sequence[str]) -> None:
        """The connector says that everything for these requests has arrived."""
        for request in requests:
            for load in self._until_finished.pop(request, ()):
                self._take(load, complete=True)

    def stored(self, stores: Sequence[Copy]) -> None:
        """The connector takes its copies from what the blocks hold now."""
        for store in stores:
            for index in self._groups(store):
                self.canary.stored(store.key, store.blocks, group=index)
                if store.folder is None:
                    continue
                fingerprints = self.canary.fingerprints(store.blocks, group=index)
                if fingerprints is not None:
                    self._digests[index].write(store.folder, fingerprints)

    def _take(self, load: Copy, *, complete: bool) -> None:
        request, lora = self._request_with(load)
        for index in self._groups(load):
            if self.canary.has_stored(load.key, group=index) or load.tokens is None or request is None:
                self.canary.loaded(
                    load.key, load.blocks, group=index, request=load.request or request, complete=complete
                )
            else:
                self.canary.adopted(
                    load.blocks,
                    load.tokens,
                    request=request,
                    group=index,
                    namespace=self._namespace_of(request, lora),
                    fingerprints=self._stored_elsewhere(load, index),
                    complete=complete,
                )

    def _stored_elsewhere(self, load: Copy, index: int) -> torch.Tensor | None:
        return None if load.folder is None else self._digests[index].read(load.folder, len(load.blocks))

    def _groups(self, copy: Copy) -> list[int]:
        return [i for i, group_id in enumerate(self._group_ids) if copy.group_id in (None, group_id)]

    def _request_with(self, load: Copy) -> tuple[str | None, Any]:
        """The request that begins with this step and whose table begins with the blocks of the load; its adapter."""
        for request, (tables, lora) in self._tables.items():
            if any(list(table[: len(load.blocks)]) == load.blocks for table in tables):
                return request, lora
        return None, None


_watched: WeakKeyDictionary[Any, WatchedConnector] = WeakKeyDictionary()
runtime.on_shut_down(_watched.clear)


def watch_connector(
    vllm_config: Any, canary: Canary, group_ids: Sequence[int], namespace_of: NamespaceOf
) -> WatchedConnector | None:
    """Watch the connector of this worker, if it has one; its class is patched once."""
    if vllm_config.kv_transfer_config is None:
        return None
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    cls = type(connector)
    reader, due = reader_of(connector)
    watched = WatchedConnector(connector, canary, group_ids, namespace_of, reader)
    if reader is None:
        runtime.not_covered(
            "vllm", f"KV connector {cls.__name__}", "what it brings is not compared, and not judged until written anew"
        )
        return watched
    watched.due = due
    completion = "get_transfer_results" if hasattr(connector, "get_transfer_results") else "get_finished"
    arounds = {
        "start_load_kv": _around_start_load_kv,
        "wait_for_save": _around_wait_for_save,
        completion: _around_completion,
    }
    if runtime.patch_class("vllm", cls, arounds):
        runtime.covered("vllm", f"KV connector {cls.__name__}")
        _watched[connector] = watched
    return watched


def unwatch_connector(watched: WatchedConnector | None) -> None:
    """Forget a connector that the engine may keep for longer than the pool."""
    for connector, other in list(_watched.items()):
        if other is watched:
            del _watched[connector]


def _around_start_load_kv(call: Callable[..., Any], connector: Any, /, *args: Any, **kwargs: Any) -> Any:
    watched = _watched.get(connector)
    if watched is None or not watched.part.on or not watched.enter():
        return call(*args, **kwargs)
    try:
        result = call(*args, **kwargs)
    finally:
        watched.leave()
    with watched.part:
        watched.started(watched.copies(connector).loads)
    return result


def _around_wait_for_save(call: Callable[..., Any], connector: Any, /, *args: Any, **kwargs: Any) -> Any:
    watched = _watched.get(connector)
    if watched is None or not watched.part.on or not watched.enter():
        return call(*args, **kwargs)
    stores: list[Copy] = []
    try:
        with watched.part:
            watched.forward_over()
            # Read before the call, which may take its jobs out of the metadata.
            stores = watched.copies(connector).stores
        result = call(*args, **kwargs)
    finally:
        watched.leave()
    if watched.part.on:
        with watched.part:
            watched.stored(stores)
    return result


def _around_completion(call: Callable[..., Any], connector: Any, /, *args: Any, **kwargs: Any) -> Any:
    watched = _watched.get(connector)
    if watched is None or not watched.part.on or not watched.enter():
        return call(*args, **kwargs)
    try:
        result = call(*args, **kwargs)
    finally:
        watched.leave()
    with watched.part:
        received = result.finished_recving if hasattr(result, "finished_recving") else result[1]
        watched.finished(sorted(received or ()))
    return result
