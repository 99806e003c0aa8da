"""Run from the root of the checkout, with the Python of ``environment.sh ../agents``: ``-m pytest tests/agents``."""

import pathlib

import pytest

from tests.activation.processes import ADAPTER, ENGINE, Processes


@pytest.fixture
def stand_in(tmp_path: pathlib.Path) -> Processes:
    """A folder that holds ``stand_in_engine``, and an ``adapter.py`` for it."""
    processes = Processes(tmp_path)
    processes.write("stand_in_engine.py", ENGINE)
    processes.write("adapter.py", ADAPTER.replace("print(", "(lambda *_, **__: None)("))
    return processes
