"""The pools that an adapter watches, and which of them an engine's object acts on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary_agent.canary import Canary
    from kvcanary_agent.runtime import FailOpen


class WatchedPool:
    """A pool with its canary.

    Attributes:
        canary: Hears of the pool's events and steps, see `kvcanary_agent.canary.canary`.
        part: What is switched off when a hook of this pool fails: without one of its events nothing can be judged.
        holder: The object whose pool it is; None once it is gone.
        notes: For an adapter, what one hook leaves for a later one of the same step. Cleared after each forward.
        kept: For an adapter, what it keeps for this pool.
        in_step: Whether a forward runs.
    """

    def __init__(self, canary: Canary, part: FailOpen, holder: object) -> None:
        self.canary = canary
        self.part = part
        self.notes: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.in_step = False
        self._holder = _weakly(holder)

    @property
    def holder(self) -> Any:
        return self._holder()


class Pools:
    """Finds the pool that a method's object belongs to, by identity, without keeping either alive.

    An object belongs to a pool if it is the one that holds it, or one that was named as using it. If none are named for
    any pool, and there is one pool, then that is whose it is, as long as it is the only object of its class.
    """

    def __init__(self, unclear: Callable[[str, str], None]) -> None:
        """Start with none.

        Args:
            unclear: Told, as (what, why), of a call that cannot be assigned to a pool.
        """
        self._unclear = unclear
        self._of: dict[int, tuple[weakref.ref[Any], WatchedPool]] = {}
        self._pools: weakref.WeakSet[WatchedPool] = weakref.WeakSet()
        self._users_named = False
        self._unwatched: list[Callable[[], object]] = []

    def add(self, pool: WatchedPool, holder: object, users: Iterable[object]) -> None:
        """A pool is watched from now on. Raises TypeError for an object that cannot be referred to weakly."""
        for member in (holder, *users):
            self._bind(member, pool)
            self._users_named |= member is not holder
        self._pools.add(pool)

    def missed(self, holder: object) -> None:
        """The pool of `holder` is not watched: as long as that lives, an unknown object may belong to it."""
        try:
            self._unwatched.append(weakref.ref(holder))
        except TypeError:
            self._unwatched.append(lambda: True)

    def remove(self, holder: object) -> WatchedPool | None:
        """Forget the pool of `holder`, and return it."""
        entry = self._of.get(id(holder))
        if entry is None or entry[1].holder is not holder:
            return None
        for key in [key for key, (_, pool) in self._of.items() if pool is entry[1]]:
            del self._of[key]
        self._pools.discard(entry[1])
        return entry[1]

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()
        self._pools.clear()
        self._unwatched.clear()
        self._users_named = False

    def of(self, receiver: object, method: str) -> WatchedPool | None:
        """The pool that a call of `method` on `receiver` is about; None if none is watched, or it cannot be told."""
        entry = self._of.get(id(receiver))
        if entry is not None:
            return entry[1]
        pools = list(self._pools)
        if not pools:
            return None
        if self._users_named:
            if not any(type(member()) is type(receiver) for member, _ in list(self._of.values())):
                self._unclear(method, f"no pool names this {type(receiver).__name__} as one that uses it (used_by)")
            return None
        other = any(type(member()) is type(receiver) for member, _ in list(self._of.values()))
        if len(pools) > 1 or other or any(holder() is not None for holder in self._unwatched):
            what = f"this {type(receiver).__name__} could act on any of several pools"
            for pool in pools:
                pool.part.on = False
            self._unclear(method, f"{what}: name the objects that use a pool (used_by)")
            return None
        if not isinstance(receiver, type):
            self._bind(receiver, pools[0])
        return pools[0]

    def _bind(self, member: object, pool: WatchedPool) -> None:
        key = id(member)

        def forget(_: object, of: dict[int, tuple[weakref.ref[Any], WatchedPool]] = self._of) -> None:
            of.pop(key, None)

        self._of[key] = _weakly(member, forget), pool


def _weakly(member: Any, forget: Callable[[object], None] | None = None) -> weakref.ref[Any]:
    try:
        return weakref.ref(member, forget)
    except TypeError:
        name = type(member).__name__
        if type(member).__module__ == "builtins":
            raise TypeError(f"a {name} cannot be followed; name an object of the engine's own classes") from None
        raise TypeError(
            f"{name} has __slots__ without __weakref__, so that the agent cannot follow it; add __weakref__, or name "
            "another object"
        ) from None
