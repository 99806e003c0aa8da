"""The checks in plain torch: what they mean, bit for bit, and what runs on CPUs.

Every function works on one group of layers.
"""

from .content import check_null_block, patrol, record_content, remeasure, verify_content, verify_transfer
from .reads import digest, plan_reads, verify_metadata
from .tokens import known_at
from .writes import check_padding, check_writes, enter_writes

__all__ = [
    "check_null_block",
    "check_padding",
    "check_writes",
    "digest",
    "enter_writes",
    "known_at",
    "patrol",
    "plan_reads",
    "record_content",
    "remeasure",
    "verify_content",
    "verify_metadata",
    "verify_transfer",
]
