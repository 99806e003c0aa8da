"""What an engine knows on its host: its requests, their block tables, and how far each is computed.

It decides what an operation means, and which operations make no sense; bytes and the canary are the runner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import operations as ops


class SenselessError(ValueError):
    """An operation that cannot happen in the state it meets, and that the language does not call a fault.

    Attributes:
        field: Which field of the operation is wrong, ``""`` for the operation as a whole.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


@dataclass(slots=True, kw_only=True)
class _RequestState:
    """A request.

    Attributes:
        known: Its tokens, None where nobody knows one (positions that a step skipped).
        computed: How many positions the engine takes for computed.
        tables: For each group the block table that the model reads.
        references: For each group what the allocator has handed out, in order; None where that is no reference (of the
            null block) or was given back when a sliding window had passed the block.
        freed: Whether it has been freed, be it at its end or to be resumed later.
    """

    prompt: tuple[int, ...]
    namespace: str | None
    known: list[int | None]
    computed: int
    tables: list[list[int]]
    references: list[list[int | None]]
    freed: bool = False

    def give_everything_back(self) -> None:
        self.computed = 0
        self.tables = [[] for _ in self.tables]
        self.references = [[] for _ in self.references]
        self.freed = True

    @property
    def may_have_left(self) -> bool:
        """Whether another request may come under the same name."""
        return self.freed and not any(self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """One row of a step, as the engine hands it to the model.

    Attributes:
        start: How many positions the row reads.
        history: The tokens before ``start``, None where unknown.
        tokens, positions: The new tokens.
        tables: For each group the block table.
        slots: For each group the slot that each new token is to be written to.
        landings: The same, -1 where the write gets lost on its way.
        known: All tokens that the request is known to consist of before the step.
    """

    req: str
    namespace: str | None
    start: int
    history: tuple[int | None, ...]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    landings: tuple[tuple[int, ...], ...]
    known: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack:
    """References that one ``free`` gives back; ``req`` is None where the language does not say whose they were."""

    group: int
    blocks: tuple[int, ...]
    req: str | None


@dataclass(slots=True, kw_only=True)
class _Store:
    group: int
    blocks: tuple[int, ...]
    finished: bool = False


@dataclass(slots=True)
class EngineState:
    """All requests of one case. The invariant: nothing here was touched by an operation that raised."""

    geometry: ops.Geometry
    epoch: int = 0
    _requests: dict[str, _RequestState] = field(default_factory=dict)
    _stores: dict[str, _Store] = field(default_factory=dict)
    _rows_of_forward: dict[int, frozenset[str]] = field(default_factory=dict)
    _namespace_of_block: dict[tuple[int, int], str | None] = field(default_factory=dict)

    # Questions, asked before the operation is applied

    def given_back(self, operation: ops.FreeRequest | ops.FreeBlocks) -> tuple[GivenBack, ...]:
        """What the allocator takes back, group by group.

        Raises:
            SenselessError: If the request is unknown.
        """
        if isinstance(operation, ops.FreeBlocks):
            return (GivenBack(group=operation.group, blocks=operation.blocks, req=None),)
        references = self._request(operation.req).references
        return tuple(
            GivenBack(group=group, blocks=tuple(block for block in held if block is not None), req=operation.req)
            for group, held in enumerate(references)
        )

    def namespace_of_block(self, group: int, block: int) -> str | None:
        """The namespace of the request that the block was last handed to as new: what an index entry for it implies."""
        return self._namespace_of_block.get((group, block))

    def blocks_of_reference(self, operation: ops.Share) -> tuple[int, ...]:
        """The blocks of a ``share`` that take a reference; a null block only holds a place."""
        return tuple(block for block in operation.blocks if block != self.geometry.null_block)

    def plan(self, operation: ops.Forward) -> tuple[PlannedRow, ...]:
        """The rows of a step.

        Raises:
            SenselessError: If a request is unknown or its block table is too short.
        """
        seen: set[str] = set()
        rows = []
        for index, row in enumerate(operation.batch):
            where = f"batch[{index}]"
            if row.req in seen:
                raise SenselessError(f"{where}.req", f"a request that is not in the batch yet, found {row.req!r} again")
            seen.add(row.req)
            rows.append(self._plan_row(row, operation.group, where))
        return tuple(rows)

    def _plan_row(self, row: ops.Row, group_of_faults: int, where: str) -> PlannedRow:
        request = self._request(row.req, f"{where}.req")
        size = self.geometry.block_size
        start = request.computed if row.start is None else row.start
        positions = range(start, start + len(row.tokens))
        for group, table in enumerate(request.tables):
            if positions.stop > len(table) * size:
                raise SenselessError(
                    f"{where}.tokens",
                    f"positions below {len(table) * size}, which is what the {len(table)} blocks of {row.req!r} in "
                    f"group {group} hold, found position {positions.stop - 1}",
                )
        for name, override in (("positions", row.positions), ("slots", row.slots)):
            if override is not None and len(override) != len(row.tokens):
                raise SenselessError(
                    f"{where}.{name}", f"one for each of {len(row.tokens)} tokens, found {len(override)}"
                )
        strangers = row.drop.difference(positions)
        if strangers:
            raise SenselessError(
                f"{where}.drop",
                f"positions from {positions.start} to {positions.stop - 1}, which this row writes, "
                f"found {min(strangers)}",
            )
        slots = [
            tuple(table[position // size] * size + position % size for position in positions)
            for table in request.tables
        ]
        if row.slots is not None:
            slots[group_of_faults] = row.slots
        landings = list(slots)
        landings[group_of_faults] = tuple(
            -1 if position in row.drop else slot
            for position, slot in zip(positions, slots[group_of_faults], strict=True)
        )
        return PlannedRow(
            req=row.req,
            namespace=request.namespace,
            start=start,
            history=_padded(request.known, start),
            tokens=row.tokens,
            positions=tuple(positions) if row.positions is None else row.positions,
            tables=tuple(map(tuple, request.tables)),
            slots=tuple(slots),
            landings=tuple(landings),
            known=tuple(request.known),
        )

    # What happens

    def apply(self, index: int, operation: ops.Operation) -> None:
        """Let operation number ``index`` happen.

        Raises:
            SenselessError: If it makes no sense now.
        """
        match operation:
            case ops.Request():
                self._arrive(operation)
            case ops.Alloc():
                self._append(self._request(operation.req), operation.group, operation.blocks)
                self._hand_out(operation.req, operation.group, operation.blocks)
            case ops.Share():
                request = self._request(operation.req)
                self._append(request, operation.group, operation.blocks)
                self._advance(request, operation.group, operation.blocks)
            case ops.Map():
                self._map(operation)
            case ops.FreeRequest():
                self._request(operation.req).give_everything_back()
            case ops.FreeBlocks():
                for block in operation.blocks:
                    self._leave_behind(operation.group, block)
            case ops.Forward():
                self._forward(index, operation)
            case ops.ReplayWrite():
                if operation.req not in self._rows_of_forward.get(operation.of, ()):
                    raise SenselessError("of", f"an earlier forward with a row of {operation.req!r}, found another")
            case ops.StoreBegin():
                self._begin_store(operation)
            case ops.StoreEnd():
                self._end_store(operation)
            case ops.Load():
                self._load(operation)
            case ops.Rollback():
                self._roll_back(operation)
            case ops.Epoch():
                self.epoch += 1
            case ops.Poke() | ops.CopyBlock() | ops.Index() | ops.Sweep():
                pass

    def _request(self, req: str, where: str = "req") -> _RequestState:
        request = self._requests.get(req)
        if request is None:
            raise SenselessError(where, f"a request that has arrived, found {req!r}")
        return request

    def _arrive(self, operation: ops.Request) -> None:
        namesake = self._requests.get(operation.req)
        if namesake is not None and not namesake.may_have_left:
            raise SenselessError("req", f"a new request or one that has been freed, found {operation.req!r}")
        groups = self.geometry.groups
        self._requests[operation.req] = _RequestState(
            prompt=operation.prompt,
            namespace=operation.namespace,
            known=list(operation.prompt),
            computed=0,
            tables=[[] for _ in groups],
            references=[[] for _ in groups],
        )

    def _append(self, request: _RequestState, group: int, blocks: Sequence[int]) -> None:
        request.tables[group].extend(blocks)
        null_block = self.geometry.null_block
        request.references[group].extend(None if block == null_block else block for block in blocks)

    def _hand_out(self, req: str, group: int, blocks: Sequence[int]) -> None:
        namespace = self._requests[req].namespace
        self._namespace_of_block.update({(group, block): namespace for block in blocks})

    def _advance(self, request: _RequestState, group: int, blocks: Sequence[int]) -> None:
        # A hit counts once all groups have it; that of the first group stands for all.
        if group == 0:
            request.computed += len(blocks) * self.geometry.block_size

    def _map(self, operation: ops.Map) -> None:
        table = self._request(operation.req).tables[operation.group]
        if operation.index > len(table):
            raise SenselessError("index", f"at most {len(table)}, the end of the block table, found {operation.index}")
        table[operation.index : operation.index + 1] = [operation.block]

    def _leave_behind(self, group: int, block: int) -> None:
        """Forget one reference to a block that a sliding window has passed; of several holders, the first to arrive.

        Any other block that is freed by number stays among its holders' references: the allocator is wrong about it,
        and will give it back again with the request.
        """
        window = self.geometry.groups[group].window
        if window is None:
            return
        for request in self._requests.values():
            references = request.references[group]
            readable_from = max(0, request.computed - window + 1)
            behind = references[: readable_from // self.geometry.block_size]
            if block in behind:
                references[behind.index(block)] = None
                return

    def _forward(self, index: int, operation: ops.Forward) -> None:
        rows = self.plan(operation)
        self._rows_of_forward[index] = frozenset(row.req for row in rows)
        for row in rows:
            request = self._requests[row.req]
            request.computed = row.start + len(row.tokens)
            known = request.known
            known.extend(_padded(known, row.start)[len(known) :])
            for position, token in enumerate(row.tokens, start=row.start):
                if position == len(known):
                    known.append(token)
                elif position >= len(request.prompt) and known[position] != token:
                    # Another continuation: what was known beyond it belongs to the one it replaces.
                    known[position:] = [token]

    def _begin_store(self, operation: ops.StoreBegin) -> None:
        store = self._stores.get(operation.key)
        if store is not None and not store.finished:
            raise SenselessError("key", f"a key that is not being stored, found {operation.key!r} before its store_end")
        self._stores[operation.key] = _Store(group=operation.group, blocks=operation.blocks)

    def _end_store(self, operation: ops.StoreEnd) -> None:
        store = self._stores.get(operation.key)
        if store is None or store.finished:
            raise SenselessError("key", f"a key with a store_begin, found {operation.key!r}")
        if (operation.group, operation.blocks) != (store.group, store.blocks):
            raise SenselessError("blocks", f"{list(store.blocks)} as in store_begin, found {list(operation.blocks)}")
        store.finished = True

    def _load(self, operation: ops.Load) -> None:
        request = self._request(operation.req)
        store = self._stores.get(operation.key)
        if store is None or not store.finished:
            raise SenselessError("key", f"a key with a store_end, found {operation.key!r}")
        if operation.group != store.group:
            raise SenselessError("group", f"{store.group}, the group that was stored, found {operation.group}")
        if len(operation.blocks) > len(store.blocks):
            raise SenselessError("blocks", f"at most the {len(store.blocks)} stored, found {len(operation.blocks)}")
        self._advance(request, operation.group, operation.blocks)

    def _roll_back(self, operation: ops.Rollback) -> None:
        request = self._request(operation.req)
        if operation.to > request.computed:
            raise SenselessError("to", f"at most {request.computed}, what is computed, found {operation.to}")
        request.computed = operation.to
        del request.known[operation.to :]


def _padded(known: Sequence[int | None], length: int) -> tuple[int | None, ...]:
    """The first ``length`` entries, None where there are none."""
    return (*known[:length], *[None] * (length - len(known)))
