"""Run from the root of the checkout, with the Python that ``environment.sh sglang`` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.models import made
from tests.engines.sglang.harness import Engine


@pytest.fixture(scope="session")
def models() -> Path:
    return made("llama", "gemma3_hybrid", "olmo3_hybrid", "lora_a", "lora_b")


@pytest.fixture(scope="session")
def engine(models: Path) -> Engine:
    return Engine(models)
