"""The vocabulary of the case language: what a case consists of once it has been read.

Field names are those of the language where Python allows them. What each operation means is said in
:mod:`kvcanary_agent.faults.language`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvcanary_agent.canary import Kind

from .dtypes import DTYPES, NumberFormat

Part = Literal["k", "v"]
PARTS: tuple[Part, ...] = ("k", "v")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share a block table, and the window of their attention in tokens (None: full attention)."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The pool of a case. Every group of layers has ``blocks`` blocks of its own; heads are those of one rank."""

    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    null_block: int | None
    ranks: int
    groups: tuple[LayerGroup, ...]

    @property
    def format(self) -> NumberFormat:
        return DTYPES[self.dtype]

    @property
    def num_slots(self) -> int:
        """Slots of each group."""
        return self.blocks * self.block_size

    @property
    def payload_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer of one rank."""
        return self.kv_heads * self.head_dim * self.format.size

    @property
    def num_bytes(self) -> int:
        """Bytes of the pools of all ranks."""
        layers = sum(len(group.layers) for group in self.groups)
        return self.ranks * layers * len(PARTS) * self.num_slots * self.payload_bytes

    def group_of(self, layer: int) -> int:
        return next(index for index, group in enumerate(self.groups) if layer in group.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    req: str
    prompt: tuple[int, ...]
    namespace: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alloc:
    req: str
    blocks: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    req: str
    blocks: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    req: str
    index: int
    block: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeRequest:
    req: str
    cached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeBlocks:
    blocks: tuple[int, ...]
    cached: bool
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a forward; None where the engine's own computation stands."""

    req: str
    tokens: tuple[int, ...]
    start: int | None
    positions: tuple[int, ...] | None
    slots: tuple[int, ...] | None
    drop: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One step. ``group`` is the group that ``slots``, ``drop`` and ``pad`` concern; all groups are computed."""

    batch: tuple[Row, ...]
    pad: tuple[int, ...]
    pad_value: Literal["finite", "nan"]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayWrite:
    of: int
    req: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Poke:
    """Bytes change: ``xor`` of single bytes, or the whole payload of the slot becomes ``value``."""

    block: int
    offset: int
    layer: int
    part: Part
    xor: tuple[tuple[int, int], ...]
    value: Literal["nan", "zero"] | None
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBlock:
    source: int
    destination: int
    fraction: float
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBegin:
    key: str
    blocks: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEnd:
    key: str
    blocks: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``layers`` and ``rank`` are None where all layers and all ranks get their bytes."""

    key: str
    req: str
    blocks: tuple[int, ...]
    layers: tuple[int, ...] | None
    rank: int | None
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    key_tokens: tuple[int, ...]
    block: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    req: str
    to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    pass


Operation = (
    Request
    | Alloc
    | Share
    | Map
    | FreeRequest
    | FreeBlocks
    | Forward
    | ReplayWrite
    | Poke
    | CopyBlock
    | StoreBegin
    | StoreEnd
    | Load
    | Index
    | Rollback
    | Epoch
    | Sweep
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A report of one of ``kinds`` must first appear during operations ``first`` to ``last``, both included.

    Attributes:
        slots: Slots that reports must name, all of them; empty if it does not matter.
        req: The request that the reports must name; None if it does not matter.
    """

    kinds: frozenset[Kind]
    first: int
    last: int
    slots: frozenset[int]
    req: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case; without expectations nothing at all may be reported."""

    id: str
    geometry: Geometry
    operations: tuple[Operation, ...]
    expectations: tuple[Expectation, ...]
