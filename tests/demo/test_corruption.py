"""The faults: they go unnoticed by the engine, and change what requests are answered."""

from collections.abc import Iterator

import pytest
import torch

from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.corruption import double_allocation, flip_byte
from kvcanary_agent.demo.engine import Engine, RequestOutput

PROMPTS = [[index + 1] * 12 for index in range(3)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def started_engine() -> Engine:
    """Three requests, "0", "1" and "2", after their prefill."""
    engine = Engine(EngineConfig())
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, max_tokens=40, request_id=str(index))
    engine.step()
    return engine


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = []
    while not engine.is_idle:
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


def test_a_flipped_byte_changes_exactly_one_byte_of_the_pool() -> None:
    engine = started_engine()
    before = engine.runner.pool.data.clone().view(torch.uint8)

    flipped = flip_byte(engine, request_id="1", layer=2, part="value", position=9, byte=5)

    assert flipped is not None
    assert flipped.slot == flipped.block * 8 + 1
    assert flipped.block == engine.scheduler.running[1].block_table[1]
    changed = (engine.runner.pool.data.view(torch.uint8) != before).nonzero().tolist()
    assert changed == [[2, 1, flipped.block, 1, 0, 5]]


def test_a_flipped_byte_changes_what_its_request_is_answered_and_no_other() -> None:
    clean, engine = finish(started_engine()), started_engine()

    assert flip_byte(engine, request_id="1") is not None

    outputs = finish(engine)
    assert {key for key in clean if outputs[key] != clean[key]} == {"1"}


def test_a_byte_of_a_token_not_yet_computed_is_not_flipped() -> None:
    assert flip_byte(started_engine(), position=12) is None


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"layer": 4}, "layer is 4, but must be from 0 to 3"),
        ({"position": -1}, "position is -1"),
        ({"byte": 64}, "byte is 64, but must be from 0 to 63"),
        ({"part": "scale"}, "part is 'scale', but must be one of key, value"),
    ],
)
def test_a_place_that_the_pool_does_not_have_is_refused(place: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flip_byte(started_engine(), **place)  # type: ignore[arg-type]  # one case is of the wrong type on purpose


def test_a_double_allocation_puts_one_block_into_two_tables() -> None:
    engine = started_engine()

    doubled = double_allocation(engine, request_id="1", other_request_id="2")

    assert doubled is not None
    assert engine.scheduler.running[1].block_table[0] == doubled.block
    assert engine.scheduler.running[2].block_table[-1] == doubled.block


def test_a_double_allocation_changes_what_the_holder_is_answered() -> None:
    clean, engine = finish(started_engine()), started_engine()

    assert double_allocation(engine, request_id="1", other_request_id="2") is not None

    assert finish(engine)["1"] != clean["1"]


def test_a_double_allocation_needs_two_requests() -> None:
    engine = started_engine()
    engine.abort("0")
    engine.abort("2")

    assert double_allocation(engine) is None


def test_an_engine_serves_on_after_a_double_allocation() -> None:
    engine = started_engine()
    double_allocation(engine)
    finish(engine)

    fresh = Engine(EngineConfig())
    prompts = [[100 + index] * 20 for index in range(8)]
    assert [output.outputs for output in engine.generate(prompts, max_tokens=30)] == [
        output.outputs for output in fresh.generate(prompts, max_tokens=30)
    ]
