"""The checks as Triton kernels: no allocation, no synchronisation and no host read on the way of a step.

One file per operation: the kernel, then the launcher that chooses its grid.
"""

from .checks import TritonChecks

__all__ = ["TritonChecks"]
