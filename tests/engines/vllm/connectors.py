"""KV connectors for vLLM, made from its own example: one loads layer by layer, one loses and changes what it loads.

An engine finds them by ``kv_connector_module_path``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata

FAULTY_LAYER = "layers.1."


class LayerByLayer(ExampleConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Right, but each layer arrives only when it is waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._due: dict[str, tuple[torch.Tensor, list[int], torch.Tensor]] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        blocks = [block for request in _loads(self) for block in _blocks(self, request)]
        before = {name: cache[blocks] for name, cache in _caches(forward_context)}
        super().start_load_kv(forward_context, **kwargs)
        for name, cache in _caches(forward_context):
            self._due[name] = (cache, blocks, cache[blocks])
            cache[blocks] = before[name]

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name in self._due:
            cache, blocks, arrived = self._due.pop(layer_name)
            cache[blocks] = arrived


class Faulty(ExampleConnector):  # type: ignore[misc]  # as above
    """Goes wrong for four of a round's prompts: the second, fourth, sixth and seventh, counted from 0.

    The engine numbers requests as they come; ``prompts`` of the extra configuration says how many a round has. In which
    step they are loaded does not matter: where the engine has a process of its own, they may arrive in several.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: list[Callable[[], None]] = []

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        requests = [new.req_id for new in scheduler_output.scheduled_new_reqs if new.req_id in self._requests_need_load]
        metadata = super().build_connector_meta(scheduler_output)
        prompts = self._kv_transfer_config.get_from_extra_config("prompts", 0)
        metadata.loaded_prompts = [int(request.partition("-")[0]) % prompts for request in requests]
        return metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        def load(request: Any) -> None:
            metadata = self._get_connector_metadata()
            self.bind_connector_metadata(ExampleConnectorMetadata([request]))
            super(Faulty, self).start_load_kv(forward_context, **kwargs)
            self.bind_connector_metadata(metadata)

        faulty_cache = next(cache for name, cache in _caches(forward_context) if FAULTY_LAYER in name)
        loads = _loads(self)
        for number, request in zip(self._get_connector_metadata().loaded_prompts, loads, strict=True):
            blocks = _blocks(self, request)
            if number == 2:  # other bytes
                load(request)
                faulty_cache[blocks[0]].view(torch.uint8).view(-1)[5] ^= 64
            elif number == 4:  # one layer less
                before = faulty_cache[blocks]
                load(request)
                faulty_cache[blocks] = before
            elif number == 6:  # not at all
                pass
            elif number == 7:  # too late
                self._late.append(lambda request=request: load(request))  # type: ignore[misc]  # bound as it is now
            else:
                load(request)

    def wait_for_save(self) -> None:
        while self._late:
            self._late.pop()()
        super().wait_for_save()


def _loads(connector: Any) -> list[Any]:
    return [request for request in connector._get_connector_metadata().requests if not request.is_store]


def _blocks(connector: Any, request: Any) -> list[int]:
    return [int(slot) // connector._block_size for slot in request.slot_mapping[:: connector._block_size]]


def _caches(forward_context: Any) -> list[tuple[str, torch.Tensor]]:
    layers = forward_context.no_compile_layers.items()
    return [(name, layer.kv_cache) for name, layer in layers if hasattr(layer, "kv_cache")]
