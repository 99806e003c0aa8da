"""The memory of CPU tensors as Python's numbers: for a handful of them, a call into torch costs more than the work."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import torch

from kvcanary_agent.kernels.records import Column, Records

_FORMATS = {
    torch.int64: "q",
    torch.int32: "i",
    torch.int16: "h",
    torch.int8: "b",
    torch.uint8: "B",
    torch.bool: "?",
}

# A view of any length without a type of its own, as ctypes' arrays have.
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ_AND_WRITE = 0x200


def numbers_in(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous tensor, in order: the same memory, which ``tensor`` is to keep alive."""
    return _numbers_at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _FORMATS[tensor.dtype])


# Most tensors of a step are where they were in the step before. The memory of an entry is looked at only if a tensor
# that lives has just been found there.
@lru_cache(maxsize=256)
def _numbers_at(address: int, num_bytes: int, number_format: str) -> memoryview:
    octets: memoryview = _memory_at(address, num_bytes, _READ_AND_WRITE) if num_bytes else memoryview(bytearray())
    numbers: memoryview = octets.cast("B").cast(number_format)  # type: ignore[call-overload]  # one of `_FORMATS`
    return numbers


def tensor_of(numbers: Iterable[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """``[n]``: what `torch.tensor` makes of a list, in a fifth of its time."""
    values = array(_FORMATS[dtype] if dtype is not torch.bool else "B", numbers)
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


class Rows2D:
    """A ``[rows, columns]`` integer tensor whose rows are contiguous, as Python's numbers.

    Attributes:
        numbers: All its memory from the first element to the last; element ``[r, c]`` is ``numbers[r * stride + c]``.
        stride, width: Elements from row to row, and in a row.
    """

    __slots__ = ("_item", "_octets", "_tensor", "numbers", "stride", "width")

    def __init__(self, tensor: torch.Tensor) -> None:
        """
        Raises:
            ValueError: If its rows are not contiguous.
        """
        rows, self.width = tensor.shape
        if self.width > 1 and tensor.stride(1) != 1:
            raise ValueError(f"columns lie {tensor.stride(1)} elements apart, wanted 1")
        # The views do not keep the memory.
        self._tensor = tensor
        self.stride, self._item = tensor.stride(0), tensor.element_size()
        count = (rows - 1) * self.stride + self.width if rows and self.width else 0
        self.numbers = _numbers_at(tensor.data_ptr(), count * self._item, _FORMATS[tensor.dtype])
        self._octets = self.numbers.cast("B")

    def octets(self, row: int, begin: int, end: int) -> bytes:
        """The memory of the elements from column ``begin`` to ``end`` of a row; columns beyond the width left out."""
        start = row * self.stride
        return bytes(self._octets[(start + begin) * self._item : (start + min(end, self.width)) * self._item])

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return self._item


def rows_of(tensor: torch.Tensor) -> Rows2D:
    """A tensor of an engine's integers as `Rows2D`, copied if need be."""
    if tensor.dtype not in _FORMATS:
        tensor = tensor.to(torch.int64)
    return Rows2D(tensor if tensor.shape[1] < 2 or tensor.stride(1) == 1 else tensor.contiguous())


class Record(NamedTuple):
    """What `Column` says of a slot, number by number."""

    position: int
    generation: int
    token: int
    seed: int
    chain: int
    chain_after: int
    owner: int
    step: int
    fingerprinted: int
    unused: int
    order: int
    claim_step: int


_RECORD = Struct("=iiqqqqiiiiii")
_HALVES = 2 * len(Column)
assert _RECORD.size == 4 * _HALVES


class RecordMemory:
    """The records of one group on a CPU, slot by slot.

    Attributes:
        generations: Of each block, that in which its slots count.
    """

    def __init__(self, records: Records) -> None:
        # The views do not keep the memory.
        self._records = records
        self._octets = numbers_in(records.table).cast("B")
        self._halves = self._octets.cast("i")
        self.generations = numbers_in(records.block_generation)
        self.num_blocks, self.block_size = records.num_blocks, records.block_size

    def of(self, slot: int) -> tuple[int, ...]:
        """The fields of `Record`, as a plain tuple."""
        return _RECORD.unpack_from(self._octets, slot * _RECORD.size)

    def record(self, slot: int) -> Record:
        """A slot's record."""
        return Record._make(self.of(slot))

    def chain_after(self, slot: int) -> int:
        """Of a slot's record."""
        return self.of(slot)[5]

    def put(self, slot: int, record: Record) -> None:
        """Replace a slot's record."""
        _RECORD.pack_into(self._octets, slot * _RECORD.size, *record)

    def have_prints(self, block: int, begin: int, end: int) -> list[bool]:
        """Which of the slots of a block, from offset ``begin`` to ``end``, have a fingerprint that counts."""
        first, last = (block * self.block_size + begin) * _HALVES, (block * self.block_size + end) * _HALVES
        generation = self.generations[block]
        generations = self._halves[first + 2 * Column.PLACE + 1 : last : _HALVES].tolist()
        states = self._halves[first + 2 * Column.STATE : last : _HALVES].tolist()
        return [state != 0 and of_slot == generation for state, of_slot in zip(states, generations, strict=True)]
