"""Run from the root of the checkout, with the Python that ``environment.sh transformers`` makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.transformers.harness import HERE, Engine


@pytest.fixture(scope="session")
def models() -> Path:
    names = ["llama", "llama_one_kv_head", "mistral_sliding", "gemma3_hybrid"]
    made = subprocess.run(
        [sys.executable, HERE.parent / "make_models.py", *names], check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def engine(models: Path) -> Engine:
    return Engine(models)
