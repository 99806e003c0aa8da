"""Fingerprints of whole blocks, byte after byte as they lie in memory.

Slots of a block may be scattered over it (keys transposed, heads before tokens); its bytes, in the order of their
addresses, are read at the memory's speed. Such a fingerprint says nothing by itself: it is taken of a block whose slots
have just been compared one by one, or written, and then tells whether a byte of the block has changed since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcanary_agent.kernels.records import Records

from .fingerprint import Fingerprinter, widen
from .memory import numbers_in

_RUN_BYTES = 4 << 20
"""Bytes at a time where they need not be gathered: few calls, and both products find them in the last cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Image:
    """Parts of a block whose bytes are fingerprinted together.

    Attributes:
        parts: Their indexes.
        view: ``[blocks, *runs]``: every byte of the parts once, in the order of their addresses.
        num_bytes: Of one block.
    """

    parts: tuple[int, ...]
    view: torch.Tensor
    num_bytes: int


class BlockPrints:
    """What whole blocks looked like when last their slots were known to be what the records say.

    A block is remembered only while every slot of it has a fingerprint that its bytes had then; whoever writes to the
    block, or puts other records in the place of its own, makes it forgotten.
    """

    def __init__(self, records: Records, fingerprinter: Fingerprinter) -> None:
        self._records, self._fingerprinter = records, fingerprinter
        self._parts = images_of_parts(records.views)
        self._images = self._parts
        self._image_of_part = list(range(len(self._images)))
        self._columns = list(records.block_prints.unbind(1))
        # What nobody knows anything of: the prints of one block.
        self._nothing = bytes(records.block_prints.element_size() * records.block_prints.shape[1])
        self._octets = numbers_in(records.block_prints).cast("B")
        self._numbers_of: dict[tuple[int, int], torch.Tensor | None] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of scratch."""
        return self._records.block_prints.numel() * self._records.block_prints.element_size()

    def join_neighbours(self) -> None:
        """Fingerprint together what lies side by side, as all of it is read at every step."""
        images = images_of_neighbours(self._records.views)
        if len(images) == len(self._images):
            return
        self._images = images
        for index, image in enumerate(images):
            # What was known of another image under this number looks like a change, and is compared slot by slot.
            for part in image.parts:
                self._image_of_part[part] = index

    def remember(self, blocks: torch.Tensor, part: int | None = None) -> None:
        """All slots of these blocks, ``[n]`` int64, hold what the records say: in all parts, or in one."""
        if not blocks.numel():
            return
        for index, image in enumerate(self._images):
            if part is None or image.parts == (part,):
                self._columns[index].index_copy_(0, blocks, self._prints(image, blocks))

    def remember_written(self, slots: torch.Tensor) -> None:
        """The step has written, and recorded, ``[n]`` slots: the blocks that consist of nothing else are known."""
        records = self._records
        written = torch.zeros(records.num_slots, dtype=torch.bool).index_fill_(0, slots, True)
        self.remember(written.view(-1, records.block_size).all(1).nonzero().view(-1))

    def changed(self, part: int, blocks: torch.Tensor) -> torch.Tensor | None:
        """Which of ``[n]`` blocks are not known to be as they were: their indexes, int64; None if all are."""
        index = self._image_of_part[part]
        kept = self._columns[index].index_select(0, blocks)
        known = kept != 0
        # A gather for nothing is more than one for some.
        if not bool(known.any()):
            return torch.arange(blocks.shape[0])
        found = self._prints(self._images[index], blocks)
        if torch.equal(found, kept) and bool(known.all()):
            return None
        return (found == kept).logical_and_(known).logical_not_().nonzero().view(-1)

    def changed_in_any_part(self, blocks: torch.Tensor) -> torch.Tensor | None:
        """As `changed`, of all parts: a mask, ``[all blocks]`` bool."""
        changed = torch.zeros(self._records.num_blocks, dtype=torch.bool).index_fill_(0, blocks, True)
        blocks = changed.nonzero().view(-1)
        kept = self._records.block_prints[:, : len(self._images)].index_select(0, blocks).t()
        known = (kept != 0).all(0)
        if not bool(known.all()):
            blocks, kept = blocks[known], kept[:, known]
        same = torch.ones_like(blocks, dtype=torch.bool)
        if blocks.numel():
            runs = _runs(blocks)
            # The last layers first: what is looked at last, the forward finds in the cache when it begins.
            for index in reversed(range(len(self._images))):
                same.logical_and_(self._prints(self._images[index], blocks, runs) == kept[index])
        changed.index_copy_(0, blocks, same.logical_not_())
        return changed if bool(changed.any()) else None

    def forget(self, blocks: Iterable[int]) -> None:
        """As `Records.forget_block_prints`, of a few."""
        row = len(self._nothing)
        for block in blocks:
            self._octets[block * row : block * row + row] = self._nothing

    def is_finite(self, part: int, block: int) -> bool:
        """Whether the sum of one part's numbers in a block is finite; False is no verdict."""
        if (part, block) not in self._numbers_of:
            self._numbers_of[part, block] = self._numbers_in(part, block)
        numbers = self._numbers_of[part, block]
        if numbers is None:
            return False
        return math.isfinite(numbers.sum(dtype=None if numbers.dtype.itemsize > 2 else torch.float32).item())

    def _numbers_in(self, part: int, block: int) -> torch.Tensor | None:
        number_type = self._records.number_types[part]
        if not number_type.is_floating_point or number_type.itemsize < 2:
            return None
        try:
            return self._parts[part].view[block].view(number_type)
        except RuntimeError:
            # Its words are narrower than the numbers, and lie apart.
            return None

    def _prints(self, image: Image, blocks: torch.Tensor, runs: list[tuple[int, int]] | None = None) -> torch.Tensor:
        """The fingerprint of each of ``[n]`` ascending or unordered blocks: ``[n]`` int64."""
        view, length = image.view, image.num_bytes
        if view.dim() == 2 and view.is_contiguous():
            runs = runs or _runs(blocks)
            if runs is not None:
                flat = view.view(-1).view(torch.uint8).view(-1, length)
                step = max(1, _RUN_BYTES // length)
                pieces = [
                    self._fingerprinter.of_rows(flat[start : min(start + step, end)])
                    for begin, end in runs
                    for start in range(begin, end, step)
                ]
                return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self._fingerprinter.of_gathered(view, length, blocks)


def images_of_parts(views: Sequence[torch.Tensor]) -> list[Image]:
    """One image for each part, ``[blocks, block_size, *payload]`` in words."""
    return [_image((part,), view) for part, view in enumerate(views)]


def images_of_neighbours(views: Sequence[torch.Tensor]) -> list[Image]:
    """As few images as there are pieces of memory without a gap: parts that are interleaved in a block share one."""
    alike: dict[tuple[int, torch.dtype, int, int], list[int]] = {}
    for part, view in enumerate(views):
        key = (view.untyped_storage().data_ptr(), view.dtype, view.shape[0], view.stride(0))
        alike.setdefault(key, []).append(part)
    images = []
    for parts in alike.values():
        for neighbours in _overlapping(parts, views):
            begin = min(views[part].storage_offset() for part in neighbours)
            length = max(_end(views[part]) for part in neighbours) - begin
            if len(neighbours) > 1 and length == sum(views[part][0].numel() for part in neighbours):
                first = views[neighbours[0]]
                whole = first.as_strided((first.shape[0], length), (first.stride(0), 1), begin)
                images.append(_image(tuple(neighbours), whole))
            else:
                images += [_image((part,), views[part]) for part in neighbours]
    return sorted(images, key=lambda image: image.parts)


def _runs(blocks: torch.Tensor) -> list[tuple[int, int]] | None:
    """The runs of neighbours that blocks consist of, if they are long."""
    ends = (blocks[1:] - blocks[:-1] != 1).nonzero().view(-1)
    if ends.shape[0] * 4 > blocks.shape[0]:
        return None
    lasts = [*ends.tolist(), blocks.shape[0] - 1]
    numbers = blocks.tolist()
    firsts = [0, *(last + 1 for last in lasts[:-1])]
    return [(numbers[first], numbers[last] + 1) for first, last in zip(firsts, lasts, strict=True)]


def _overlapping(parts: list[int], views: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Parts whose bytes within a block lie between each other's."""
    together: list[int] = []
    end = 0
    for part in sorted(parts, key=lambda part: int(views[part].storage_offset())):
        if together and views[part].storage_offset() >= end:
            yield together
            together = []
        together.append(part)
        end = max(end, _end(views[part]))
    yield together


def _end(view: torch.Tensor) -> int:
    """Where the view of the first block ends in its storage."""
    spans = ((size - 1) * stride for size, stride in zip(view.shape[1:], view.stride()[1:], strict=True))
    return int(view.storage_offset()) + sum(spans) + 1


def _image(parts: tuple[int, ...], view: torch.Tensor) -> Image:
    dims = sorted(
        ((size, stride) for size, stride in zip(view.shape[1:], view.stride()[1:], strict=True) if size > 1),
        key=lambda dim: -dim[1],
    )
    merged: list[tuple[int, int]] = []
    for size, stride in reversed(dims):
        if merged and stride == merged[0][0] * merged[0][1]:
            merged[0] = (merged[0][0] * size, merged[0][1])
        else:
            merged.insert(0, (size, stride))
    merged = merged or [(1, 1)]
    ordered = view.as_strided(
        (view.shape[0], *(size for size, _ in merged)),
        (view.stride(0), *(stride for _, stride in merged)),
        view.storage_offset(),
    )
    return Image(parts=parts, view=widen(ordered, 1), num_bytes=view[0].numel() * view.element_size())
