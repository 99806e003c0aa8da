"""Where the payloads of a group's parts are, as tables for kernels."""

from __future__ import annotations

import math

import torch

from kvcanary_agent.kernels.fingerprints import SEGMENT, byte_keys, num_segments, segment_keys
from kvcanary_agent.kernels.records import Records

from .content import PartColumn

_DIMENSIONS = 3
_WORD_SIZES = (4, 2, 1)
# The bits of a number that are all set in NaN and infinity, and what they are then. Where infinity does not exist, the
# one NaN; of float64, the upper half.
_NOT_FINITE = {
    torch.float16: (0x7C00, 0x7C00),
    torch.bfloat16: (0x7F80, 0x7F80),
    torch.float32: (0x7F80_0000, 0x7F80_0000),
    torch.float64: (0x7FF0_0000, 0x7FF0_0000),
    torch.float8_e5m2: (0x7C, 0x7C),
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e4m3fnuz: (0xFF, 0x80),
    torch.float8_e5m2fnuz: (0xFF, 0x80),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}
_UPPER_WORD_OF_TWO = -2


class PartTable:
    """The parts of one group for `_words` and `_halves` of the kernels.

    Attributes:
        word: Bytes that the kernels load at a time: the widest that suits all parts.
        most_words: Words of the longest payload.
        parts: ``[parts, len(PartColumn)]`` int64.
        keys: ``[any]`` int32: for each payload length, ``[2, word, words]``.
        unchecked: Parts whose numbers are not checked for NaN and infinity, because words are smaller than they are.
    """

    def __init__(self, records: Records) -> None:
        """Describe the parts.

        Raises:
            ValueError: A payload is scattered over more dimensions than the kernels follow.
        """
        runs = [_runs(view) for view in records.views]
        self.word = next(
            size
            for size in _WORD_SIZES
            if all(
                distance % size == 0
                for view, dims in zip(records.views, runs, strict=True)
                for distance in (
                    view.data_ptr(),
                    view.stride(0) * view.element_size(),
                    view.stride(1) * view.element_size(),
                    *(stride for _, stride in dims[:-1]),
                    dims[-1][0],
                )
            )
        )
        table = torch.zeros((len(records.views), len(PartColumn)), dtype=torch.int64)
        keys: list[torch.Tensor] = []
        begins: dict[int, int] = {}
        self.unchecked: list[int] = []
        for part, (view, dims) in enumerate(zip(records.views, runs, strict=True)):
            if len(dims) > _DIMENSIONS:
                raise ValueError(f"part {part}: a payload of shape {tuple(view.shape[2:])} and strides {view.stride()}")
            words = math.prod(size for size, _ in dims) // self.word
            (_, stride_0), (size_1, stride_1), _ = [(1, 0)] * (_DIMENSIONS - len(dims)) + dims
            row = table[part]
            row[PartColumn.ADDRESS] = view.data_ptr()
            row[PartColumn.BLOCK_STRIDE] = view.stride(0) * view.element_size()
            row[PartColumn.TOKEN_STRIDE] = view.stride(1) * view.element_size()
            row[PartColumn.SIZE_1], row[PartColumn.SIZE_2] = size_1, dims[-1][0] // self.word
            row[PartColumn.STRIDE_0], row[PartColumn.STRIDE_1], row[PartColumn.STRIDE_2] = stride_0, stride_1, self.word
            row[PartColumn.WORDS] = words
            if words not in begins:
                begins[words] = sum(key.numel() for key in keys)
                keys.append(_keys(words, self.word))
            row[PartColumn.KEYS] = begins[words]
            number = records.number_types[part]
            per_word = self.word // number.itemsize
            if number.itemsize == 8 and self.word == 4:
                per_word = _UPPER_WORD_OF_TWO
            if number in _NOT_FINITE:
                row[PartColumn.NUMBER_MASK], row[PartColumn.NUMBER_PATTERN] = _NOT_FINITE[number]
                row[PartColumn.NUMBERS_PER_WORD] = per_word
                if not per_word:
                    self.unchecked.append(part)
            row[PartColumn.CARRIES_TOKENS] = records.carries_tokens[part]
        self.most_words = int(table[:, PartColumn.WORDS].max()) if len(records.views) else 0
        self.parts = table.to(records.device)
        self.keys = torch.cat([key.view(-1) for key in keys] or [torch.zeros(1, dtype=torch.int32)]).to(records.device)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.parts, self.keys))


def _runs(view: torch.Tensor) -> list[tuple[int, int]]:
    """The payload's dimensions, ``(size, distance in bytes)``, in bytes and merged; the last one's distance is 1."""
    size = view.element_size()
    dims = [(length, stride * size) for length, stride in zip(view.shape[2:], view.stride()[2:], strict=True)]
    merged = [(size, 1)]
    for length, stride in reversed(dims):
        inner_length, inner_stride = merged[0]
        if length == 1:
            continue
        if stride == inner_length * inner_stride:
            merged[0] = (length * inner_length, inner_stride)
        else:
            merged.insert(0, (length, stride))
    return merged


def _keys(words: int, word: int) -> torch.Tensor:
    """The product of byte key and segment key for every byte of a payload: ``[2, word, words]`` int32."""
    segments = num_segments(words * word)
    products = byte_keys().to(torch.int64)[:, None, :] * segment_keys(segments).to(torch.int64)[:, :, None]
    flat = products.view(2, segments * SEGMENT)[:, : words * word]
    wrapped = (flat + 2**31) % 2**32 - 2**31
    return wrapped.to(torch.int32).view(2, words, word).transpose(1, 2).contiguous()
