"""vLLM's own worker class, its collaborators replaced: new weights are a new epoch, waking up forgets the pool.

What the CPU build cannot do: sleep is a no-op there, and weights are not transferred.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvcanary_agent import runtime
from kvcanary_agent.activation.patching import restore_all
from kvcanary_agent.adapters import vllm as adapter
from kvcanary_agent.adapters.vllm import attached_runner


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    adapter.patch(importlib.import_module("vllm.v1.worker.gpu_worker"))
    yield
    restore_all()


class Runner:
    """A model runner that has no more than the worker asks of it."""

    def __getattr__(self, name: str) -> Any:
        return mock.Mock()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("vllm.v1.worker.gpu_worker")
    monkeypatch.setattr(module, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    made = module.Worker.__new__(module.Worker)
    made.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    made.model_runner = Runner()
    made.weight_transfer_engine = mock.Mock()
    made.synchronize_device = mock.Mock()
    made._sleep_mode_backend = mock.Mock()
    made._sleep_saved_parameters, made._sleep_saved_buffers, made._sleep_saved_draft_buffers = {}, {}, {}
    made._weight_update_active = made._weight_update_is_draft = False
    return made


@pytest.fixture
def canary(worker: Any) -> Iterator[mock.Mock]:
    canary = mock.Mock()
    attached = attached_runner.AttachedRunner.__new__(attached_runner.AttachedRunner)
    attached.canary, attached.part = canary, runtime.FailOpen("vllm", "test")
    attached_runner._attached[worker.model_runner] = attached
    yield canary
    del attached_runner._attached[worker.model_runner]


def test_waking_up_forgets_what_the_pool_held(worker: Any, canary: mock.Mock) -> None:
    worker.wake_up()

    assert canary.method_calls == [mock.call.reset()]


def test_reloaded_weights_are_a_new_epoch(worker: Any, canary: mock.Mock) -> None:
    worker.reload_weights()

    assert canary.method_calls == [mock.call.weights_changed()]


def test_transferred_weights_are_a_new_epoch_with_every_chunk_and_at_the_end(worker: Any, canary: mock.Mock) -> None:
    worker.start_weight_update()
    for _ in range(2):
        worker.update_weights({})
    worker.finish_weight_update()

    assert canary.method_calls == [mock.call.weights_changed()] * 3


def test_a_transfer_that_breaks_off_may_have_changed_weights(worker: Any, canary: mock.Mock) -> None:
    worker.start_weight_update()
    worker.weight_transfer_engine.update_weights.side_effect = OSError("connection lost")
    with pytest.raises(OSError, match="connection lost"):
        worker.update_weights({})

    assert canary.method_calls == [mock.call.weights_changed()]


def test_weights_of_a_draft_model_are_none_of_the_pools(worker: Any, canary: mock.Mock) -> None:
    worker._weight_update_active = worker._weight_update_is_draft = True
    worker.update_weights({})
    worker.finish_weight_update()

    assert canary.method_calls == []
