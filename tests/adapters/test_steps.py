"""Steps from what an engine keeps: whichever of the values it gives, what follows from them is the same step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_agent.adapters.api.axes import layout
from kvcanary_agent.adapters.api.steps import StepError, step

BLOCK = 4
POOL: Any = SimpleNamespace(
    canary=SimpleNamespace(layout=layout("e", k=torch.zeros(50, BLOCK, 2), axes="blocks tokens dim"))
)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """For each row its prefix, its new tokens, and its blocks."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        prefix, new = draw(st.integers(0, 9)), draw(st.integers(1, 5))
        count = -(-(prefix + new) // BLOCK)
        rows.append((prefix, new, draw(st.lists(st.integers(0, 49), min_size=count, max_size=count + 2))))
    return rows


def as_lists(found: Any) -> dict[str, Any]:
    return {
        "prefix": found.prefix_lens.tolist(),
        "offsets": found.query_offsets.tolist(),
        "tokens": found.token_ids.tolist(),
        "positions": found.positions.tolist(),
        "slots": found.groups[0].write_slots.tolist(),
        "table": found.groups[0].block_table.tolist(),
        "requests": list(found.requests),
    }


@given(batches(), st.booleans())
def test_what_is_left_out_follows_from_the_rest(rows: list[tuple[int, int, list[int]]], tensors: bool) -> None:
    prefix, new = [row[0] for row in rows], [row[1] for row in rows]
    positions = [position for start, count, _ in rows for position in range(start, start + count)]
    slots = [
        table[position // BLOCK] * BLOCK + position % BLOCK
        for start, count, table in rows
        for position in range(start, start + count)
    ]
    offsets = [sum(new[:index]) for index in range(len(new) + 1)]
    longest = max(len(table) for *_, table in rows)
    padded = [[*table, *[-1] * (longest - len(table))] for *_, table in rows]
    wanted: dict[str, Any] = {
        "prefix": prefix,
        "offsets": offsets,
        "tokens": list(range(len(positions))),
        "positions": positions,
        "slots": slots,
        "table": padded,
        "requests": [str(index) for index in range(len(rows))],
    }

    def given_as(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32) if tensors else values

    common = {
        "requests": range(len(rows)),
        "block_table": torch.tensor(padded) if tensors else [table for *_, table in rows],
        "token_ids": given_as(wanted["tokens"]),
    }
    seq_lens = [start + count for start, count in zip(prefix, new, strict=True)]
    for more in (
        {"prefix_lens": prefix, "query_lens": new},
        {"seq_lens": seq_lens, "query_offsets": offsets},
        {"positions": positions, "query_lens": new},
        {"positions": positions, "query_offsets": offsets, "prefix_lens": prefix, "write_slots": slots},
    ):
        values = {name: given_as(value) for name, value in more.items()}
        assert as_lists(step(POOL, **common, **values)) == wanted
    assert (
        as_lists(
            step(
                POOL,
                **{**common, "block_table": torch.tensor([*padded[::-1], padded[0]])},
                table_rows=list(range(len(rows)))[::-1],
                prefix_lens=prefix,
                query_lens=new,
            )
        )
        == wanted
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "nothing says how many tokens are new"),
        ({"token_ids": [1, 2]}, "nothing says how long the prefixes are"),
        ({"token_ids": [1, 2, 3]}, "3 new tokens of 2 requests: not the same number for each"),
        ({"token_ids": [1, 2], "prefix_lens": [1]}, "prefix_lens has shape (1,), but there are 2 requests"),
        ({"token_ids": [1, 2], "prefix_lens": 0, "write_slots": [1]}, "write_slots has 1 values, but there are 2"),
        ({"token_ids": [1.5, 2], "prefix_lens": 0}, "token_ids has dtype torch.float32, wanted integers"),
        ({"token_ids": ["a", "b"], "prefix_lens": 0}, "token_ids is a list that is no tensor of integers"),
        ({"token_ids": [1, 2], "prefix_lens": 0, "block_table": [[1]]}, "block_table has shape (1, 1)"),
        ({"token_ids": [1, 2], "prefix_lens": 0, "query_lens": [1, 2]}, "query_lens add up to 3, but there are 2"),
        ({"token_ids": [1, 2], "prefix_lens": 0, "namespaces": ["a"]}, "namespaces has 1 values, but there are 2"),
    ],
)
def test_values_that_do_not_fit_each_other_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(StepError) as caught:
        step(POOL, **{"requests": ["a", "b"], "block_table": [[1], [2]], **values})
    assert said in str(caught.value)


def test_a_row_of_the_table_that_does_not_exist_is_none_that_is_read_beyond_it() -> None:
    found = step(POOL, requests=["a"], block_table=torch.tensor([[7]]), table_rows=[99], token_ids=[1], prefix_lens=0)
    assert found.groups[0].block_table.tolist() == [[7]]
