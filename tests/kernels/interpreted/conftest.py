"""Tests of kernels in Triton's interpreter, which a process has from its start or not at all."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    # `tests/kernels/test_kernels.py` runs them in a process that has it.
    collect_ignore_glob = ["test_*.py"]
