"""What SGLang's token table and requests mean to the canary."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from kvcanary_agent.adapters.histories import Histories
from kvcanary_agent.adapters.token_tables import pages_of
from kvcanary_agent.canary import KVGroup, KVPart


def group(page_size: int, window: int | None = None) -> KVGroup:
    part = KVPart(layer="layers.0", part="k", view=torch.zeros(16, page_size, 2))
    return KVGroup(name="full", block_size=page_size, parts=(part,), window=window)


def pages(table: list[list[int]], lengths: list[int], *, size: int = 4, window: int | None = None) -> list[list[int]]:
    lengths_tensor = torch.tensor(lengths)
    found = pages_of(group(size, window), torch.tensor(table, dtype=torch.int32), lengths_tensor - 1, lengths_tensor)
    return list(found.tolist())


def test_single_slots_are_their_own_pages() -> None:
    assert pages([[7, 3, 5, 0]], [3], size=1) == [[7, 3, 5, 0]]


def test_runs_of_a_page_are_that_page_whatever_stands_behind_the_last_token() -> None:
    assert pages([[8, 9, 10, 11, 20, 21, 99, 5]], [6]) == [[2, 5]]


def test_a_table_may_end_within_a_page() -> None:
    assert pages([[8, 9, 10, 11, 20, 21]], [6]) == [[2, 5]]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param([8, 10, 9, 11], id="order"),
        pytest.param([8, 9, 14, 11], id="another_page"),
        pytest.param([9, 10, 11, 12], id="shifted"),
        pytest.param([8, 9, 10, 10], id="repeated"),
        pytest.param([0, 9, 10, 11], id="padding"),
    ],
)
def test_a_run_that_is_not_a_page_is_outside_the_pool(run: list[int]) -> None:
    assert pages([[*run, 20, 21, 22, 23]], [8]) == [[-1, 5]]


def test_what_has_left_the_window_need_not_be_a_page() -> None:
    # The query at position 7 sees positions 5 to 7.
    assert pages([[0, 0, 0, 0, 0, 21, 22, 23]], [8], window=3) == [[-1, 5]]
    assert pages([[0, 0, 0, 0, 0, 0, 22, 23]], [8], window=3) == [[-1, -1]]


UNLIMITED = 1 << 40


class Request:
    """A scheduler's request."""

    def __init__(self, prompt: list[int]) -> None:
        self.origin_input_ids, self.output_ids = array("q", prompt), array("q")


def tokens_of(request: Request) -> tuple[array[int], array[int]]:
    return request.origin_input_ids, request.output_ids


def known(histories: Histories, *requests: Any) -> list[list[int]]:
    found = histories.known_tokens(requests)
    assert found is not None
    return [[token for token in found.tokens[row].tolist() if token >= 0] for row in found.rows.tolist()]


def test_histories_grow_with_their_requests() -> None:
    histories = Histories(torch.device("cpu"), UNLIMITED, tokens_of)
    one, other = Request([1, 2, 3]), Request(list(range(10, 700)))

    assert known(histories, one, other) == [[1, 2, 3], list(range(10, 700))]
    one.output_ids.append(4)
    other.output_ids.extend([7, 8])
    assert known(histories, other, one) == [[*range(10, 700), 7, 8], [1, 2, 3, 4]]


def test_rows_of_requests_that_are_gone_are_used_again_and_start_empty() -> None:
    histories = Histories(torch.device("cpu"), UNLIMITED, tokens_of)
    before = histories.num_bytes

    for number in range(200):
        assert known(histories, Request([number + 1] * (200 - number))) == [[number + 1] * (200 - number)]

    assert histories.num_bytes == before


def test_the_table_stays_within_its_bound_and_what_does_not_fit_is_unknown() -> None:
    bound = 64 << 10
    histories = Histories(torch.device("cpu"), bound, tokens_of)
    long = Request(list(range(1, 5001)))

    (tokens,) = known(histories, long)
    assert histories.num_bytes <= bound
    assert 500 <= len(tokens) < 5000
    assert tokens == list(range(1, len(tokens) + 1))
    long.output_ids.append(9)
    assert known(histories, long) == [tokens]
    crowd = [Request([number, number]) for number in range(1, 200)]
    assert histories.known_tokens(crowd) is None
    assert histories.num_bytes <= bound
    assert known(histories, long) == [tokens]


def test_more_requests_than_rows_keep_theirs() -> None:
    histories = Histories(torch.device("cpu"), UNLIMITED, tokens_of)
    requests = [Request([number, number]) for number in range(50)]

    assert known(histories, *requests) == [[number, number] for number in range(50)]
