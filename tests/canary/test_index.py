"""What a prefix index promises and holds, against the records of its slots."""

from __future__ import annotations

import torch

from kvcanary_agent.canary.claims import IndexClaims
from kvcanary_agent.canary.prefix_index import broken_entries
from tests.canary.toy import ToyEngine


def test_a_claim_made_while_another_of_its_block_is_looked_at_stays_open() -> None:
    toy = ToyEngine(block_size=4)
    (block,) = toy.start("a", range(10, 14)).tables[0][:1]
    claims = IndexClaims(toy.canary._records[0])
    claims.add(range(10, 14), block, None)
    claims.ask()
    claims.add(range(20, 24), block, None)
    (first,) = claims.answers()
    assert claims, "the later claim is not judged by an answer to the earlier one"
    claims.ask()
    (second,) = claims.answers()
    assert first[1].chain != second[1].chain
    assert not claims


def test_an_entry_for_another_position_than_was_written_is_broken() -> None:
    toy = ToyEngine(block_size=4)
    toy.start("a", range(10, 14))
    slots = torch.tensor([toy.slot("a", position) for position in range(3)])
    previous = torch.tensor([-1, *slots[:2].tolist()])
    records = toy.canary._records[0]
    assert broken_entries(records, slots, torch.arange(3), previous) == []
    assert broken_entries(records, slots, torch.tensor([0, 5, 2]), previous) == [1]
