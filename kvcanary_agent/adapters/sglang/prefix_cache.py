"""What the prefix cache holds: for an audit whenever the scheduler has nothing to do, and to take corrupt pages out.

The engine's radix tree can list every slot that it holds, with position and predecessor: it does so for the engine's
own canary. Where it cannot, what the tree holds is checked when a request hits it, and its bytes by the patrol.
"""

from __future__ import annotations

from typing import Any

import torch


def can_be_walked(tree_cache: Any) -> bool:
    """Whether this prefix cache lists what it holds."""
    return callable(getattr(getattr(tree_cache, "tree_core", None), "walk_for_kv_canary", None))


def walk(tree_cache: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots, positions and the slots before, ``[n]`` int64 each on the device; -1 before the start of a prompt."""
    found = tree_cache.tree_core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=False)
    slots, positions, previous = found.slot_indices, found.positions, found.prev_slot_indices
    return slots.to(device), positions.to(device), previous.to(device)


def pages_of(tree_cache: Any, page_size: int, *, unlocked_only: bool) -> set[int]:
    """The pages that it holds, or only those that no running request uses."""
    found = tree_cache.tree_core.walk_for_kv_canary(unlocked_only=unlocked_only, swa_resident_only=False)
    return set((found.slot_indices // page_size).tolist())
