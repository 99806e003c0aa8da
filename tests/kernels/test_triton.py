"""The Triton kernels, in Triton's interpreter on the CPU, give the same bits as the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcanary_agent.kernels.checks import Checks
from kvcanary_agent.kernels.records import Records
from kvcanary_agent.kernels.ring import ViolationRing
from tests.canary.toy import LAYOUTS
from tests.kernels.histories import Setting, hear, without_content_of_broken_chains

pytest.importorskip("triton")
# Whether a kernel is interpreted is decided where it is defined.
with pytest.MonkeyPatch.context() as environment:
    environment.setenv("TRITON_INTERPRET", "1")
    from kvcanary_agent.kernels.triton import TritonChecks


class SmallTiles(TritonChecks):
    """Tiles so small that little data needs several of them."""

    token_tile = 8
    read_tile = 16
    word_tile = 8
    block_tile = 64


def breaks_alone(*arguments: torch.Tensor) -> torch.Tensor:
    """The slots where a chain breaks, without the run that follows: what a GPU reports."""
    return arguments[-1]


def hear_reference(setting: Setting) -> object:
    with patch("kvcanary_agent.kernels.reference.reads._foreign_runs", breaks_alone):
        return hear(setting, Checks)


SETTINGS = st.builds(
    Setting,
    layout=st.sampled_from(sorted(LAYOUTS)),
    block_size=st.sampled_from([1, 2, 4, 5]),
    content=st.sampled_from(["full", "scrub"]),
    known_tokens=st.booleans(),
    reports_ownership=st.booleans(),
    window=st.none(),
    seed=st.integers(0, 2**32),
)
