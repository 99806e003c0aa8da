"""The buffers of a declared pool: its layout, and whether they are still where they were."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kvcanary_agent.adapters.api.axes import parts_of
from kvcanary_agent.adapters.declared.declaration import Declaration, DeclarationError, PoolTable
from kvcanary_agent.adapters.declared.paths import Path
from kvcanary_agent.canary import KVGroup, KVLayout

# So many steps in a row with moved buffers, and nothing is ever there long enough to be checked.
_MOST_MOVES = 3


class BuffersMove(RuntimeError):
    """The buffers are others at every step."""


def layout_of(declaration: Declaration, holder: Any, *, ownership: bool, occupancy: bool) -> KVLayout:
    """The pool of `holder`, as `declaration` describes it.

    Raises:
        PathError: A path leads nowhere.
        LayoutError: The buffers are not what the table says, or cannot be watched.
        DeclarationError: A number is none.
    """
    pool = declaration.pool
    buffers = {part: _read(path, holder) for part, path in pool.buffers.items()}
    block_size = _number("block_size", pool.block_size, holder)
    parts = parts_of(buffers, pool.layouts, block_size)
    window = _number("window", pool.window, holder)
    group = KVGroup(
        name="full" if window is None else "sliding_window",
        block_size=parts[0].view.shape[1],
        parts=parts,
        null_block=_number("null_block", pool.null_block, holder),
        window=window,
    )
    left_out = {}
    if declaration.writes:
        left_out["reads"] = "its adapter knows the pool's writes alone: bytes are patrolled, what requests read is not"
        # A window of one token: nothing is read of what stands before a write.
        group = dataclasses.replace(group, window=1)
    elif not (ownership or occupancy):
        left_out["ownership"] = "its adapter does not tell of every block allocated and freed, and for which request"
    if declaration.steps and not all("token_ids" in step.values for step in declaration.steps):
        left_out["tokens"] = "its adapter does not tell of token ids: token and chain cannot be compared"
    return KVLayout(
        engine=declaration.engine,
        groups=(group,),
        reports_ownership=ownership and not declaration.writes,
        reports_occupancy=occupancy and not declaration.writes,
        not_covered=left_out,
    )


class Buffers:
    """Where the buffers were at the last look."""

    def __init__(self, pool: PoolTable) -> None:
        self._pool = pool
        self._places: list[object] = []
        self._moves = 0

    def moved(self, holder: Any) -> bool:
        """Whether they are elsewhere, or shaped otherwise, than at the call before.

        Raises:
            BuffersMove: That has been so at each of the last calls.
            PathError: They are gone.
        """
        places: list[object] = []
        for path in self._pool.buffers.values():
            value = _read(path, holder)
            places += [
                (tensor.data_ptr(), tensor.shape) if isinstance(tensor, torch.Tensor) else None
                for tensor in (value if isinstance(value, (list, tuple)) else [value])
            ]
        first, moved = not self._places, places != self._places
        self._places = places
        if first or not moved:
            self._moves = 0
            return False
        self._moves += 1
        if self._moves > _MOST_MOVES:
            raise BuffersMove(
                f"its buffers were allocated anew at each of the last {self._moves} steps, so that nothing stays where "
                "it can be checked"
            )
        return True


def _read(path: Path, holder: Any) -> Any:
    return path.read_from_module() if path.root == "module" else path.read(holder)


def _number(name: str, value: Path | int | None, holder: Any) -> int | None:
    found = _read(value, holder) if isinstance(value, Path) else value
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int):
        raise DeclarationError(f"[pool] {name} is a {type(found).__name__}, {found!r}, wanted a whole number")
    return found
