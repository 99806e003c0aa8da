"""Fingerprints on a CPU: gathers that stay in the cache, and one matrix product of bytes for each key vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcanary_agent.kernels.fingerprints import SEGMENT, byte_keys, num_segments, segment_keys
from kvcanary_agent.kernels.hashing import as_words

_WIDER_WORDS = (torch.int64, torch.int32, torch.int16)
_GATHER_BYTES = 1 << 20
"""Bytes gathered at a time: few calls for many bytes, and yet the products find them in the cache."""
_SCRATCH_SHARE = 256
"""Scratch for gathers is at most this part of the pool, or one block of a part."""
_ROOMS = 256
"""Ways to look at the scratch that are remembered."""
_RUN_BYTES = 4 << 20
"""Bytes at a time where they need not be gathered: few calls, and both products find them in the last cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """Parts that lie in one storage at regular distances, so that one gather fetches a slot's payload of all of them.

    Attributes:
        parts: Their indexes, in the order of the view.
        view: ``[outer, inner, blocks, block_size, *payload]``, ``outer * inner`` parts.
        number_type: What their bytes mean as numbers.
        num_bytes: Payload bytes of one slot of one part.
    """

    parts: tuple[int, ...]
    view: torch.Tensor
    number_type: torch.dtype
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Keys:
    """What rows of one length are multiplied with.

    Attributes:
        width: Bytes of a segment.
        of_byte: Two of ``[width, 1]`` int8; of_segment: two of ``[segments]`` int32.
        exact: Whether this CPU's product of bytes is exact.
    """

    width: int
    of_byte: tuple[torch.Tensor, ...]
    of_segment: tuple[torch.Tensor, ...]
    exact: bool

    @staticmethod
    def of(length: int) -> _Keys:
        """Those of rows of so many bytes."""
        width = min(length, SEGMENT)
        of_byte = tuple(keys[:width, None].contiguous() for keys in byte_keys())
        of_segment = tuple(segment_keys(num_segments(length)))
        return _Keys(width=width, of_byte=of_byte, of_segment=of_segment, exact=_multiplies_exactly(of_byte))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Room:
    """Scratch for the payloads of some blocks.

    Attributes:
        gathered: ``[blocks, ...]``, in words, where a gather puts them.
        octets: The same memory, ``[rows, bytes]`` uint8.
        segments: The same, ``[any, width]`` int8; None if rows are no whole number of segments.
    """

    gathered: torch.Tensor
    octets: torch.Tensor
    segments: torch.Tensor | None


class Fingerprinter:
    """Fingerprints of the parts of one group.

    Attributes:
        stacks: All parts, those of equal payload length and number type in one list.
    """

    def __init__(self, views: Sequence[torch.Tensor], number_types: Sequence[torch.dtype]) -> None:
        """Plan the gathers.

        Args:
            views: ``[blocks, block_size, *payload]`` of each part, integer dtypes.
            number_types: Of each part.
        """
        self._views = [widen(as_words(view), 2) for view in views]
        self._lengths = [view[0, 0].numel() * view.element_size() for view in views]
        self.stacks: dict[tuple[int, torch.dtype], list[Stack]] = {}
        for stack in _stacks(self._views, number_types):
            self.stacks.setdefault((stack.num_bytes, stack.number_type), []).append(stack)
        pool = sum(view.shape[0] * view.shape[1] * length for view, length in zip(views, self._lengths, strict=True))
        block = max((view.shape[1] * length for view, length in zip(views, self._lengths, strict=True)), default=0)
        # Kept, because fresh memory costs more than the gather into it.
        self._scratch = torch.empty(-(-max(block, min(_GATHER_BYTES, pool // _SCRATCH_SHARE)) // 8), dtype=torch.int64)
        self._keys: dict[int, _Keys] = {}
        self._rooms: dict[object, _Room] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of scratch."""
        return 8 * self._scratch.numel()

    def slots_per_chunk(self, num_bytes: int) -> int:
        """For how many slots `of_slots` is best called at a time, if each has so many bytes in all parts."""
        return max(1, _GATHER_BYTES // num_bytes)

    def of_rows(self, octets: torch.Tensor) -> torch.Tensor:
        """The fingerprints, ``[rows]`` int64, of ``[rows, bytes]`` uint8, contiguous."""
        keys = self._keys_of(octets.shape[1])
        if octets.shape[1] % keys.width:
            octets = torch.nn.functional.pad(octets, (0, -octets.shape[1] % SEGMENT))
        return _prints_of(octets.view(torch.int8).view(-1, keys.width), octets.shape[0], keys)

    def of_gathered(self, view: torch.Tensor, length: int, blocks: torch.Tensor) -> torch.Tensor:
        """The fingerprints of the rows of that many bytes in these blocks, ``[n]``, of a view ``[blocks, ...]``."""
        of_block = _bytes_of_block(view)
        if of_block > self.num_bytes:
            self._scratch = torch.empty(-(-of_block // 8), dtype=torch.int64)
            self._rooms.clear()
        step = self.num_bytes // of_block
        pieces = []
        for start in range(0, blocks.shape[0], step):
            chunk = blocks if step >= blocks.shape[0] else blocks[start : start + step]
            room = self._room(view, length, chunk.shape[0])
            torch.index_select(view, 0, chunk, out=room.gathered)
            if room.segments is None:
                pieces.append(self.of_rows(room.octets))
            else:
                pieces.append(_prints_of(room.segments, room.octets.shape[0], self._keys_of(length)))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def of_blocks(self, part: int, blocks: torch.Tensor) -> torch.Tensor:
        """The fingerprints of one part in whole blocks: ``[n, block_size]`` int64 for ``[n]`` int64."""
        view, length = self._views[part], self._lengths[part]
        size = view.shape[1]
        if view.is_contiguous() and _is_run(blocks):
            first = int(blocks[0])
            run = view[first : first + blocks.shape[0]].view(-1).view(torch.uint8).view(-1, length)
            step = max(1, _RUN_BYTES // length)
            pieces = [self.of_rows(run[start : start + step]) for start in range(0, run.shape[0], step)]
            return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(-1, size)
        return self.of_gathered(view, length, blocks).view(-1, size)

    def _keys_of(self, length: int) -> _Keys:
        keys = self._keys.get(length)
        if keys is None:
            keys = self._keys[length] = _Keys.of(length)
        return keys

    def _room(self, view: torch.Tensor, length: int, blocks: int) -> _Room:
        """Scratch for so many blocks of a view; a step after the other looks at about as many."""
        shape = view.shape[1:]
        key = (view.dtype, shape, length, blocks)
        room = self._rooms.get(key)
        if room is None:
            if len(self._rooms) >= _ROOMS:
                self._rooms.clear()
            octets = self._scratch.view(torch.uint8)[: blocks * _bytes_of_block(view)]
            width = self._keys_of(length).width
            room = self._rooms[key] = _Room(
                gathered=octets.view(view.dtype).view(blocks, *shape),
                octets=octets.view(-1, length),
                segments=None if length % width else octets.view(torch.int8).view(-1, width),
            )
        return room

    def of_slots(
        self, stacks: Sequence[Stack], block: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Payloads and fingerprints of slots, in all parts of stacks that have one payload length.

        Args:
            stacks: One of the lists of `stacks`.
            block, offset: ``[n]`` int64; as many as `slots_per_chunk` says.

        Returns:
            ``[parts, n, bytes]`` uint8 and ``[parts, n]`` int64, in the order of the stacks' parts.
        """
        slots, length = block.shape[0], stacks[0].num_bytes
        pieces = [stack.view[:, :, block, offset].reshape(-1).view(torch.uint8) for stack in stacks]
        octets = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(-1, slots, length)
        return octets, self.of_rows(octets.view(-1, length)).view(-1, slots)


def _prints_of(segments: torch.Tensor, rows: int, keys: _Keys) -> torch.Tensor:
    """The fingerprints of so many rows, ``[rows]`` int64.

    Args:
        segments: ``[rows * segments of each, width]`` int8.
        keys: Of the rows' length.
    """
    prints = torch.empty(rows, dtype=torch.int64)
    halves = prints.view(torch.int32).view(rows, 2).unbind(1)
    for half, of_byte, of_segment in zip(halves, keys.of_byte, keys.of_segment, strict=True):
        sums = torch._int_mm(segments, of_byte) if keys.exact else segments.to(torch.int32) @ of_byte.to(torch.int32)
        torch.mv(sums.view(rows, -1), of_segment, out=half)
    return prints


def _bytes_of_block(view: torch.Tensor) -> int:
    return math.prod(view.shape[1:]) * view.element_size()


def _is_run(blocks: torch.Tensor) -> bool:
    return bool((blocks[1:] - blocks[:-1] == 1).all())


def widen(view: torch.Tensor, leading: int) -> torch.Tensor:
    """The same memory in the widest words that its payload, the dimensions after ``leading``, allows."""
    if view.dim() > leading:
        for dtype in _WIDER_WORDS:
            if dtype.itemsize > view.element_size():
                try:
                    return view.view(dtype)
                except RuntimeError:
                    # Strides, offset or length do not divide: torch knows all the conditions.
                    continue
    return view


def _stacks(views: Sequence[torch.Tensor], number_types: Sequence[torch.dtype]) -> Iterator[Stack]:
    alike: dict[object, list[int]] = {}
    for part, view in enumerate(views):
        storage = view.untyped_storage().data_ptr()
        key = (storage, view.dtype, view.shape, view.stride(), number_types[part])
        alike.setdefault(key, []).append(part)
    for members in alike.values():
        members.sort(key=lambda part: views[part].storage_offset())
        for parts, inner, strides in _grids(members, [int(views[part].storage_offset()) for part in members]):
            view = views[parts[0]]
            yield Stack(
                parts=parts,
                view=view.as_strided(
                    (len(parts) // inner, inner, *view.shape), (*strides, *view.stride()), view.storage_offset()
                ),
                number_type=number_types[parts[0]],
                num_bytes=math.prod(view.shape[2:]) * view.element_size(),
            )


def _grids(parts: list[int], offsets: list[int]) -> Iterator[tuple[tuple[int, ...], int, tuple[int, int]]]:
    """Ascending offsets as grids of two distances: parts, how many stand in a row, and the two distances."""
    count = len(offsets)
    near = offsets[1] - offsets[0] if count > 1 else 0
    inner = 1
    while inner < count and offsets[inner] - offsets[inner - 1] == near:
        inner += 1
    far = offsets[inner] - offsets[0] if inner < count else 0
    grid = [outer * far + index * near + offsets[0] for outer in range(count // inner) for index in range(inner)]
    if count % inner or grid != offsets:
        for part in parts:
            yield (part,), 1, (0, 0)
        return
    yield tuple(parts), inner, (far, near)


def _multiplies_exactly(keys: Sequence[torch.Tensor]) -> bool:
    """Whether this CPU's product of bytes is exact: without VNNI some libraries saturate sums of 16 bits."""
    width = keys[0].shape[0]
    extremes = torch.tensor([-128, 127, -1, 1], dtype=torch.int8)[:, None].expand(4, width)
    signed = torch.where(keys[0].view(1, -1) > 0, extremes, -1 - extremes)
    rows = torch.cat([extremes, signed, signed.roll(1, 1)]).repeat(4, 1).contiguous()
    for column in keys:
        exact = rows.to(torch.int32) @ column.to(torch.int32)
        try:
            product = torch._int_mm(rows, column)
        except RuntimeError:
            return False
        if not torch.equal(product, exact):
            return False
    return True
