"""From entries of the device's ring to reports that name requests, layers and causes' evidence."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence

from kvcanary_agent.kernels.plan import Fault
from kvcanary_agent.kernels.ring import Field

from .layout import KVLayout
from .ownership import Misuse, Ownership
from .violation import Kind, Sink, Violation

# How much the host remembers, for reports only; checks do not depend on it.
_REMEMBERED = 1 << 16

_KIND_OF_FAULT = {
    Fault.WRITE_ADDRESS: Kind.ADDRESS,
    Fault.WRITE_NOT_HELD: Kind.OWNERSHIP,
    Fault.WRITE_TWICE: Kind.OWNERSHIP,
    Fault.WRITE_SHARED: Kind.OWNERSHIP,
    Fault.WRITE_POSITION: Kind.POSITION,
    Fault.WRITE_TOKEN: Kind.TOKEN,
    Fault.PAD_OUTSIDE: Kind.ADDRESS,
    Fault.PAD_LIVE: Kind.WILD_WRITE,
    Fault.READ_ADDRESS: Kind.ADDRESS,
    Fault.READ_NOT_HELD: Kind.OWNERSHIP,
    Fault.UNWRITTEN: Kind.UNWRITTEN,
    Fault.POSITION: Kind.POSITION,
    Fault.TOKEN: Kind.TOKEN,
    Fault.CHAIN: Kind.CHAIN,
    Fault.CONTENT: Kind.CONTENT,
    Fault.LOST_WRITE: Kind.LOST_WRITE,
    Fault.NONFINITE: Kind.NONFINITE,
    Fault.TRANSFER: Kind.TRANSFER,
}
_DETAIL_OF_FAULT = {
    Fault.WRITE_NOT_HELD: "the writing request does not hold the block",
    Fault.WRITE_TWICE: "two requests of one step write different tokens to the slot",
    Fault.WRITE_SHARED: "another token is written over one that other requests hold, without copy on write",
    Fault.READ_NOT_HELD: "the reading request does not hold the block",
    Fault.PAD_OUTSIDE: "padding writes outside the null block",
    Fault.PAD_LIVE: "padding writes over a live slot",
}
_WRITE_FAULTS = (Fault.WRITE_ADDRESS, Fault.WRITE_POSITION, Fault.WRITE_TOKEN)
_TOKEN_FAULTS = (Fault.TOKEN, Fault.WRITE_TOKEN, Fault.WRITE_SHARED, Fault.WRITE_TWICE)
_HASH_FAULTS = (Fault.CHAIN, Fault.CONTENT, Fault.TRANSFER)
_VALUELESS_FAULTS = (Fault.LOST_WRITE, Fault.NONFINITE, Fault.WRITE_NOT_HELD, Fault.READ_NOT_HELD)


class _Recent(OrderedDict[tuple[object, ...], None]):
    """A set that forgets its oldest members."""

    def add(self, key: tuple[object, ...]) -> bool:
        """Whether the key is new."""
        new = key not in self
        self[key] = None
        self.move_to_end(key)
        if len(self) > _REMEMBERED:
            self.popitem(last=False)
        return new


class Reporter:
    """Gives requests and namespaces the numbers that records hold, and turns faults back into words.

    A fault is handed to the sink once for each slot, part, reader and write: a slot that stays broken is not
    reported again each step.
    """

    def __init__(self, layout: KVLayout, ownership: Sequence[Ownership], sink: Sink, reveal_tokens: bool) -> None:
        self._layout = layout
        self._ownership = ownership
        self._sink = sink
        self._reveal_tokens = reveal_tokens
        self._token_key = secrets.token_bytes(16)
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._names: dict[int, str] = {}
        self._next_number = 1
        self._anchors: dict[tuple[str | None, int], int] = {}
        self._anchor_of_number: list[tuple[str | None, int]] = []
        self._reported = _Recent()
        self._bad_transfers = _Recent()
        self._since_last_take: list[Violation] = []

    def number_of(self, request: str) -> int:
        """The request's number, from 1."""
        number = self._numbers.get(request)
        if number is not None:
            self._numbers.move_to_end(request)
            return number
        number = self._numbers[request] = self._next_number
        self._names[number] = request
        self._next_number += 1
        if len(self._numbers) > _REMEMBERED:
            _, forgotten = self._numbers.popitem(last=False)
            del self._names[forgotten]
        return number

    def name_of(self, number: int) -> str | None:
        """The request of a number, if it is remembered."""
        return self._names.get(number)

    def anchor_of(self, namespace: str | None, epoch: int) -> int:
        """The number of the pair that a chain starts from, from 0."""
        key = (namespace, epoch)
        number = self._anchors.get(key)
        if number is None:
            number = self._anchors[key] = len(self._anchor_of_number)
            self._anchor_of_number.append(key)
        return number

    def anchor(self, number: int) -> tuple[str | None, int]:
        """The (namespace, epoch) of a number."""
        return self._anchor_of_number[number]

    def faults(self, entries: list[list[int]]) -> None:
        """Report entries of the ring."""
        for entry in entries:
            self._fault(entry)

    def misuses(self, group: int, step: int, misuses: Sequence[Misuse]) -> None:
        """Report what an allocator did against its own rules."""
        described = self._layout.groups[group]
        for misuse in misuses:
            self.report(
                Violation(
                    kind=Kind.OWNERSHIP,
                    pool=self._layout.pool,
                    group=described.name,
                    slot=misuse.block * described.block_size,
                    block=misuse.block,
                    offset=0,
                    step=step,
                    request=misuse.request,
                    writer=misuse.other,
                    block_history=self._ownership[group].history(misuse.block),
                    detail=misuse.detail,
                )
            )

    def report(self, violation: Violation) -> None:
        """Hand a violation to the sink and keep it for `take`."""
        self._since_last_take.append(violation)
        self._sink.violation(violation)

    def take(self) -> tuple[Violation, ...]:
        """What has been reported since the last call."""
        taken, self._since_last_take = tuple(self._since_last_take), []
        return taken

    def _fault(self, entry: list[int]) -> None:
        fault = Fault(entry[Field.KIND])
        at = (entry[Field.GROUP], entry[Field.SLOT], entry[Field.WRITTEN_STEP])
        if fault is Fault.TRANSFER:
            self._bad_transfers.add(at)
        outside = entry[Field.FOUND] if entry[Field.SLOT] < 0 else None
        # A wrong write is an act of its step; everything else is a state that lasts.
        moment = entry[Field.STEP] if fault in _WRITE_FAULTS else None
        if self._reported.add((fault, *at, entry[Field.PART], entry[Field.OWNER], outside, moment)):
            self.report(self.decode(entry))

    def decode(self, entry: list[int]) -> Violation:
        """One entry of the ring as a violation."""
        fault = Fault(entry[Field.KIND])
        group = self._layout.groups[entry[Field.GROUP]]
        slot, written = entry[Field.SLOT], entry[Field.WRITTEN_STEP]
        block, offset = divmod(slot, group.block_size) if slot >= 0 else (-1, -1)
        part = group.parts[entry[Field.PART]] if entry[Field.PART] >= 0 else None
        shown = fault not in _VALUELESS_FAULTS
        return Violation(
            kind=self._kind(fault, entry),
            pool=self._layout.pool,
            group=group.name,
            slot=slot,
            block=block,
            offset=offset,
            step=entry[Field.STEP],
            request=self._names.get(entry[Field.OWNER]),
            position=entry[Field.POSITION] if entry[Field.POSITION] >= 0 else None,
            layer=part.layer if part else None,
            part=part.part if part else None,
            expected=self._show(fault, entry[Field.EXPECTED]) if shown else None,
            found=self._show(fault, entry[Field.FOUND]) if shown else None,
            writer=self._names.get(entry[Field.WRITER]),
            written_step=written or None,
            recorded_position=entry[Field.RECORDED_POSITION] if written else None,
            block_history=self._ownership[entry[Field.GROUP]].history(block),
            detail=_DETAIL_OF_FAULT.get(fault, ""),
        )

    def _kind(self, fault: Fault, entry: list[int]) -> Kind:
        if fault is Fault.ANCHOR:
            wanted, found = self.anchor(entry[Field.EXPECTED]), self.anchor(entry[Field.FOUND])
            return Kind.NAMESPACE if wanted[0] != found[0] else Kind.EPOCH
        at = (entry[Field.GROUP], entry[Field.SLOT], entry[Field.WRITTEN_STEP])
        if fault is Fault.CONTENT and at in self._bad_transfers:
            return Kind.TRANSFER
        return _KIND_OF_FAULT[fault]

    def _show(self, fault: Fault, value: int) -> str:
        if fault in _TOKEN_FAULTS:
            return self._show_token(value)
        if fault is Fault.ANCHOR:
            namespace, epoch = self.anchor(value)
            return f"namespace {'none' if namespace is None else self._hash(namespace.encode())}, epoch {epoch}"
        if fault in _HASH_FAULTS:
            return f"{value & (2**64 - 1):016x}"
        return str(value)

    def _show_token(self, token: int) -> str:
        if token < 0:
            return "none"
        if self._reveal_tokens:
            return str(token)
        return f"hash:{self._hash(token.to_bytes(8, 'little'))}"

    def _hash(self, data: bytes) -> str:
        return hashlib.blake2b(data, digest_size=4, key=self._token_key).hexdigest()
