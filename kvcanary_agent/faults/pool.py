"""The embedded pool: the bytes of all keys and values of one rank, and the model that writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcanary_agent.canary import KVGroup, KVLayout, KVPart

from . import operations as ops


def token_contexts(
    history: Sequence[int | None],
    tokens: Sequence[int],
    positions: Sequence[int],
    *,
    namespace: str | None,
    epoch: int,
) -> tuple[bytes, ...]:
    """What each new token's K and V depend on beside layer, part and rank, as one digest per token.

    That is the token, its position, all tokens before it, the namespace and the epoch.

    Args:
        history: The request's tokens before the first new one, None where unknown.
        tokens, positions: The new tokens and where the model takes them to stand.
    """
    chain = hashlib.blake2b(repr((namespace, epoch)).encode(), digest_size=16)
    for token in history:
        chain.update(repr(token).encode() + b",")
    contexts = []
    for token, position in zip(tokens, positions, strict=True):
        chain.update(repr(token).encode() + b",")
        own = chain.copy()
        own.update(repr(position).encode())
        contexts.append(own.digest())
    return tuple(contexts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredBlocks:
    """Blocks in another tier: for each (layer, part) of their group ``[blocks, block_size, bytes]`` uint8."""

    payloads: dict[tuple[int, ops.Part], torch.Tensor]


class EmbeddedPool:
    """One rank's pool. Slots as in the case language: -1 is skipped, other negative ones wrap around."""

    def __init__(self, geometry: ops.Geometry, rank: int) -> None:
        self._geometry = geometry
        self._rank = rank
        shape = (geometry.blocks, geometry.block_size, geometry.kv_heads, geometry.head_dim)
        dtype = getattr(torch, geometry.dtype)
        layers = range(sum(len(group.layers) for group in geometry.groups))
        self._tensors = {(layer, part): torch.zeros(shape, dtype=dtype) for layer in layers for part in ops.PARTS}
        # [blocks, block_size, bytes] of the same memory.
        self._bytes = {key: tensor.view(torch.uint8).flatten(2) for key, tensor in self._tensors.items()}

    def layout(self) -> KVLayout:
        """The pool as an adapter describes it; layers are named ``"0"``, ``"1"``, ..."""
        groups = tuple(
            KVGroup(
                name=f"group{index}",
                block_size=self._geometry.block_size,
                parts=tuple(
                    KVPart(layer=str(layer), part=part, view=self._tensors[layer, part])
                    for layer, part in self._parts(index)
                ),
                null_block=self._geometry.null_block,
                window=group.window,
            )
            for index, group in enumerate(self._geometry.groups)
        )
        return KVLayout(
            engine="embedded",
            groups=groups,
            rank=self._rank,
            world_size=self._geometry.ranks,
            reports_ownership=True,
        )

    def _parts(self, group: int) -> list[tuple[int, ops.Part]]:
        return [(layer, part) for layer in self._geometry.groups[group].layers for part in ops.PARTS]

    def write(self, group: int, slots: Sequence[int], contexts: Sequence[bytes]) -> None:
        """Write the K and V of one token to each slot, in the group's layers; see :func:`token_contexts`."""
        for slot, context in zip(slots, contexts, strict=True):
            at = self._place(slot)
            if at is None:
                continue
            for layer, part in self._parts(group):
                self._bytes[layer, part][at] = self._as_tensor(self._numbers(context, layer, part))

    def write_garbage(self, group: int, slots: Sequence[int], value: str, seed: int) -> None:
        """Write what padded rows compute: numbers that mean nothing, or NaN. ``seed`` tells one step from another."""
        for row, slot in enumerate(slots):
            at = self._place(slot)
            if at is None:
                continue
            for layer, part in self._parts(group):
                octets = self._nan() if value == "nan" else self._numbers(repr((seed, row)).encode(), layer, part)
                self._bytes[layer, part][at] = self._as_tensor(octets)

    def poke(self, poke: ops.Poke) -> None:
        payload = self._bytes[poke.layer, poke.part][poke.block, poke.offset]
        if poke.value == "zero":
            payload.zero_()
        elif poke.value == "nan":
            payload.copy_(self._as_tensor(self._nan()))
        for byte, mask in poke.xor:
            payload[byte] ^= mask

    def copy_block(self, copy: ops.CopyBlock) -> None:
        """Copy a block layer by layer, K before V; of all those bytes the first ``fraction`` arrive."""
        parts = self._parts(copy.group)
        block_bytes = self._geometry.block_size * self._geometry.payload_bytes
        arriving = int(copy.fraction * len(parts) * block_bytes)
        for part in parts:
            count = max(0, min(block_bytes, arriving))
            arriving -= count
            source, destination = (self._bytes[part][block].view(-1) for block in (copy.source, copy.destination))
            destination[:count] = source[:count].clone()

    def store(self, group: int, blocks: Sequence[int]) -> StoredBlocks:
        """Copy blocks to another tier."""
        return StoredBlocks(payloads={part: self._bytes[part][list(blocks)].clone() for part in self._parts(group)})

    def load(self, stored: StoredBlocks, blocks: Sequence[int], layers: Sequence[int] | None) -> None:
        """Copy as many stored blocks back, into ``blocks``; only in ``layers``, if there are any given."""
        for (layer, part), payloads in stored.payloads.items():
            if layers is None or layer in layers:
                self._bytes[layer, part][list(blocks)] = payloads[: len(blocks)]

    def _place(self, slot: int) -> tuple[int, int] | None:
        slots = self._geometry.num_slots
        if slot == -1 or not -slots <= slot < slots:
            return None
        return divmod(slot % slots, self._geometry.block_size)

    def _numbers(self, seed: bytes, layer: int, part: str) -> bytes:
        source = hashlib.shake_128(seed + repr((layer, part, self._rank)).encode())
        return self._geometry.format.number_like(source.digest(self._geometry.payload_bytes))

    def _nan(self) -> bytes:
        nan = self._geometry.format.nan
        assert nan is not None, "the language refuses NaN for a dtype that has none"
        return nan * (self._geometry.payload_bytes // len(nan))

    @staticmethod
    def _as_tensor(octets: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(octets), dtype=torch.uint8)
