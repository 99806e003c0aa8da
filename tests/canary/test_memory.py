"""What the canary keeps, on the device and on the host, is small and does not grow."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest
import torch

from kvcanary_agent.canary import Canary, KVGroup, KVLayout, KVPart
from kvcanary_agent.canary.canary import RING_CAPACITY
from kvcanary_agent.kernels.ring import Field
from kvcanary_agent.settings import Content, Settings
from tests.canary.toy import RecordingSink, Row, ToyEngine

RING_BYTES = (RING_CAPACITY + 1) * len(Field) * 8 + 8


def llama_3_8b(blocks: int) -> KVLayout:
    data = torch.zeros(32, 2, blocks, 16, 8, 128, dtype=torch.bfloat16)
    parts = tuple(
        KVPart(layer=f"layers.{layer}", part=name, view=data[layer, part])
        for layer in range(32)
        for part, name in enumerate(("k", "v"))
    )
    return KVLayout(engine="toy", groups=(KVGroup(name="full", block_size=16, parts=parts),))


@pytest.mark.parametrize("content", ["scrub", "full", "off"])
def test_records_of_llama_3_8b_take_at_most_one_percent_of_the_pool(content: Content) -> None:
    sink = RecordingSink()
    Canary(llama_3_8b(8), Settings(content=content), sink)
    assert sink.pool_bytes == 32 * 2 * 8 * 16 * 8 * 128 * 2
    assert 0 < sink.record_bytes - RING_BYTES <= sink.pool_bytes / 100


def bytes_kept(canary: Canary) -> int:
    """Bytes of all tensors that hang from a canary, each storage once, the engine's pool left out."""
    pool = {part.view.untyped_storage().data_ptr() for group in canary.layout.groups for part in group.parts}
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[object] = [value for name, value in vars(canary).items() if name != "layout"]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in pool:
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif type(value).__module__.startswith("kvcanary_agent.") and hasattr(value, "__dict__"):
            waiting += vars(value).values()
    return sum(storages.values())


def host_bytes_kept(canary: Canary) -> int:
    """Bytes of all Python objects that only the canary's state reaches; code, types, layout and sink left out."""
    shared = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
    total = 0
    seen = {id(canary.layout), id(canary._sink)}
    waiting: list[object] = [canary]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, shared):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        waiting += gc.get_referents(value)
    return total


def test_the_reported_figure_covers_what_is_kept() -> None:
    sink = RecordingSink()
    canary = Canary(llama_3_8b(64), Settings(), sink)
    assert bytes_kept(canary) <= 1.01 * sink.record_bytes


def test_with_content_off_no_fingerprints_are_kept() -> None:
    figures: dict[Content, int] = {}
    contents: tuple[Content, Content] = ("off", "full")
    for content in contents:
        sink = RecordingSink()
        Canary(llama_3_8b(8), Settings(content=content), sink)
        figures[content] = sink.record_bytes
    slots, parts = 8 * 16, 64
    assert figures["full"] - figures["off"] >= slots * parts * 8


def test_a_closed_canary_lets_go_of_the_pool() -> None:
    layout = llama_3_8b(2)
    view = weakref.ref(layout.groups[0].parts[0].view)
    canary = Canary(layout, Settings(), RecordingSink())
    del layout
    canary.close()
    gc.collect()
    alive = view() is not None
    assert not alive


def serve(toy: ToyEngine, first: int, count: int, *, own_namespaces: bool) -> None:
    """So many requests that come, compute, are shared, told to the index, and leave."""
    for number in range(first, first + count):
        name, follower = f"request-{number}", f"follower-{number}"
        namespace = f"image-{number}" if own_namespaces else None
        toy.start(name, [number % 1000, 1, 2, 3, 4], namespace)
        toy.canary.indexed([number % 1000, 1, 2, 3], toy.requests[name].tables[0][0], namespace=namespace)
        toy.request(follower, [number % 1000, 1, 2, 3, 9], namespace)
        toy.share(follower, name, 1)
        toy.allocate(follower, 1)
        toy.decode(name)
        toy.canary.rolled_back(name, 5)
        table = toy.requests[follower].tables[0]
        toy.give_back(0, table, follower, cached=True, recycle=False)
        toy.free_blocks.insert(0, table[1])
        toy.free(name, cached=True)
        del toy.requests[name], toy.requests[follower]
        toy.sink.passes.clear()


@pytest.mark.parametrize("own_namespaces", [False, True])
def test_the_host_s_memory_is_bounded_over_many_requests(monkeypatch: pytest.MonkeyPatch, own_namespaces: bool) -> None:
    # What is remembered for reports is bounded at 2^16; here a smaller bound is reached sooner.
    monkeypatch.setattr("kvcanary_agent.canary.reporting._REMEMBERED", 64)
    monkeypatch.setattr("kvcanary_agent.canary.ownership._REMEMBERED_ENDED", 64)
    monkeypatch.setattr("kvcanary_agent.canary.block_log._MAX_EVENTS", 64)
    toy = ToyEngine(blocks=12, settings={"content": "scrub"})
    serve(toy, 0, 150, own_namespaces=own_namespaces)
    device_bytes = bytes_kept(toy.canary)
    host_bytes = host_bytes_kept(toy.canary)
    serve(toy, 150, 300, own_namespaces=own_namespaces)
    assert toy.sink.violations == []
    assert bytes_kept(toy.canary) == device_bytes
    # Dictionaries that fill up to their bounds may still take a larger table once.
    assert host_bytes_kept(toy.canary) - host_bytes < 300 * 20


def test_a_slot_that_stays_broken_costs_no_memory_however_often_it_is_read() -> None:
    toy = ToyEngine(blocks=3, reports_ownership=False, settings={"content": "full"})
    toy.start("a", range(4), blocks=2)
    toy.requests["a"].tokens.append(5)
    toy.poke(1, 0)
    step, _ = toy.plan(Row(request="a", count=0))

    def read(times: int) -> int:
        for _ in range(times):
            toy.canary.before_forward(step)
            toy.canary.after_forward()
            toy.sink.passes.clear()
        return host_bytes_kept(toy.canary)

    before = read(50)
    after = read(400)
    assert len(toy.sink.violations) == 1
    assert after - before < 400 * 20


def test_kept_records_of_other_tiers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary_agent.canary.transfers._TIERS", 2)
    toy = ToyEngine(blocks=8)
    toy.start("a", range(16))
    table = toy.requests["a"].tables[0]
    for number in range(5):
        toy.canary.stored(number, table)
    at_first = bytes_kept(toy.canary)
    for number in range(5, 200):
        toy.canary.stored(number, table)
    assert bytes_kept(toy.canary) <= at_first
