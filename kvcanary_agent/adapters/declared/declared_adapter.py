"""An adapter made of a table. Imports torch only when the engine does something."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcanary_agent.adapter import Adapter
from kvcanary_agent.adapters.api.hooks import Call, Hook, Role
from kvcanary_agent.adapters.api.pools import WatchedPool
from kvcanary_agent.adapters.declared.declaration import CallTable, Declaration, Place, Value, paths_in
from kvcanary_agent.adapters.declared.paths import Path, PathError

if TYPE_CHECKING:
    from kvcanary_agent.adapters.declared.writes import RecordedWrites
    from kvcanary_agent.canary import ForwardStep, KVLayout

# Under which names a pool's notes hold the list that a call may add to.
_LIST_BEFORE = "blocks before "


def declared_adapter(path: str) -> DeclaredAdapter:
    """The adapter that a file declares. Raises as `kvcanary_agent.adapters.declared.toml_file.read` does."""
    from kvcanary_agent.adapters.declared.toml_file import read

    return DeclaredAdapter(read(path))


class DeclaredAdapter(Adapter):
    """Follows an engine as a `Declaration` says."""

    def __init__(self, declaration: Declaration) -> None:
        self.engine = declaration.engine
        self._declaration = declaration
        self._ownership, self._occupancy = (False, False) if declaration.writes else _follows(declaration.events)
        super().__init__()

    def hooks(self) -> list[Hook]:
        declaration = self._declaration
        pool = declaration.pool
        roles: tuple[tuple[Role, tuple[Place, ...], Callable[..., Any]], ...] = (
            ("opens", pool.opened_by, self._layout),
            ("closes", pool.closed_by, _nothing),
        )
        found = [
            Hook(
                role=role,
                module=place.module,
                cls=place.cls,
                method=place.method,
                wants=frozenset(),
                label="[pool]",
                run=run,
            )
            for role, places, run in roles
            for place in places
        ]
        found += [_hook("before" if call.before else "after", call, _remember) for call in declaration.remembered]
        found += [_hook("forward", call, self._step) for call in declaration.steps]
        for call in declaration.writes:
            found += [_hook("before", call, self._write_begins), _hook("after", call, self._write_ended)]
        for call in declaration.events:
            if call.values.get("added"):
                found.append(_hook("before", call, _note_list))
            found.append(_hook("before" if call.before else "after", call, self._event))
        return found

    def used_by(self, holder: Any) -> list[object]:
        found: list[object] = []
        for path in self._declaration.pool.used_by:
            value = _read(path, holder)
            found += value if isinstance(value, (list, tuple)) else [value]
        return found

    def opened(self, pool: WatchedPool) -> None:
        from kvcanary_agent.adapters.declared.buffers import Buffers

        buffers = Buffers(self._declaration.pool)
        buffers.moved(pool.holder)
        pool.kept["buffers"] = buffers
        if self._declaration.writes:
            from kvcanary_agent.adapters.declared.writes import RecordedWrites

            pool.kept["writes"] = RecordedWrites(pool.canary)

    # Hooks

    def _layout(self, pool: WatchedPool | None, call: Call) -> KVLayout:
        from kvcanary_agent.adapters.declared.buffers import layout_of

        assert pool is None, "a pool that opens is not there yet"
        return layout_of(
            self._declaration,
            call.receiver,
            ownership=self._ownership,
            occupancy=self._occupancy,
        )

    def _step(self, table: CallTable, pool: WatchedPool, call: Call) -> ForwardStep | None:
        from kvcanary_agent.adapters.api.steps import step

        values = {key: value for key, value in table.values.items() if key != "unless"}
        if "unless" in table.values and _value(table.values["unless"], pool, call):
            return None
        self._follow_moves(pool)
        return step(pool, **{key: _value(value, pool, call) for key, value in values.items()})

    def _follow_moves(self, pool: WatchedPool) -> None:
        """A buffer that lies elsewhere than before, or has another shape, is another pool, of unknown contents."""
        if not pool.kept["buffers"].moved(pool.holder):
            return
        from kvcanary_agent.adapters.declared.buffers import layout_of

        layout = layout_of(self._declaration, pool.holder, ownership=self._ownership, occupancy=self._occupancy)
        self.reopen(pool, layout)
        if self._declaration.writes:
            from kvcanary_agent.adapters.declared.writes import RecordedWrites

            pool.kept["writes"] = RecordedWrites(pool.canary)
        else:
            pool.canary.arriving(range(layout.groups[0].num_blocks))

    def _event(self, table: CallTable, pool: WatchedPool, call: Call) -> None:
        canary, values = pool.canary, {key: _value(value, pool, call) for key, value in table.values.items()}
        if table.kind == "copied":
            canary.copied(_blocks("source", values, pool), _blocks("destination", values, pool))
            return
        request = None if "request" not in values else str(values["request"])
        blocks = _blocks("blocks", values, pool)
        if table.values.get("added"):
            known = pool.notes.pop(_LIST_BEFORE + table.label, [])
            blocks = blocks[len(known) :] if blocks[: len(known)] == known else [b for b in blocks if b not in known]
        if table.kind == "freed":
            self._freed(pool, blocks, request, values.get("cached", False))
            return
        shared = 0
        if table.kind == "shared":
            shared = len(blocks)
        elif "shared_tokens" in values:
            shared = int(values["shared_tokens"]) // canary.layout.groups[0].block_size
        if blocks[:shared]:
            canary.shared(blocks[:shared], request=request)
        if self._occupancy:
            canary.taken(_on_device(blocks[shared:], pool))
        else:
            canary.allocated(blocks[shared:], request=request)

    def _freed(self, pool: WatchedPool, blocks: list[int], request: str | None, cached: bool) -> None:
        if self._ownership:
            pool.canary.freed(blocks, request=request, cached=cached)
        elif self._occupancy:
            pool.canary.returned(_on_device(blocks, pool))
        elif not cached:
            pool.canary.recycled(blocks)

    def _write_begins(self, table: CallTable, pool: WatchedPool, call: Call) -> None:
        self._follow_moves(pool)
        writes: RecordedWrites = pool.kept["writes"]
        layer = None if "layer" not in table.values else int(_value(table.values["layer"], pool, call))
        writes.begin(_value(table.values["slots"], pool, call), layer, table.place.method)

    def _write_ended(self, table: CallTable, pool: WatchedPool, call: Call) -> None:
        writes: RecordedWrites = pool.kept["writes"]
        writes.end()


def _follows(events: tuple[CallTable, ...]) -> tuple[bool, bool]:
    """Whether the events tell who holds each block, and whether they tell which blocks are held."""
    handed_out = [event for event in events if event.kind == "allocated"]
    freed = [event for event in events if event.kind == "freed"]
    complete = bool(handed_out and freed)
    named = all("request" in event.values for event in events if event.kind != "copied")
    unnamed = not any("request" in event.values for event in events)
    cached = any(event.values.get("cached") for event in freed)
    shared = any(event.kind == "shared" or "shared_tokens" in event.values for event in events)
    # What a later request hits, it holds by a `shared`; a table that caches and has none does not tell who holds what.
    return complete and named and (shared or not cached), complete and unnamed and not (cached or shared)


def _hook(role: Role, table: CallTable, run: Callable[[CallTable, WatchedPool, Call], Any]) -> Hook:
    wants = frozenset(path.name for value in table.values.values() for path in paths_in(value) if path.root == "args")
    return Hook(
        role=role,
        module=table.place.module,
        cls=table.place.cls,
        method=table.place.method,
        wants=wants,
        label=table.label,
        run=partial(_with_pool, run, table),
    )


def _with_pool(
    run: Callable[[CallTable, WatchedPool, Call], Any], table: CallTable, pool: WatchedPool | None, call: Call
) -> Any:
    assert pool is not None, "only a hook that opens a pool is without"
    try:
        return run(table, pool, call)
    except ValueError as error:
        error.args = (f"{table.label}: {error}",)
        raise


def _remember(table: CallTable, pool: WatchedPool, call: Call) -> None:
    pool.notes[table.kind] = _value(table.values["value"], pool, call)


def _note_list(table: CallTable, pool: WatchedPool, call: Call) -> None:
    pool.notes[_LIST_BEFORE + table.label] = _numbers(_value(table.values["blocks"], pool, call))


def _nothing(pool: WatchedPool | None, call: Call) -> None:
    pass


def _value(value: Value, pool: WatchedPool, call: Call) -> Any:
    if isinstance(value, tuple):
        return [_value(each, pool, call) for each in value]
    if not isinstance(value, Path):
        return value
    if value.root == "args":
        return value.read(call.argument(value.name))
    if value.root == "result":
        return value.read(call.result)
    if value.root == "remembered":
        if value.name not in pool.notes:
            raise PathError(f"{value.text!r}: nothing was remembered since the last step")
        return value.read(pool.notes[value.name])
    return _read(value, call.receiver if value.root == "self" else pool.holder)


def _read(path: Path, start: Any) -> Any:
    return path.read_from_module() if path.root == "module" else path.read(start)


def _numbers(value: Any) -> list[int]:
    """Blocks as a list, from a list, one number, or a tensor, which on a GPU has to be waited for."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [value] if isinstance(value, int) else [int(each) for each in value]


def _blocks(key: str, values: dict[str, Any], pool: WatchedPool) -> list[int]:
    """The blocks of a value, without padding. Raises ValueError for what is no block: tables are indexed by them."""
    blocks = [block for block in _numbers(values[key]) if block != -1]
    count = pool.canary.layout.groups[0].num_blocks
    for block in blocks:
        if not 0 <= block < count:
            raise ValueError(f"{key}: {block} is no block of the pool, which has {count}")
    return blocks


def _on_device(blocks: list[int], pool: WatchedPool) -> Any:
    import torch

    return torch.tensor(blocks, dtype=torch.int64, device=pool.canary.layout.device)
