"""What a vLLM worker makes of the events that its scheduler's process sends, and of events that are missing."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_agent import runtime
from kvcanary_agent.adapters.vllm.events import Action, BlockEvent, ExternalLoad, StepEvents, attach, attached_to
from kvcanary_agent.adapters.vllm.follower import AllocatorFollower
from kvcanary_agent.canary import Canary, ForwardStep, GroupStep, Kind, KVLayout
from kvcanary_agent.settings import Settings
from tests.canary.toy import BLOCK_SIZE, RecordingSink, two_groups_over_one_storage

FULL, SLIDING = 0, 2
"""vLLM's numbers of the two groups; group 1 is one that the adapter does not cover."""


def output(number: int | None, *blocks: BlockEvent, finished: set[str] | None = None, **fields: Any) -> SimpleNamespace:
    made = SimpleNamespace(finished_req_ids=finished or set())
    if number is not None:
        attach(made, StepEvents(number=number, blocks=list(blocks), **fields))
    return made


def event(action: Action, request: str | None, blocks: tuple[int, ...], group: int = FULL) -> BlockEvent:
    return BlockEvent(action, request, group, blocks)


class Worker:
    """A pool of two groups whose canary follows the events; it computes one token for a request at a time."""

    def __init__(self) -> None:
        self.sink = RecordingSink()
        groups = two_groups_over_one_storage(8, BLOCK_SIZE, null_block=0)
        self.canary = Canary(KVLayout(engine="toy", groups=groups), Settings(content="off"), self.sink)
        self.follower = AllocatorFollower(self.canary, (FULL, SLIDING))

    def compute(self, request: str, position: int, table: list[int], token: int = 5) -> None:
        """The request reads what it has in both groups, and writes its next token."""
        slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        blocks = torch.tensor([table])
        group = GroupStep(block_table=blocks, write_slots=torch.tensor([slot]))
        # The sliding group takes no part.
        unused = GroupStep(block_table=torch.zeros_like(blocks), write_slots=torch.tensor([-1]))
        self.canary.before_forward(
            ForwardStep(
                requests=[request],
                prefix_lens=torch.tensor([position]),
                query_offsets=torch.tensor([0, 1]),
                token_ids=torch.tensor([token]),
                positions=torch.tensor([position]),
                groups=[group, unused][: len(self.canary.layout.groups)],
            )
        )
        self.canary.after_forward()

    def in_full_group(self) -> list[tuple[Kind, str | None]]:
        return [(found.kind, found.request) for found in self.sink.violations if found.group == "full"]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(runtime, "_already_said", set())
    return Worker()


def test_events_survive_pickling_and_need_no_agent_to_be_read() -> None:
    sent = StepEvents(
        number=3,
        blocks=[event(Action.ALLOCATED, "a", (1, 2)), event(Action.INDEX_RESET, None, (), -1)],
        external=[ExternalLoad("a", 4, 8, ((1, 2), (0, 3)), True)],
        salts={"a": "x"},
        traces={"a": {"traceparent": "00-0-0-01"}},
    )
    made = SimpleNamespace()
    attach(made, sent)
    data = pickle.dumps(made)

    assert b"kvcanary_agent" not in data
    assert attached_to(pickle.loads(data)) == sent


def test_an_output_without_events_has_none() -> None:
    assert attached_to(SimpleNamespace()) is None


def test_a_request_that_reads_a_block_which_it_gave_back_is_seen(worker: Worker) -> None:
    assert worker.follower.apply(output(1, event(Action.ALLOCATED, "a", (1,))))
    worker.compute("a", 0, [1])
    worker.compute("a", 1, [1])
    assert worker.in_full_group() == []

    worker.follower.apply(output(2, event(Action.FREED_CACHED, "a", (1,)), event(Action.SHARED, "b", (1,))))
    worker.compute("a", 2, [1])

    assert (Kind.OWNERSHIP, "a") in worker.in_full_group()


def test_a_block_that_another_group_is_given_holds_nothing_of_this_one(worker: Worker) -> None:
    worker.follower.apply(output(1, event(Action.ALLOCATED, "a", (1,))))
    worker.compute("a", 0, [1])
    worker.follower.apply(output(2, event(Action.ALLOCATED, "b", (1,), SLIDING)))
    worker.compute("a", 1, [1])

    assert (Kind.UNWRITTEN, "a") in worker.in_full_group()


def test_a_block_goes_from_group_to_group_without_a_report(worker: Worker) -> None:
    for number, group in enumerate((FULL, SLIDING, 1, FULL, FULL), 1):
        acts = (Action.ALLOCATED, Action.FREED)
        worker.follower.apply(output(number, *(event(act, f"r{number}", (1, 2), group) for act in acts)))

    assert worker.sink.violations == []


def test_after_a_reset_of_the_index_no_free_block_is_shared(worker: Worker) -> None:
    freed = (event(Action.ALLOCATED, "a", (1,)), event(Action.FREED_CACHED, "a", (1,)))
    worker.follower.apply(output(1, *freed, event(Action.SHARED, "b", (1,)), event(Action.FREED_CACHED, "b", (1,))))
    assert worker.sink.violations == []
    worker.follower.apply(output(2, event(Action.INDEX_RESET, None, (), -1), event(Action.SHARED, "c", (1,))))

    assert [(found.kind, found.request) for found in worker.sink.violations] == [(Kind.OWNERSHIP, "c")]


@pytest.mark.parametrize("lost", [output(None), output(3)], ids=["no_events", "a_gap"])
def test_nothing_is_said_about_holders_once_events_are_missing(
    worker: Worker, lost: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    worker.follower.apply(output(1, event(Action.ALLOCATED, "a", (1,))))
    worker.compute("a", 0, [1])
    assert not worker.follower.apply(lost)
    # Freed, handed out and shared without a word.
    worker.canary.allocated([1], group=FULL, request="b")
    worker.compute("b", 0, [1])
    worker.compute("b", 1, [1])

    assert worker.in_full_group() == []
    assert "not covering ownership of vllm" in caplog.text


def test_a_worker_that_comes_late_does_not_follow(worker: Worker) -> None:
    assert not worker.follower.apply(output(5, event(Action.ALLOCATED, "a", (2,))))
    worker.compute("a", 0, [1])

    assert worker.in_full_group() == []


def test_a_scheduler_that_starts_anew_is_followed_from_its_first_output(worker: Worker) -> None:
    worker.follower.apply(output(1, event(Action.ALLOCATED, "a", (1,))))
    assert worker.follower.apply(output(1, event(Action.ALLOCATED, "b", (1,))))

    assert worker.sink.violations == []


def test_a_salt_is_known_until_the_request_is_finished(worker: Worker) -> None:
    worker.follower.apply(output(1, salts={"a": "x", "b": "y"}))
    worker.follower.apply(output(2, finished={"a", "b"}, salts={"b": "z"}))

    assert worker.follower.salts == {"b": "z"}
