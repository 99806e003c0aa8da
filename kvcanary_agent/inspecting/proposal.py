"""The table that is proposed, as TOML with a remark wherever something was guessed."""

from __future__ import annotations

import sys
from typing import Any

from kvcanary_agent.adapters.api.words import AXES
from kvcanary_agent.inspecting.buffers import Buffer, buffers_of
from kvcanary_agent.inspecting.methods import Candidate, candidates


def propose(pool: Any, *, engine: str | None = None) -> str:
    """A table for the class `pool`, or for the class of the object `pool`, of which a live one tells more.

    What could not be told is written as ``?`` and has to be filled in: with one, `run` refuses the table.

    Raises:
        ValueError: There is nothing in it that looks like the buffers of a pool.
    """
    cls = pool if isinstance(pool, type) else type(pool)
    found = buffers_of(pool)
    if not found:
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} has no attribute that looks like a pool's buffers: a tensor of at "
            "least two axes, or a list of them; name the class that holds them, or give a live object"
        )
    chosen = _chosen(found)
    lines = [f'engine = "{engine or cls.__module__.partition(".")[0]}"', f'module = "{cls.__module__}"', "", "[pool]"]
    lines.append(f'class = "{cls.__qualname__}"')
    lines += [f'{buffer.part} = "{buffer.path}"  # {buffer.shown}' for buffer in chosen]
    lines.append(f'layout = "{" ".join(chosen[0].axes)}"')
    if "?" in chosen[0].axes:
        lines.append(f"# ? is an axis that its name does not tell; axes are {' '.join(AXES)}")
    if "slots" in chosen[0].axes:
        lines.append("block_size = 1  # a guess: slots of a block")
    others = [buffer for buffer in found if buffer not in chosen]
    lines += [f"# not used: {buffer.path} {buffer.shown}" for buffer in others]
    methods = candidates(sys.modules[cls.__module__], cls)
    steps = [each for each in methods if each.role == "step"]
    writes = [each for each in methods if each.role == "write" and each.method.startswith(f"{cls.__qualname__}.")]
    for each in steps:
        lines += _table("step", each)
    if steps:
        lines += ["", "# Remove each [[step]] that calls another one: a forward is told of once."]
    elif writes:
        for each in writes:
            lines += _table("write", each)
        lines += ["", "# No call was found that runs the model: with [[write]] alone, the bytes are patrolled."]
    else:
        lines += ["", "# No call was found that runs the model, or writes: add [[step]] or [[write]]."]
    for each in methods:
        if each.role in ("allocated", "freed"):
            lines += _table("event", each, kind=each.role)
    return "\n".join(lines) + "\n"


def _chosen(found: list[Buffer]) -> list[Buffer]:
    """The first of keys and values, or of both in one."""
    for wanted in (("keys", "values"), ("kv",), ("keys",), ("values",)):
        chosen = [next((buffer for buffer in found if buffer.part == part), None) for part in wanted]
        if all(chosen):
            return [buffer for buffer in chosen if buffer is not None]
    return found[:1]


def _table(name: str, candidate: Candidate, kind: str | None = None) -> list[str]:
    lines = ["", f"[[{name}]]"]
    if kind is not None:
        lines.append(f'kind = "{kind}"')
    lines.append(f'method = "{candidate.method}"  # ({", ".join(candidate.arguments)})')
    lines += [f'{key} = "{path}"' for key, path in candidate.values.items()]
    return lines
