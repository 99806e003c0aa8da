"""What happens between steps is kept in order, and not without bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvcanary_agent
from kvcanary_agent import runtime
from kvcanary_agent.adapters.events import Events
from kvcanary_agent.adapters.sglang.allocator import follow, patch_paged_allocator, patch_token_allocator
from kvcanary_agent.adapters.sglang.host_tier import HostTier
from kvcanary_agent.canary import Canary, KVGroup, KVLayout, KVPart
from kvcanary_agent.settings import Settings
from tests.canary.toy import RecordingSink

token = pytest.importorskip("sglang.srt.mem_cache.allocator.token")
paged = pytest.importorskip("sglang.srt.mem_cache.allocator.paged")

PAGES, PAGE = 8, 4


@pytest.fixture
def events() -> Iterator[Events]:
    yield Events(runtime.FailOpen("sglang", "events"))
    kvcanary_agent.uninstall()


@pytest.fixture(params=["token_by_token", "pages"])
def allocator(request: pytest.FixtureRequest, events: Events) -> Any:
    options = {"dtype": torch.int64, "device": "cpu", "kvcache": None, "need_sort": False}
    if request.param == "pages":
        patch_paged_allocator(paged.PagedTokenToKVPoolAllocator)
        made = paged.PagedTokenToKVPoolAllocator(PAGES * PAGE, PAGE, **options)
    else:
        patch_token_allocator(token.TokenToKVPoolAllocator)
        made = token.TokenToKVPoolAllocator(PAGES, **options)
    follow([made], events)
    return made


def pool(pages: int = PAGES) -> tuple[Canary, torch.Tensor, RecordingSink]:
    """A canary of a pool with one part, whose bytes come along."""
    data, sink = torch.zeros(pages, PAGE, 16), RecordingSink()
    group = KVGroup(name="full", block_size=PAGE, parts=(KVPart(layer="layers.0", part="k", view=data),))
    return Canary(KVLayout(engine="sglang", groups=(group,)), Settings(content="full"), sink), data, sink


def test_an_allocator_that_is_cleared_again_and_again_is_one_event(events: Events, allocator: Any) -> None:
    for _ in range(100):
        allocator.clear()
    assert len(events) == 1

    allocator.alloc(PAGE)
    for _ in range(100):
        allocator.clear()

    assert len(events) == 3


def test_what_happens_after_a_clearing_is_told_after_it(events: Events, allocator: Any) -> None:
    canary, _, sink = pool(PAGES * PAGE)
    slots = allocator.alloc(PAGE)
    allocator.clear()
    allocator.free(slots)

    events.apply(canary)
    canary.sweep()

    # Given back by the clearing, and once more.
    assert [violation.detail for violation in sink.violations][:1] == ["freed although it is free: double free"]


def test_pages_that_come_back_are_found_by_their_place_in_host_memory(events: Events) -> None:
    tier = HostTier(num_pages=PAGES, page_size=PAGE, events=events)
    told: list[tuple[str, int, list[int], list[int] | None]] = []

    class Told:
        def stored(self, key: int, blocks: torch.Tensor) -> None:
            told.append(("stored", key, blocks.tolist(), None))

        def discarded(self, key: int) -> None:
            told.append(("discarded", key, [], None))

        def arriving(self, blocks: torch.Tensor) -> None:
            told.append(("arriving", 0, blocks.tolist(), None))

        def loaded(self, key: int, blocks: torch.Tensor, *, picked: list[int], complete: bool) -> None:
            told.append(("loaded", key, blocks.tolist(), picked))

    def slots(*pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])

    canary: Any = Told()
    tier.written(slots(5, 3), slots(1, 2))
    tier.written(slots(6), slots(4))
    tier.given_away(slots(5))
    back = tier.read(slots(3, 5, 6), slots(7, 1, 0))
    tier.given_away(slots(3))
    events.apply(canary)
    for arrival in back:
        arrival.tell(canary, complete=True)

    assert told == [
        ("stored", 1, [1, 2], None),
        ("stored", 2, [4], None),
        ("discarded", 1, [], None),
        ("arriving", 0, [1], None),
        ("loaded", 1, [7], [1]),
        ("loaded", 2, [0], [0]),
    ]
