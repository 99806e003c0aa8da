"""What happened to a block is told with steps and requests, and what is remembered is bounded."""

import pytest
import torch

from kvcanary_agent.canary import BlockEvent, Kind
from kvcanary_agent.canary.block_log import BlockLog
from kvcanary_agent.canary.ownership import Ownership
from tests.canary.toy import ToyEngine


def test_the_events_of_a_block_come_oldest_first_and_without_those_of_others() -> None:
    log = BlockLog()
    log.note(0, "allocated", "a", [1, 2])
    log.note(3, "shared", "b", [1])
    log.note(4, "freed", None, [2])
    assert log.of(1) == (BlockEvent(0, "allocated", "a"), BlockEvent(3, "shared", "b"))
    assert log.of(2) == (BlockEvent(0, "allocated", "a"), BlockEvent(4, "freed", None))
    assert log.of(7) == ()


def test_a_list_that_the_engine_goes_on_to_change_is_remembered_as_it_was() -> None:
    log, blocks = BlockLog(), [5]
    log.note(1, "allocated", "a", blocks)
    blocks[0] = 6
    assert log.of(5)
    assert not log.of(6)


def test_old_events_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary_agent.canary.block_log._MAX_BLOCKS", 100)
    log = BlockLog()
    for step in range(50):
        log.note(step, "allocated", "a", range(step, step + 10))
    assert not log.of(39)
    assert log.of(58) == (BlockEvent(49, "allocated", "a"),)
    log.note(50, "allocated", "a", range(1000))
    assert not log.of(58)


def test_a_violation_tells_what_happened_to_its_block() -> None:
    toy = ToyEngine(settings={"content": "full"})
    toy.start("a", range(4), blocks=2)
    block = toy.requests["a"].tables[0][0]
    toy.poke(block, 1)
    toy.decode("a")
    (violation,) = toy.sink.violations
    assert violation.kind is Kind.CONTENT
    assert violation.block_events == (BlockEvent(0, "allocated", "a"),)


def test_a_load_for_a_request_that_does_not_hold_the_block_is_misuse() -> None:
    blocks = Ownership(8, 0, torch.device("cpu"))
    blocks.allocated([3], "a")
    assert blocks.loaded([3], "a") == []
    (misuse,) = blocks.loaded([3], "b")
    assert (misuse.block, misuse.request, misuse.other) == (3, "b", "a")
    assert blocks.loaded([4], "b") == [], "nothing is known about this block"
