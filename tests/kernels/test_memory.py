"""Tensors' memory as Python's numbers."""

from __future__ import annotations

import gc

import pytest
import torch

from kvcanary_agent.kernels.records import UNKNOWN, Records
from kvcanary_agent.kernels.tuned.memory import RecordMemory, Rows2D, numbers_in, rows_of, tensor_of

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_numbers_are_the_tensor_s_own(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype)
    numbers = numbers_in(tensor)
    assert numbers.tolist() == tensor.tolist()
    numbers[3] = 99
    assert tensor[3] == 99
    tensor[4] = 77
    assert numbers[4] == 77
    assert tensor_of(numbers, dtype).equal(tensor)


def test_numbers_of_nothing_are_none() -> None:
    assert numbers_in(torch.empty(0, dtype=torch.int64)).tolist() == []
    assert rows_of(torch.empty((3, 0), dtype=torch.int32)).octets(2, 0, 5) == b""
    assert tensor_of([]).shape == (0,)


@pytest.mark.parametrize(
    "made",
    [
        lambda values: values[:, 2:7],
        lambda values: values[:, ::2],
        lambda values: values.t(),
        lambda values: values.to(torch.uint16),
        lambda values: values[:1].expand(3, -1),
        lambda values: values[:, :1],
    ],
)
def test_rows_of_any_strides_and_types_are_read_as_torch_reads_them(made: object) -> None:
    assert callable(made)
    values = made(torch.arange(60, dtype=torch.int32).view(6, 10))
    rows = rows_of(values)
    # Memory that nothing keeps would be given to these.
    gc.collect()
    others = [torch.full((6, 10), -1, dtype=torch.int64) for _ in range(20)]
    wanted = values.to(torch.int64).tolist()
    for row, of_row in enumerate(wanted):
        assert [rows.numbers[row * rows.stride + column] for column in range(rows.width)] == of_row
        octets = memoryview(rows.octets(row, 1, rows.width + 3))
        assert octets.nbytes == (rows.width - 1) * rows.item_bytes
    assert len(others) == 20


def test_columns_that_lie_apart_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="columns lie 2 elements apart, wanted 1"):
        Rows2D(torch.zeros((3, 8), dtype=torch.int64)[:, ::2])


def test_a_slot_s_record_is_what_its_columns_say() -> None:
    records = Records(4, 2, torch.device("cpu"), [])
    memory = RecordMemory(records)
    slot = 5
    records.position[slot], records.generation[slot] = 17, UNKNOWN
    records.token[slot], records.seed[slot] = 2**40, -(2**50)
    records.chain[slot], records.chain_after[slot] = -5, 2**63 - 1
    records.owner[slot], records.step[slot] = 3, 2**31 - 1
    records.fingerprinted[slot], records.order[slot] = 1, 9
    record = memory.record(slot)
    assert record[:6] == (17, UNKNOWN, 2**40, -(2**50), -5, 2**63 - 1)
    assert (record.owner, record.step, record.fingerprinted, record.order) == (3, 2**31 - 1, 1, 9)
    assert memory.chain_after(slot) == 2**63 - 1
    memory.put(4, record)
    assert records.table[4].equal(records.table[5])
    assert memory.have_prints(2, 0, 2) == [False, False]
    records.generation[slot] = records.block_generation[2]
    assert memory.have_prints(2, 0, 2) == [False, True]
    assert memory.have_prints(2, 1, 2) == [True]
