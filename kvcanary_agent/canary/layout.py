"""Where the bytes of every slot are, whatever the engine's pool looks like."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


class LayoutError(ValueError):
    """A pool that the canary cannot describe; the message names the part, what was found and what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVPart:
    """One layer's K, V or scales, seen as one payload per slot.

    Attributes:
        layer: The engine's own name of the layer.
        part: What the payload is: ``"k"``, ``"v"``, ``"kv"`` where they cannot be told apart (MLA latents, packed
            pages), or ``"k_scale"`` / ``"v_scale"`` for the scales of a quantised cache.
        view: A view of the engine's tensor, never a copy, of shape ``[num_blocks, block_size, *payload]``: element
            ``[b, o]`` is everything that slot ``b * block_size + o`` holds of this part. Any strides, any dtype.
            ``payload`` may be empty (one scale per slot).
        number_type: What the bytes mean as numbers, where the tensor's dtype does not say (an fp8 cache kept as
            uint8); None: the dtype of ``view``.
    """

    layer: str
    part: str
    view: torch.Tensor
    number_type: torch.dtype | None = None

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.part}"

    @property
    def bytes_per_slot(self) -> int:
        """Payload bytes of one slot."""
        return self.view[0, 0].numel() * self.view.element_size()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVGroup:
    """Layers that share one block table.

    Attributes:
        name: Short name for reports, for example ``"full"`` or ``"sliding_window"``.
        block_size: Slots per block.
        parts: Every part of every layer of the group, in layer order.
        null_block: The block that padding points at and that no request owns, if the engine has one.
        window: A sliding window's length in tokens: a query at position p reads positions p - window + 1 to p.
            None for full attention.
    """

    name: str
    block_size: int
    parts: tuple[KVPart, ...]
    null_block: int | None = None
    window: int | None = None

    @property
    def num_blocks(self) -> int:
        return self.parts[0].view.shape[0]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def bytes_per_slot(self) -> int:
        return sum(part.bytes_per_slot for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].view.device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVLayout:
    """A pool as an adapter describes it, checked when it is made.

    Attributes:
        engine: The engine's name, for example ``"vllm"``.
        engine_version: Its version, or ``""``.
        pool: Name of this pool within the process, for reports.
        groups: At least one group.
        rank: Tensor-parallel rank of this process, and ``world_size`` of how many.
        reports_ownership: The adapter tells of every block allocated to, shared with and freed by a request, with
            the request's name; then a block that a request uses without holding it is a violation.
        reports_occupancy: The adapter tells of every block that the allocator hands out and takes back, but not to
            whom; then a block that a request uses while it is free is a violation.
        not_covered: Layers (or other parts of the pool) that are left out, with the reason; they appear in the
            coverage that the agent reports.

    Raises:
        LayoutError: If the views disagree with each other or cannot be read.
    """

    engine: str
    groups: tuple[KVGroup, ...]
    engine_version: str = ""
    pool: str = "kv"
    rank: int = 0
    world_size: int = 1
    reports_ownership: bool = False
    reports_occupancy: bool = False
    not_covered: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError(f"pool {self.pool!r} of {self.engine} has no groups of layers")
        for group in self.groups:
            _check_group(self.pool, group)

    @property
    def num_bytes(self) -> int:
        """Bytes that all parts of all slots take."""
        return sum(group.bytes_per_slot * group.num_slots for group in self.groups)

    @property
    def device(self) -> torch.device:
        return self.groups[0].device


def _check_group(pool: str, group: KVGroup) -> None:
    where = f"group {group.name!r} of pool {pool!r}"
    if not group.parts:
        raise LayoutError(f"{where} has no parts; a group needs at least one layer")
    if group.block_size < 1:
        raise LayoutError(f"{where} has block_size {group.block_size}; it must be at least 1")
    first = group.parts[0].view
    for part in group.parts:
        view = part.view
        if view.dim() < 2 or view.shape[1] != group.block_size:
            raise LayoutError(
                f"{part.name} in {where}: view has shape {tuple(view.shape)}, "
                f"wanted [num_blocks, block_size={group.block_size}, ...]"
            )
        if view.shape[0] != first.shape[0]:
            raise LayoutError(f"{part.name} in {where}: {view.shape[0]} blocks, but {first.shape[0]} in the first part")
        if view.device != first.device:
            raise LayoutError(f"{part.name} in {where} is on {view.device}, the first part on {first.device}")
        if view.device.type == "meta":
            raise LayoutError(f"{part.name} in {where} is on the meta device: it has no bytes to check")
        if view.layout is not torch.strided:
            raise LayoutError(f"{part.name} in {where} has layout {view.layout}, wanted a strided tensor")
        if view.numel() == 0:
            raise LayoutError(f"{part.name} in {where} is empty: shape {tuple(view.shape)}")
        if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.stride(), strict=True)):
            raise LayoutError(f"{part.name} in {where} is an expanded view (stride 0): slots share their bytes")
    if group.null_block is not None and not 0 <= group.null_block < group.num_blocks:
        raise LayoutError(f"{where}: null_block {group.null_block} is outside its {group.num_blocks} blocks")
    if group.window is not None and group.window < 1:
        raise LayoutError(f"{where}: window {group.window}; it must be at least 1 token, or None")
