"""Run from the root of the checkout, with the Python that ``environment.sh transformers`` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.models import made
from tests.engines.transformers.harness import Engine


@pytest.fixture(scope="session")
def models() -> Path:
    return made("llama", "llama_one_kv_head", "mistral_sliding", "gemma3_hybrid")


@pytest.fixture(scope="session")
def engine(models: Path) -> Engine:
    return Engine(models)
