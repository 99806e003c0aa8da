"""What is checked: the contract with adapters, and the checks of one pool."""

from .allocator import AllocatorCanary, AllocatorLayout
from .canary import Canary, compare_ranks
from .layout import KVGroup, KVLayout, KVPart, LayoutError
from .step import ForwardStep, GroupStep, KnownTokens
from .violation import BlockEvent, CheckCounts, Kind, KVCanaryError, Sink, Violation

__all__ = [
    "AllocatorCanary",
    "AllocatorLayout",
    "BlockEvent",
    "Canary",
    "CheckCounts",
    "ForwardStep",
    "GroupStep",
    "KVCanaryError",
    "KVGroup",
    "KVLayout",
    "KVPart",
    "Kind",
    "KnownTokens",
    "LayoutError",
    "Sink",
    "Violation",
    "compare_ranks",
]
