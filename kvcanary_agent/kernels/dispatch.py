"""Which implementation of the checks a device gets."""

from __future__ import annotations

from collections.abc import Callable

from .checks import Checks
from .records import Records
from .ring import ViolationRing
from .tuned import TunedChecks


def checks_for(records: Records, ring: ViolationRing, group: int, count: Callable[[str, int, int], None]) -> Checks:
    """The fastest checks for the records' device; all give the same results.

    Without Triton, or for a layout that its kernels do not follow, a GPU gets the plain ones: nothing is lost but time.
    """
    if records.device.type == "cpu":
        return TunedChecks(records, ring, group, count)
    if records.device.type == "cuda":
        try:
            from .triton import TritonChecks

            return TritonChecks(records, ring, group, count)
        except (ImportError, ValueError):
            pass
    return Checks(records, ring, group, count)
