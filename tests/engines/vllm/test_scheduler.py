"""vLLM's own block pool and managers, without a model: what the agent makes of their acts."""

from __future__ import annotations

import gc
import importlib
import pickle
import random
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_agent import runtime
from kvcanary_agent.activation.patching import restore_all
from kvcanary_agent.adapters import vllm as adapter
from kvcanary_agent.adapters.vllm import containment, scheduler
from kvcanary_agent.adapters.vllm.events import Action, attached_to
from kvcanary_agent.canary import AllocatorCanary, AllocatorLayout, Kind, Sink, Violation
from kvcanary_agent.settings import Settings

BLOCK = 16
WINDOW = 40
MODULES = ("block_pool", "kv_cache_manager")


class Heard(Sink):
    """What the allocator's canary has said."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def violation(self, violation: Violation) -> None:
        self.violations.append(violation)


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    for name in MODULES:
        adapter.patch(importlib.import_module(f"vllm.v1.core.{name}"))
    yield
    restore_all()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    heard = Heard()

    def open_allocator(layout: AllocatorLayout) -> AllocatorCanary:
        return AllocatorCanary(layout, Settings(), heard)

    monkeypatch.setattr(runtime, "open_allocator", open_allocator)
    return heard


class Manager:
    """A real `KVCacheManager` of one full and, if asked for, one sliding-window group, and its requests."""

    def __init__(self, blocks: int, *, window: bool = False, caching: bool = True) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

        shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
        if window:
            groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=WINDOW)))
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=4096,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=caching,
        )
        self.pool = self.manager.block_pool
        self.watched = scheduler._watched[self.manager]
        self.requests: dict[str, Any] = {}
        self.told: dict[tuple[int, str], list[int]] = {}
        """What a worker that follows the events takes each request to hold, by group."""

    def request(self, name: str, tokens: list[int], salt: str | None = None) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        made = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=999),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        self.requests[name] = made
        return made

    def admit(self, request: Any) -> bool:
        found, computed, _ = self.manager.get_computed_blocks(request)
        slots = self.manager.allocate_slots(request, request.num_tokens - computed, computed, found)
        if slots is not None:
            request.num_computed_tokens = request.num_tokens
        return slots is not None

    def decode(self, request: Any, tokens: list[int]) -> bool:
        request.append_output_token_ids(tokens)
        if self.manager.allocate_slots(request, len(tokens)) is None:
            return False
        request.num_computed_tokens = request.num_tokens
        return True

    def end(self, request: Any) -> None:
        self.manager.free(request)
        del self.requests[request.request_id]

    def send(self) -> list[Any]:
        """The events of a step, as they arrive at a worker."""
        output = SimpleNamespace(scheduled_new_reqs=[])
        self.watched.send(output, self.requests)
        self.watched.audit(self.pool)
        self.watched.canary.step_finished()
        received = attached_to(pickle.loads(pickle.dumps(output)))
        assert received is not None
        for event in received.blocks:
            if event.request is None:
                continue
            held = self.told.setdefault((event.group, event.request), [])
            if event.action in (Action.ALLOCATED, Action.SHARED):
                held.extend(event.blocks)
            else:
                for block in event.blocks:
                    held.remove(block)
        return received.blocks

    def tables(self) -> dict[tuple[int, str], list[int]]:
        return {
            (group, name): sorted(block.block_id for block in blocks if not block.is_null)
            for name in self.requests
            for group, blocks in enumerate(self.manager.get_blocks(name).blocks)
        }


def tokens_of(seed: int, count: int) -> list[int]:
    return [seed * 1000 + at for at in range(count)]


@pytest.mark.parametrize("window", [False, True], ids=["one_group", "two_groups"])
@pytest.mark.parametrize("caching", [False, True], ids=["no_prefix_cache", "prefix_cache"])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_traffic_is_never_blamed_and_the_workers_learn_every_table(
    heard: Heard, window: bool, caching: bool, seed: int
) -> None:
    chance = random.Random(seed)
    acts = [(chance.randint(0, 11), chance.randint(0, 3), chance.randint(1, 90)) for _ in range(300)]
    at = Manager(24, window=window, caching=caching)
    for number, (act, seed, count) in enumerate(acts):
        running = sorted(at.requests)
        if act <= 4 or not running:
            request = at.request(f"r{number}", tokens_of(seed, 2 * count))
            if not at.admit(request):
                del at.requests[request.request_id]
        elif act <= 6:
            at.end(at.requests[running[seed % len(running)]])
        elif act <= 9:
            request = at.requests[running[seed % len(running)]]
            if not at.decode(request, tokens_of(seed, count % 20 + 1)):
                at.end(request)
        elif act == 10:
            at.manager.reset_prefix_cache()
        else:
            request = at.requests.pop(running[seed % len(running)])
            at.pool.free_blocks(reversed(at.manager.pop_blocks_for_free(request)))
        at.send()
        told = {place: sorted(held) for place, held in at.told.items() if held}
        assert told == {place: held for place, held in at.tables().items() if held}

    assert heard.violations == []


def test_events_come_in_the_order_of_the_acts_and_name_request_and_group(heard: Heard) -> None:
    at = Manager(24, window=True)
    first = at.request("first", tokens_of(1, 2 * BLOCK + 1))
    at.admit(first)
    at.end(first)
    second = at.request("second", tokens_of(1, 2 * BLOCK + 1))
    at.admit(second)

    acts = [(event.action, event.request, event.group, len(event.blocks)) for event in at.send()]

    assert acts == [
        *((Action.ALLOCATED, "first", group, 3) for group in (0, 1)),
        *(
            (action, "first", group, count)
            for group in (0, 1)
            for action, count in (
                (Action.FREED, 1),
                (Action.FREED_CACHED, 2),
            )
        ),
        *((Action.SHARED, "second", group, 2) for group in (0, 1)),
        *((Action.ALLOCATED, "second", group, 1) for group in (0, 1)),
    ]


def test_blocks_that_leave_a_window_are_told_to_be_free(heard: Heard) -> None:
    at = Manager(40, window=True, caching=False)
    request = at.request("a", tokens_of(1, 10))
    at.admit(request)
    for step in range(40):
        at.decode(request, tokens_of(step, 5))
        at.send()

    assert len(at.told[1, "a"]) < len(at.told[0, "a"])
    assert heard.violations == []


def test_salts_travel_with_the_request_that_has_one(heard: Heard) -> None:
    at = Manager(24)
    for name, salt in (("plain", None), ("salted", "x")):
        at.admit(at.request(name, tokens_of(1, 20), salt))
    output = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in at.requests])

    at.watched.send(output, at.requests)

    received = attached_to(output)
    assert received is not None
    assert received.salts == {"salted": "x"}


def test_an_external_load_names_the_blocks_that_it_fills(heard: Heard) -> None:
    at = Manager(24)
    first = at.request("first", tokens_of(1, 2 * BLOCK + 1))
    at.admit(first)
    request = at.request("loads", tokens_of(1, 6 * BLOCK))
    found, computed, _ = at.manager.get_computed_blocks(request)
    at.manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=computed,
        new_computed_blocks=found,
        num_external_computed_tokens=3 * BLOCK,
        delay_cache_blocks=True,
    )
    output = SimpleNamespace(scheduled_new_reqs=[])
    at.watched.send(output, at.requests)

    received = attached_to(output)
    assert received is not None
    (load,) = received.external
    assert (load.request, load.first_token, load.tokens, load.asynchronous) == ("loads", 2 * BLOCK, 3 * BLOCK, True)
    assert load.blocks == (tuple(at.manager.get_block_ids("loads")[0][2:5]),)
    assert heard.violations == []


def test_the_same_free_twice_is_a_double_free(heard: Heard) -> None:
    at = Manager(24)
    request = at.request("a", tokens_of(1, 20))
    at.admit(request)
    (blocks,) = at.manager.get_blocks("a").blocks
    at.end(request)
    at.pool.free_blocks(blocks)

    assert [(found.kind, found.writer) for found in heard.violations] == [(Kind.OWNERSHIP, "a")] * 2
    assert all("double free" in found.detail for found in heard.violations)


def test_a_held_block_among_the_free_is_found_and_its_next_owner_named(heard: Heard) -> None:
    at = Manager(24)
    at.admit(at.request("a", tokens_of(1, 20)))
    block = at.manager.get_blocks("a").blocks[0][1]
    block.ref_cnt = 0
    at.pool.free_block_queue.prepend_n([block])
    at.send()
    audited = {found.detail for found in heard.violations}
    at.admit(at.request("b", tokens_of(2, 10)))

    assert any("references" in told for told in audited)
    last = heard.violations[-1]
    assert (last.block, last.request, last.writer) == (block.block_id, "b", "a")
    assert "double allocation" in last.detail


def test_a_hit_that_takes_no_reference_is_seen(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Manager(24)
    at.admit(at.request("a", tokens_of(1, 3 * BLOCK)))
    monkeypatch.setattr(at.pool, "touch", lambda blocks: None)
    at.admit(at.request("b", tokens_of(1, 3 * BLOCK)))

    assert [(found.request, found.writer) for found in heard.violations] == [("b", "a")] * 2
    assert {found.detail for found in heard.violations} == {"in the table of a request that took no reference to it"}


def test_a_block_that_the_index_has_evicted_is_not_to_be_hit(heard: Heard) -> None:
    at = Manager(24)
    request = at.request("a", tokens_of(1, 3 * BLOCK))
    at.admit(request)
    held, other = at.manager.get_blocks("a").blocks[0][:2]
    at.manager.evict_blocks({held.block_id})
    at.end(request)
    at.manager.evict_blocks({other.block_id})
    at.send()
    assert heard.violations == []

    at.pool.touch([held])
    at.pool.touch([other])

    assert [(found.block, found.detail) for found in heard.violations] == [
        (block.block_id, "shared after it was freed and not cached") for block in (held, other)
    ]


def test_a_reference_that_is_not_counted_is_seen(heard: Heard) -> None:
    class Uncounting:
        def on_block_accessed(self, block: Any) -> None:
            block.ref_cnt -= 1

    at = Manager(24)
    at.admit(at.request("a", tokens_of(1, 3 * BLOCK)))
    at.pool.metrics_collector = Uncounting()
    second = at.request("b", tokens_of(1, 2 * BLOCK + 1))
    found, *_ = at.manager.get_computed_blocks(second)
    at.pool.touch(found.blocks[0])

    assert [found.kind for found in heard.violations] == [Kind.OWNERSHIP] * 2
    assert all("counts 1 references where 2" in found.detail for found in heard.violations)


def test_a_hit_of_another_prefix_is_a_violation_of_the_index(heard: Heard) -> None:
    at = Manager(24)
    for name, seed in (("a", 1), ("b", 2)):
        at.admit(at.request(name, tokens_of(seed, 3 * BLOCK)))
    right, wrong = (at.manager.get_blocks(name).blocks[0] for name in "ab")
    at.pool.cached_block_hash_to_block._cache[right[1].block_hash] = wrong[1]
    at.admit(at.request("misled", tokens_of(1, 3 * BLOCK)))

    (found,) = heard.violations
    assert (found.kind, found.block, found.request, found.writer) == (Kind.INDEX, wrong[1].block_id, "misled", "b")


def test_what_has_no_known_ways_is_named_as_not_covered(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler, "_FOLLOWED", frozenset({"FullAttentionManager"}))
    with pytest.raises(KeyError):
        Manager(24, window=True)

    assert "not covering allocator of vllm: blocks managed by SlidingWindowManager" in caplog.text


def test_an_engine_that_is_dropped_takes_its_books_with_it(heard: Heard) -> None:
    at = Manager(24)
    at.admit(at.request("a", tokens_of(1, 20)))
    watched = weakref.ref(at.watched)
    del at
    gc.collect()

    assert watched() is None


def test_events_that_no_output_takes_along_do_not_pile_up(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MAX_WAITING", 10)
    at = Manager(24)
    for number in range(20):
        request = at.request(f"r{number}", tokens_of(1, 20))
        assert at.admit(request)
        at.end(request)

    assert not at.watched.part.on
    assert not at.watched._waiting


def test_what_a_request_computes_from_a_corrupt_block_is_not_found_by_another(heard: Heard) -> None:
    made = Manager(64)
    request = made.request("reader", tokens_of(1, 5 * BLOCK))
    assert made.admit(request)
    table = made.manager.get_blocks("reader").blocks[0]

    containment.evict(made.manager, [table[1].block_id], made.watched.affected)
    assert made.decode(request, tokens_of(2, 2 * BLOCK))

    table = made.manager.get_blocks("reader").blocks[0]
    assert [block.block_hash is not None for block in table] == [True] + [False] * 6
    made.send()
    made.end(request)
    assert not made.watched.affected
    again = made.request("again", tokens_of(1, 5 * BLOCK) + tokens_of(2, 2 * BLOCK))
    _, computed, _ = made.manager.get_computed_blocks(again)
    assert computed == BLOCK
    assert made.admit(again)
    made.send()
    assert heard.violations == []


def test_a_corrupt_null_block_costs_no_request_its_place_in_the_index(heard: Heard) -> None:
    made = Manager(64, window=True)
    request = made.request("reader", tokens_of(1, 8 * BLOCK))
    assert made.admit(request)
    assert made.decode(request, tokens_of(2, BLOCK))
    indexed = [block.block_id for block in made.pool.blocks if block.block_hash is not None]
    assert any(block.is_null for block in made.manager.get_blocks("reader").blocks[1])

    containment.evict(made.manager, [made.pool.null_block.block_id], made.watched.affected)

    assert [block.block_id for block in made.pool.blocks if block.block_hash is not None] == indexed
    assert not made.watched.affected
