"""Folders to start processes in."""

import pathlib

import pytest

from tests.activation.processes import ADAPTER, ENGINE, Processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-matrix", action="store_true", help="every case of tests/activation/test_matrix.py")


@pytest.fixture
def processes(tmp_path: pathlib.Path) -> Processes:
    return Processes(tmp_path)


@pytest.fixture
def stand_in(processes: Processes) -> Processes:
    """A folder that holds ``stand_in_engine``, an ``adapter.py`` for it, and ``serve.py``, which runs one step."""
    processes.write("stand_in_engine.py", ENGINE)
    processes.write("adapter.py", ADAPTER)
    processes.write("serve.py", "import stand_in_engine\nprint(stand_in_engine.Runner().step(1))\n")
    return processes
