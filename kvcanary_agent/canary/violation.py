"""What the canary reports: plain data, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What is wrong with a slot. Of several that apply to one slot, the most specific is reported."""

    ADDRESS = "address"
    OWNERSHIP = "ownership"
    UNWRITTEN = "unwritten"
    POSITION = "position"
    TOKEN = "token"
    NAMESPACE = "namespace"
    EPOCH = "epoch"
    CHAIN = "chain"
    CONTENT = "content"
    WILD_WRITE = "wild_write"
    LOST_WRITE = "lost_write"
    NONFINITE = "nonfinite"
    TRANSFER = "transfer"
    INDEX = "index"
    RANK = "rank"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """What happened to a block, and in which step.

    Attributes:
        step: The last step that had begun; 0 before the first.
        event: ``"allocated"``, ``"shared"``, ``"freed"``, ``"cached"`` (freed, contents kept), ``"copied"`` (into it)
            or ``"loaded"`` (back from another tier).
        request: For whom; None if that is not known.
    """

    step: int
    event: str
    request: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One slot that is not what it should be.

    Attributes:
        kind: What is wrong.
        pool, group: Which pool and which group of layers.
        slot, block, offset: The slot, and the block and offset it is at; -1 where the address itself is the fault
            and lies outside the pool.
        step: The canary's count of steps (from 1) when it was seen.
        request: The request that reads (or writes) the slot in this step; None for a patrol.
        position: The position that the request has there; None for a patrol.
        layer, part: The layer and the part (``"k"``, ``"v"``, ...) whose bytes changed, for ``content``.
        expected, found: The compared values: token ids as keyed hashes unless revealed, positions and slots in
            clear, chains and fingerprints as keyed hashes.
        writer: The request whose write the slot's record describes, and ``written_step`` when that was; None if
            nobody wrote it.
        recorded_position: The position that the record holds.
        held: Whether the request holds the block, as the allocator's events tell; None if the adapter does not follow
            them.
        block_history: The requests that the block was last handed to or shared with, oldest first.
        block_events: What happened to the block lately, oldest first, as far as the adapter tells.
        detail: What the allocator or another component did, for violations that an event showed.
    """

    kind: Kind
    pool: str
    group: str
    slot: int
    block: int
    offset: int
    step: int
    request: str | None = None
    position: int | None = None
    layer: str | None = None
    part: str | None = None
    expected: str | None = None
    found: str | None = None
    writer: str | None = None
    written_step: int | None = None
    recorded_position: int | None = None
    held: bool | None = None
    block_history: tuple[str, ...] = ()
    block_events: tuple[BlockEvent, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """What the records say about a slot.

    Attributes:
        state: ``"written"``; ``"void"``: written, but before its block was handed out last; ``"unwritten"``;
            ``"unknown"``: its contents came from elsewhere.
        token: As in reports: hashed unless revealed. With ``position``, ``writer`` and ``written_step`` None where
            there is no record.
    """

    slot: int
    state: str
    token: str | None = None
    position: int | None = None
    writer: str | None = None
    written_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """The slots of a block and of the blocks beside it, in order."""

    group: str
    block: int
    slots: tuple[SlotState, ...]


class KVCanaryError(RuntimeError):
    """Raised in raise mode, before the output of the step can be used.

    Attributes:
        violations: Everything that the step's check found.
    """

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        first = violations[0]
        more = f" and {len(violations) - 1} more" if len(violations) > 1 else ""
        found_by = "found by the patrol" if first.request is None else f"request {first.request}"
        super().__init__(
            f"KV cache violation: {first.kind} in slot {first.slot} (block {first.block}) of {first.pool}, "
            f"{found_by}, step {first.step}{more}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCounts:
    """Slots compared during one pass, by check, and how many of them failed: ``{"token": (4096, 0), ...}``."""

    slots: dict[str, tuple[int, int]]


class Sink:
    """Who listens to a canary. Calls come from the thread that runs the step and must not block it.

    This one hears nothing: a sink overrides the methods that it is interested in.
    """

    def violation(self, violation: Violation) -> None:
        """A violation, once per slot, part and write: a slot that stays broken is not reported again each step."""

    def step_started(self, step: int, requests: Sequence[str], num_new_tokens: int) -> None:
        """A step begins, for these requests; ``requests`` may change afterwards."""

    def pass_finished(
        self, phase: str, step: int, start_ns: int, end_ns: int, counts: CheckCounts, violations: tuple[Violation, ...]
    ) -> None:
        """A pass of checks over one step is over.

        Args:
            phase: ``"verify"`` (before the forward), ``"record"`` (after it), ``"sweep"`` (patrol), or ``"audit"``:
                of an allocator, with counts of blocks, of all that happened since the audit before.
            step: The canary's count of steps.
            start_ns, end_ns: ``time.time_ns()`` at both ends; on an asynchronous device the time to enqueue.
            counts: Slots checked; on an asynchronous device those of an earlier step.
            violations: What was reported since the pass before.
        """

    def traced(self, request: str, headers: Mapping[str, str]) -> None:
        """A request begins; the trace it belongs to, as headers ``traceparent`` and ``tracestate``, or nothing."""

    def look_with(self, slots_around: Callable[[str, int], Neighbourhood | None]) -> None:
        """How to look at the records around a violation, by group and block."""

    def lost_violations(self, count: int) -> None:
        """The ring was full: this many violations were counted but not kept."""

    def records_memory(self, num_bytes: int, pool_bytes: int) -> None:
        """The canary has allocated its records and scratch: their bytes and those of the pool."""

    def flush(self) -> None:
        """The step is about to be failed, and the process may end with it: see that what was reported gets out."""

    def close(self) -> None:
        """The canary is closed; no other call follows."""

    def drill(self, kind: str, step: int, description: str) -> None:
        """A drill has injected a fault: what follows is no real one."""
