"""What an incident file holds: version 1 of the schema ``kvcanary-incident``.

A JSON object with these fields; a reader ignores those that it does not know, and a later version that takes one away,
or changes its meaning, has another number:

``schema``, ``version``
    ``"kvcanary-incident"``, 1.
``id``, ``started``, ``updated``
    Name of the file without ``.json``; times of the first and the last violation, ISO 8601 in UTC.
``summary``
    ``violations`` (in all), ``kinds`` {kind: number}, and of those that are kept: ``groups``, ``blocks``, ``slots``,
    ``layers``, ``parts`` and ``requests`` (at most 64 of each), ``steps`` [first, last].
``diagnosis``
    Causes, the likeliest first: ``cause``, ``title``, ``confidence`` (0 to 1), ``sentence``, ``next_steps``.
``step``
    What the step of the first violation was doing: ``step``, ``requests`` (at most 64), ``num_requests``,
    ``num_new_tokens``; null if it is not known.
``violations``
    The first and the last of them: the fields of :class:`kvcanary_agent.canary.Violation`, those that are known.
    Token ids are hashes under a key of the process, unless ``KVCANARY_REVEAL_TOKENS`` is set; chains and fingerprints
    always are.
``blocks``
    Of the first blocks that were hit: ``group``, ``block``, ``owners`` (oldest first) and ``events``
    {``step``, ``event``, ``request``}.
``neighbourhood``
    Records of the slots around the first violation when it was found: ``group``, ``block``, ``slots`` with ``slot``,
    ``state`` (``written``, ``void``, ``unwritten``, ``unknown``), and of a record ``token``, ``position``, ``writer``,
    ``written_step``; null if they could not be looked at.
``pool``, ``engine``, ``configuration``, ``libraries``, ``process``
    The pool's layout; engine with version, rank and world size; the agent's settings; versions; process id, program
    and Python.
``repeats``
    Later bursts with the same kinds and cause, which have no file of their own: ``number`` and the last 16.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from typing import Any

from kvcanary_agent import __version__
from kvcanary_agent.canary.violation import Neighbourhood, Violation
from kvcanary_agent.incident_files import SCHEMA, VERSION
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry import semconv
from kvcanary_agent.telemetry.diagnosis import Diagnosis
from kvcanary_agent.telemetry.pool_facts import PoolFacts

MAX_BYTES = 256 * 1024
"""Of one file; violations are left out until it fits."""

_MAX_NAMES = 64
_MAX_BLOCKS = 16
_LIBRARIES = ("torch", "triton", "opentelemetry-api", "opentelemetry-sdk", "vllm", "sglang", "transformers")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a step was doing: its first requests, and how many requests and new tokens it had."""

    step: int
    requests: tuple[str, ...]
    num_requests: int
    num_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One burst of violations, as far as it has come.

    Attributes:
        first_ns, last_ns: Times of the first and the last violation, nanoseconds since the epoch.
        attributes: Engine, version, pool and rank, as on the pool's log records.
        facts: The pool's layout.
        kinds: All violations by kind; ``violations`` are those of them that are kept.
        step: What the step of the first violation was doing.
        neighbourhood: The slots around the first violation.
    """

    first_ns: int
    last_ns: int
    attributes: Mapping[str, str | int]
    facts: PoolFacts
    kinds: Mapping[str, int]
    violations: tuple[Violation, ...]
    diagnosis: Diagnosis
    step: StepContext | None
    neighbourhood: Neighbourhood | None

    @property
    def signature(self) -> tuple[str, ...]:
        """What repeats of the same trouble have in common: pool, cause, kinds of the first step, and group."""
        first = self.violations[0]
        kinds = sorted({str(violation.kind) for violation in self.violations if violation.step == first.step})
        return (first.pool, self.diagnosis.cause, first.group, *kinds)


def document(incident: Incident, identity: str, settings: Settings) -> str:
    """The text of an incident's file, at most :data:`MAX_BYTES` of UTF-8."""
    content = _content(incident, identity, settings)
    violations = [_known(violation) for violation in incident.violations]
    while True:
        text = json.dumps({**content, "violations": violations}, indent=1)
        if len(text) <= MAX_BYTES or not violations:
            return text
        # The first are worth the most, the last tell how it went on.
        half = max(1, len(violations) // 4)
        violations = violations[:half] + violations[-half:] if len(violations) > 2 * half else violations[:-1]


def timestamp(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 10**9, timezone.utc).isoformat().replace("+00:00", "Z")


def _content(incident: Incident, identity: str, settings: Settings) -> Json:
    kept = incident.violations
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "id": identity,
        "started": timestamp(incident.first_ns),
        "updated": timestamp(incident.last_ns),
        "summary": {
            "violations": sum(incident.kinds.values()),
            "kinds": dict(incident.kinds),
            "groups": _distinct(violation.group for violation in kept),
            "blocks": _distinct(violation.block for violation in kept if violation.block >= 0),
            "slots": _distinct(violation.slot for violation in kept if violation.slot >= 0),
            "layers": _distinct(violation.layer for violation in kept if violation.layer),
            "parts": _distinct(violation.part for violation in kept if violation.part),
            "requests": _distinct(violation.request for violation in kept if violation.request),
            "steps": [min(violation.step for violation in kept), max(violation.step for violation in kept)],
        },
        "diagnosis": [
            {
                "cause": cause.cause,
                "title": cause.title,
                "confidence": round(cause.confidence, 2),
                "sentence": cause.sentence,
                "next_steps": list(cause.next_steps),
            }
            for cause in incident.diagnosis.causes
        ],
        "step": None if incident.step is None else asdict(incident.step),
        "blocks": _blocks(kept),
        "neighbourhood": None if incident.neighbourhood is None else asdict(incident.neighbourhood),
        "pool": {
            "name": kept[0].pool,
            "reports_ownership": incident.facts.reports_ownership,
            "groups": [asdict(group) for group in incident.facts.groups],
        },
        "engine": {
            "name": incident.attributes.get(semconv.ENGINE),
            "version": incident.attributes.get(semconv.ENGINE_VERSION),
            "rank": incident.attributes.get(semconv.RANK),
            "world_size": incident.facts.world_size,
        },
        "configuration": asdict(settings),
        "libraries": _versions(),
        "process": {
            "pid": os.getpid(),
            "program": os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else "",
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "repeats": {"number": 0, "last": []},
    }


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))[:_MAX_NAMES]


def _blocks(violations: Iterable[Violation]) -> list[Json]:
    blocks: dict[tuple[str, int], Json] = {}
    for violation in violations:
        at = (violation.group, violation.block)
        if violation.block < 0 or at in blocks:
            continue
        if len(blocks) == _MAX_BLOCKS:
            break
        blocks[at] = {
            "group": violation.group,
            "block": violation.block,
            "owners": list(violation.block_history),
            "events": [asdict(event) for event in violation.block_events],
        }
    return list(blocks.values())


def _known(violation: Violation) -> Json:
    values = asdict(violation)
    # Said once for each block.
    del values["block_events"], values["block_history"], values["pool"]
    return {name: value for name, value in values.items() if value is not None and value != ""}


@cache
def _versions() -> dict[str, str]:
    versions = {"kvcanary-agent": __version__}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except Exception:
            continue
    return versions
