"""Everything comes up for comparison within the promised number of steps, and not much more than that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent.canary import KVGroup, KVPart
from kvcanary_agent.canary.schedule import Patrol, scrub_schedule


@pytest.mark.parametrize("parts", range(1, 71))
def test_each_block_and_part_is_due_within_any_period(parts: int) -> None:
    for period in range(1, 71):
        gaps: dict[tuple[int, int], int] = {}
        modulus = max(1, period // parts)
        everything = {(part, remainder) for part in range(parts) for remainder in range(modulus)}
        last_due: dict[tuple[int, int], int] = {}
        # The schedule repeats after a period at most; three are enough to see every gap, the one over the wrap too.
        for step in range(1, 3 * period + 1):
            for part, (remainder, of) in scrub_schedule(step, parts, period):
                assert of == modulus
                assert 0 <= part < parts
                assert 0 <= remainder < of
                key = (part, remainder)
                gaps[key] = max(gaps.get(key, 0), step - last_due.get(key, 0))
                last_due[key] = step
        assert last_due.keys() == everything, f"period {period}"
        assert max(gaps.values()) <= period, f"period {period}"
        assert max(3 * period + 1 - step for step in last_due.values()) <= period, f"period {period}"


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 10**6), st.integers(0, 1000))
def test_the_bound_holds_from_any_step_on(parts: int, period: int, first_step: int, block: int) -> None:
    seen = {
        part
        for step in range(first_step, first_step + period)
        for part, (remainder, modulus) in scrub_schedule(step, parts, period)
        if block % modulus == remainder
    }
    assert seen == set(range(parts))


@pytest.mark.parametrize("period", [1, 2, 7, 64, 128])
@pytest.mark.parametrize("parts", [1, 3, 64, 128, 160])
def test_a_step_handles_no_more_parts_than_the_bound_needs(parts: int, period: int) -> None:
    assert all(len(scrub_schedule(step, parts, period)) <= -(-parts // period) for step in range(1, 500))


def group(parts: int, blocks: int, block_size: int) -> KVGroup:
    view = torch.zeros(blocks, block_size, 1)
    return KVGroup(
        name="full",
        block_size=block_size,
        parts=tuple(KVPart(layer=f"layers.{index}", part="k", view=view) for index in range(parts)),
    )


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 8), st.integers(1, 100), st.integers(0, 200))
def test_a_patrol_walks_over_everything_once_per_round(
    parts: int, blocks: int, block_size: int, slots_per_step: int, already: int
) -> None:
    patrol = Patrol(group(parts, blocks, block_size))
    calls: list[tuple[int, int, int]] = []

    def check(first_block: int, num_blocks: int, part: int) -> None:
        calls.append((first_block, num_blocks, part))

    per_step = max(1, slots_per_step * parts // block_size)
    a_round = parts * -(-blocks // per_step)
    for _ in range(already):
        patrol.advance(slots_per_step, check)
    calls.clear()
    for _ in range(a_round):
        patrol.advance(slots_per_step, check)
    assert len(calls) == a_round
    assert all(1 <= count <= per_step for _, count, _ in calls)
    walked = [(part, block) for first, count, part in calls for block in range(first, first + count)]
    assert sorted(walked) == [(part, block) for part in range(parts) for block in range(blocks)]
