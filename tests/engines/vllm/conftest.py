"""Run from the root of the checkout, with the Python of ``environment.sh vllm``: ``-m pytest tests/engines/vllm``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import made
from tests.engines.vllm.harness import Engine


@pytest.fixture(scope="session")
def models() -> Path:
    return made("llama", "llama_one_kv_head", "mistral_sliding", "gemma3_hybrid", "deepseek_mla", "lora_a", "lora_b")


@pytest.fixture(scope="session")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(models, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="session")
def llama_without_agent(engine: Engine) -> dict[str, Any]:
    """The result of `generate.py` on the model ``llama``, however it is scheduled and whatever drafts for it."""
    return engine.generate()
