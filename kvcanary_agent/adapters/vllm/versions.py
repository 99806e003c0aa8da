"""Which versions of vLLM this adapter reads right, and how that is known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from kvcanary_agent.adapters.vllm.pool import NotCovered

Checked = Literal["run", "source"]
"""``run``: real engines of this version ran under the agent. ``source``: only its source was compared."""

Minor = tuple[int, int]

V1: Mapping[Minor, Checked] = {
    (0, 24): "source",
    (0, 25): "source",
    (0, 26): "source",
    (0, 27): "run",
    (0, 28): "run",
    (0, 29): "run",
    (0, 30): "run",
    (0, 31): "run",
    (0, 32): "run",
    (0, 33): "source",
}
"""The V1 model runner. Before 0.24, attention backends keep all K before all V, in a tensor whose first dimension is no
block; before 0.20, the runner has neither lengths nor positions on the device."""

V2: Mapping[Minor, Checked] = {
    (0, 28): "run",
    (0, 29): "run",
    (0, 30): "run",
    (0, 31): "run",
    (0, 32): "run",
    (0, 33): "source",
}
"""The V2 model runner."""


def refuse_unknown_version(version: str, generation: str, known: Mapping[Minor, Checked]) -> None:
    """Raise `NotCovered` unless ``version`` is one of the ``known`` ones.

    Args:
        version: As vLLM gives it, for example ``"0.32.0+cpu"`` or ``"0.33.0rc1.dev7"``.
        generation: Of the model runner, for the message.
        known: `V1` or `V2`.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else None
    if minor in known:
        return
    first, last = min(known), max(known)
    remedy = "install one of these"
    if minor is not None and minor > last:
        remedy += ", or a kvcanary-agent that knows this version"
    raise NotCovered(
        f"the {generation} of vllm {version or '(no version)'}: this kvcanary-agent knows that of vllm "
        f"{first[0]}.{first[1]} to {last[0]}.{last[1]}; {remedy}"
    )
