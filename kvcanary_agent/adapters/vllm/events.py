"""What the scheduler's process tells the workers' canaries, as an attribute of the `SchedulerOutput` it sends anyway.

The attribute is made of builtin types only: it must survive every way in which vLLM pickles the output, and a worker
without the agent must still be able to read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_ATTRIBUTE = "kvcanary_events"
# Of the attribute's form: a worker of another version of the agent does not guess.
_FORM = 1


class Action(str, Enum):
    """What the allocator did."""

    ALLOCATED = "allocated"
    SHARED = "shared"
    FREED = "freed"
    """A reference is given back, the contents are not in the prefix index."""
    FREED_CACHED = "freed_cached"
    """A reference is given back, the prefix index can still hand the contents out."""
    INDEX_RESET = "index_reset"
    """The whole prefix index was emptied; no request and no blocks."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One act of the allocator.

    Attributes:
        action: What it did.
        request: For whom; None if for no request, or if that is not known.
        group: vLLM's number of the KV cache group; -1 if none is known.
        blocks: Block numbers, in the order of the request's table where the act adds to it.
    """

    action: Action
    request: str | None
    group: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExternalLoad:
    """K/V that a connector brings into blocks of a request.

    Attributes:
        request: Whose tokens they are.
        first_token: Position of the first token that is loaded; before it lies what the local prefix cache had.
        tokens: How many tokens are loaded.
        blocks: For each KV cache group, the blocks that hold these tokens in its table; null blocks (0) where the
            group's window does not reach.
        asynchronous: The load goes on while other steps run, and the request is scheduled when it has ended; otherwise
            it ends within the step that this comes with.
    """

    request: str
    first_token: int
    tokens: int
    blocks: tuple[tuple[int, ...], ...]
    asynchronous: bool


@dataclass(slots=True)
class StepEvents:
    """Everything since the output before.

    Attributes:
        number: Counts the outputs of this scheduler, from 1: a gap means that events are missing.
        blocks: In the order in which they happened; all of them before the step that they come with.
        external: Loads by connectors that this step's scheduling decided on.
        salts: The ``cache_salt`` of each request that is sent as new in this step and has one.
        traces: The trace headers (lower case, ``traceparent`` and ``tracestate``) of each request that is sent as new
            in this step and has them.
    """

    number: int
    blocks: list[BlockEvent] = field(default_factory=list)
    external: list[ExternalLoad] = field(default_factory=list)
    salts: dict[str, str] = field(default_factory=dict)
    traces: dict[str, dict[str, str]] = field(default_factory=dict)


def attach(scheduler_output: Any, events: StepEvents) -> None:
    """Send ``events`` along with ``scheduler_output``.

    Raises:
        AttributeError: If outputs of this version take no further attribute.
    """
    setattr(
        scheduler_output,
        _ATTRIBUTE,
        {
            "form": _FORM,
            "number": events.number,
            "blocks": [(event.action.value, event.request, event.group, event.blocks) for event in events.blocks],
            "external": [
                (load.request, load.first_token, load.tokens, load.blocks, load.asynchronous)
                for load in events.external
            ],
            "salts": events.salts,
            "traces": events.traces,
        },
    )


def attached_to(scheduler_output: Any) -> StepEvents | None:
    """The events that came with ``scheduler_output``; None if its scheduler's process does not send any."""
    sent = getattr(scheduler_output, _ATTRIBUTE, None)
    if not isinstance(sent, dict) or sent.get("form") != _FORM:
        return None
    return StepEvents(
        number=sent["number"],
        blocks=[BlockEvent(Action(action), *rest) for action, *rest in sent["blocks"]],
        external=[ExternalLoad(*load) for load in sent["external"]],
        salts=sent["salts"],
        traces=sent["traces"],
    )
