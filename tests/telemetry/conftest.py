from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.otlp_receiver import GrpcOtlpReceiver, HttpOtlpReceiver, OtlpReceiver

REPOSITORY = Path(__file__).parents[2]

StartChild = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def no_opentelemetry_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpOtlpReceiver]:
    """An OTLP receiver that this process, and the children it starts, export to."""
    with HttpOtlpReceiver() as receiver:
        for variable, value in receiver.environment().items():
            monkeypatch.setenv(variable, value)
        yield receiver


@pytest.fixture(params=[GrpcOtlpReceiver, HttpOtlpReceiver], ids=["grpc", "http"])
def each_receiver(request: pytest.FixtureRequest) -> Iterator[OtlpReceiver]:
    with request.param() as receiver:
        yield receiver


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    """Starts ``python -c program`` with extra environment variables; it is ended with the test."""
    children: list[subprocess.Popen[str]] = []

    def start(program: str, **environment: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()
