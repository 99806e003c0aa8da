"""From entries of the device's ring to reports that name requests, layers and causes' evidence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from kvcanary_agent.kernels.hashing import chain_seed
from kvcanary_agent.kernels.plan import Fault
from kvcanary_agent.kernels.ring import Field

from .block_log import BlockLog
from .keyed_hashes import KeyedHashes
from .layout import KVLayout
from .ownership import Misuse, Ownership
from .violation import BlockEvent, Kind, Sink, Violation

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
# In how many blocks' events a report looks between two calls of `take`: it is a search, on the step's thread.
_BLOCKS_LOOKED_UP = 16
_DETAIL_OF_FAULT = {
    Fault.READ_ADDRESS: "the block table names a block outside the pool",
    Fault.WRITE_NOT_HELD: "the writing request does not hold the block",
    Fault.WRITE_TWICE: "two requests of one step write different tokens to the slot",
    Fault.WRITE_SHARED: "another token is written over one that other requests hold, without copy on write",
    Fault.READ_NOT_HELD: "the reading request does not hold the block",
    Fault.PAD_OUTSIDE: "padding writes outside the null block",
    Fault.PAD_LIVE: "padding writes over a live slot",
}
_ACTS = (Fault.WRITE_ADDRESS, Fault.WRITE_POSITION, Fault.WRITE_TOKEN, Fault.PAD_OUTSIDE, Fault.PAD_LIVE)
_READ_FAULTS = (
    Fault.READ_NOT_HELD,
    Fault.UNWRITTEN,
    Fault.POSITION,
    Fault.TOKEN,
    Fault.SEED,
    Fault.CHAIN,
    Fault.CONTENT,
)
_TOKEN_FAULTS = (Fault.TOKEN, Fault.WRITE_TOKEN, Fault.WRITE_SHARED, Fault.WRITE_TWICE)
_HASH_FAULTS = (Fault.CHAIN, Fault.CONTENT, Fault.TRANSFER)
_VALUELESS_FAULTS = (Fault.LOST_WRITE, Fault.NONFINITE, Fault.WRITE_NOT_HELD, Fault.READ_NOT_HELD)


class Recent(OrderedDict[Hashable, None]):
    """A set that forgets its oldest members."""

    def add(self, key: Hashable) -> bool:
        """Whether the key is new."""
        new = key not in self
        self[key] = None
        self.move_to_end(key)
        if len(self) > _REMEMBERED:
            self.popitem(last=False)
        return new


class Reporter(KeyedHashes):
    """Gives requests and namespaces the numbers that records hold, and turns faults back into words.

    A fault is handed to the sink once for each slot, part, reader and write: a slot that stays broken is not
    reported again each step.
    """

    def __init__(
        self,
        layout: KVLayout,
        ownership: Sequence[Ownership],
        logs: Sequence[BlockLog],
        sink: Sink,
        reveal_tokens: bool,
    ) -> None:
        super().__init__(reveal_tokens)
        self.reports_ownership = layout.reports_ownership
        self._layout = layout
        self._ownership = ownership
        self._logs = logs
        self._looked_up: dict[tuple[int, int], tuple[BlockEvent, ...]] = {}
        self._sink = sink
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._names: dict[int, str] = {}
        self._next_number = 1
        self._seeds: OrderedDict[int, tuple[str | None, int]] = OrderedDict()
        self._reported = Recent()
        # Slots whose bytes are known to be wrong since a transfer, or since padding was written over them.
        self._kind_of_damage: OrderedDict[Hashable, Kind] = OrderedDict()
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

    def seed_of(self, namespace: str | None, epoch: int) -> int:
        """The chain before position 0."""
        seed = chain_seed(namespace, epoch)
        self._seeds[seed] = (namespace, epoch)
        self._seeds.move_to_end(seed)
        if len(self._seeds) > _REMEMBERED:
            self._seeds.popitem(last=False)
        return seed

    def epoch_of(self, seed: int) -> int | None:
        """The epoch that a chain starts from, if its seed is remembered."""
        return self._seeds[seed][1] if seed in self._seeds else None

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
                    block_events=self._events(group, misuse.block),
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
        self._looked_up.clear()
        return taken

    def _fault(self, entry: list[int]) -> None:
        fault = Fault(entry[Field.KIND])
        at = (entry[Field.GROUP], entry[Field.SLOT], entry[Field.WRITTEN_STEP])
        if fault in (Fault.TRANSFER, Fault.PAD_LIVE):
            self._kind_of_damage[at] = _KIND_OF_FAULT[fault]
            if len(self._kind_of_damage) > _REMEMBERED:
                self._kind_of_damage.popitem(last=False)
        outside = entry[Field.FOUND] if entry[Field.SLOT] < 0 else None
        # A wrong write is an act of its step; everything else is a state that lasts.
        moment = entry[Field.STEP] if fault in _ACTS else None
        place = (fault, *at, entry[Field.PART], outside, moment)
        new_place = self._reported.add(place)
        patrol = entry[Field.OWNER] == 0
        if new_place if patrol else self._reported.add((entry[Field.OWNER], place)):
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
            held=self._held(fault),
            block_history=self._ownership[entry[Field.GROUP]].history(block),
            block_events=self._events(entry[Field.GROUP], block),
            detail=self._detail(fault),
        )

    def _events(self, group: int, block: int) -> tuple[BlockEvent, ...]:
        at = (group, block)
        if at not in self._looked_up and block >= 0 and len(self._looked_up) < _BLOCKS_LOOKED_UP:
            self._looked_up[at] = self._logs[group].of(block)
        return self._looked_up.get(at, ())

    def _detail(self, fault: Fault) -> str:
        if self._layout.reports_occupancy and fault in (Fault.WRITE_NOT_HELD, Fault.READ_NOT_HELD):
            return "the request uses a block that is free"
        return _DETAIL_OF_FAULT.get(fault, "")

    def _held(self, fault: Fault) -> bool | None:
        if self._layout.reports_occupancy:
            # A block in use may be anybody's.
            return False if fault is Fault.READ_NOT_HELD else None
        if not self.reports_ownership or fault not in _READ_FAULTS:
            return None
        # Of a read's faults, a block that is not held comes before those that remain.
        return fault is not Fault.READ_NOT_HELD

    def _kind(self, fault: Fault, entry: list[int]) -> Kind:
        if fault is Fault.SEED:
            wanted, found = self._seeds.get(entry[Field.EXPECTED]), self._seeds.get(entry[Field.FOUND])
            return Kind.EPOCH if wanted and found and wanted[0] == found[0] else Kind.NAMESPACE
        at = (entry[Field.GROUP], entry[Field.SLOT], entry[Field.WRITTEN_STEP])
        if fault is Fault.CONTENT:
            return self._kind_of_damage.get(at, Kind.CONTENT)
        return _KIND_OF_FAULT[fault]

    def _show(self, fault: Fault, value: int) -> str:
        if fault in _TOKEN_FAULTS:
            return self.show_token(value)
        if fault is Fault.SEED:
            namespace, epoch = self._seeds.get(value, ("forgotten", None))
            return f"namespace {'none' if namespace is None else self.keyed(namespace.encode())}, epoch {epoch}"
        if fault in _HASH_FAULTS:
            return self.show_hash(value)
        return str(value)
