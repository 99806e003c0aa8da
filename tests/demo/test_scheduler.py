"""The scheduler: who takes part in a step."""

from kvcanary_agent.demo.block_manager import BlockManager
from kvcanary_agent.demo.scheduler import Scheduler
from kvcanary_agent.demo.sequence import Sequence


def scheduler(*, num_blocks: int, max_num_seqs: int = 8, max_batched_tokens: int = 64) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size=4), max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens
    )


def request(request_id: str, num_tokens: int, *, n: int = 1) -> Sequence:
    return Sequence(
        request_id=request_id,
        root_id=request_id,
        token_ids=[ord(request_id)] * num_tokens,
        num_prompt_tokens=num_tokens,
        max_tokens=10,
        n=n,
    )


def step(steps: Scheduler) -> list[tuple[str, int]]:
    """Run one step without a model; returns each row's request and number of tokens."""
    schedule = steps.schedule()
    steps.update(schedule, [list(range(8)) for _ in schedule.rows])
    return [(seq.request_id, num_tokens) for seq, num_tokens in schedule.rows]


def test_when_blocks_run_out_the_last_admitted_waits_first_in_line() -> None:
    tight = scheduler(num_blocks=4)
    first, last, later = request("a", 4), request("b", 8), request("c", 5)
    for seq in (first, last, later):
        tight.add(seq)
    assert step(tight) == [("a", 4), ("b", 8)]

    assert step(tight) == [("a", 1)]

    assert list(tight.waiting) == [last, later]
    assert (last.block_table, last.num_computed, len(last.output_ids)) == ([], 0, 1)
    assert tight.num_preemptions == 1


def test_a_preempted_sequence_is_recomputed_with_its_outputs() -> None:
    tight = scheduler(num_blocks=4)
    tight.add(request("a", 4))
    tight.add(request("b", 8))
    step(tight)
    step(tight)

    tight.remove("a")

    # Its two full blocks are cached; one has been evicted for "a", the earlier one stayed.
    assert step(tight) == [("b", 5)]


def test_a_request_is_admitted_only_with_seats_for_all_its_continuations() -> None:
    seated = scheduler(num_blocks=32, max_num_seqs=4)
    seated.add(request("a", 4, n=2))
    seated.add(request("b", 4, n=3))
    assert step(seated) == [("a", 4)]
    assert step(seated) == [("a", 1), ("a/1", 1)]

    seated.remove("a")

    assert step(seated) == [("b", 4)]


def test_running_sequences_come_before_new_ones_when_the_token_budget_is_short() -> None:
    short = scheduler(num_blocks=32, max_batched_tokens=4)
    short.add(request("a", 7))
    short.add(request("b", 5))

    assert step(short) == [("a", 4)]
    assert step(short) == [("a", 3), ("b", 1)]
    assert step(short) == [("a", 1), ("b", 3)]
