"""Which blocks of a scheduler's output count as handed out anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvcanary_agent.adapters.vllm.attached_runner import fresh_blocks


def scheduled(*, new: Any = (), cached: Any = (), resumed: Any = ()) -> SimpleNamespace:
    """A scheduler's output: each request is (id, block ids of each group, computed tokens)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request, block_ids=blocks, num_computed_tokens=computed)
            for request, blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request for request, _, _ in (*cached, *resumed)],
            new_block_ids=[blocks for _, blocks, _ in (*cached, *resumed)],
            num_computed_tokens=[computed for _, _, computed in (*cached, *resumed)],
            resumed_req_ids={request for request, _, _ in resumed},
        ),
    )


def test_a_new_request_keeps_the_records_of_the_blocks_found_in_the_prefix_cache() -> None:
    output = scheduled(new=[("a", ([4, 5, 6, 7],), 64)])

    assert list(fresh_blocks(output, [32])) == [("a", 0, [6, 7])]


def test_a_block_that_the_prefix_fills_in_part_keeps_its_records() -> None:
    output = scheduled(new=[("a", ([4, 5, 6],), 40)])

    assert list(fresh_blocks(output, [32])) == [("a", 0, [6])]


def test_a_running_request_gets_every_block_it_is_given_as_new() -> None:
    output = scheduled(cached=[("a", ([9],), 64), ("b", None, 70)])

    assert list(fresh_blocks(output, [32])) == [("a", 0, [9])]


def test_a_resumed_request_brings_its_whole_list_again() -> None:
    output = scheduled(resumed=[("a", ([4, 5, 6],), 32)])

    assert list(fresh_blocks(output, [32])) == [("a", 0, [5, 6])]


def test_the_null_block_of_a_window_is_never_handed_out() -> None:
    output = scheduled(new=[("a", ([1, 2, 3], [0, 0, 8]), 0)])

    assert list(fresh_blocks(output, [32, 32])) == [("a", 0, [1, 2, 3]), ("a", 1, [8])]
