"""An adapter that lets SGLang's n-gram speculation run on a CPU with its attention in plain torch.

Used as ``KVCANARY_ADAPTERS=sglang,/path/to/this/file``, with ``SGLANG_NATIVE_MOVE_KV_CACHE=1``. The engine proposes
drafts with compiled code and works on them with kernels of the package ``sgl_kernel``; here torch does, for drafts of
which each follows the one before, not for a tree of them. Drafts are what followed the request's last token the last
time, and where nothing did, wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from kvcanary_agent.activation.patching import patch_method

targets = (
    "sglang.kernels.ops.kvcache.cache_move",
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.eagle",
    "sglang.kernels.ops.speculative.reconstruct_tree",
    "sglang.kernels.ops.speculative.spec_tree",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.mem_cache.allocation",
    "sglang.srt.speculative.ngram_worker",
)


def patch(module: ModuleType) -> None:
    """Do without `sgl_kernel`."""
    name = module.__name__.rpartition(".")[2]
    if name == "torch_native_backend":
        patch_method(module.TorchNativeAttnBackend, "forward_extend", _around_forward_extend)
        return
    for replaced, with_ in _REPLACED[name].items():
        setattr(module, replaced, with_)


class LastOccurrence:
    """Proposes what followed a request's last token before."""

    def __init__(self, *, draft_token_num: int, **options: Any) -> None:
        self._drafts = draft_token_num

    def batch_get(self, req_ids: list[str], batch_tokens: list[list[int]], total_lens: list[int]) -> tuple[Any, Any]:
        """Drafts ``[requests * drafts]``, each request's last token first, and who follows whom."""
        proposed = torch.tensor([self._propose(tokens) for tokens in batch_tokens], dtype=torch.int64)
        follows = torch.ones(self._drafts, self._drafts, dtype=torch.int64).tril().repeat(len(batch_tokens), 1)
        return proposed.flatten().numpy(), follows.flatten().numpy()

    def _propose(self, tokens: list[int]) -> list[int]:
        *before, last = tokens
        at = len(before) - before[::-1].index(last) if last in before else len(tokens)
        followed = [last, *tokens[at:]][: self._drafts]
        return followed + [2] * (self._drafts - len(followed))

    def batch_put(self, batch_tokens: list[list[int]]) -> None:
        """Nothing is remembered."""

    def erase_match_state(self, req_ids: list[str]) -> None:
        """Nothing is remembered."""

    def synchronize(self) -> None:
        """Nothing goes on elsewhere."""

    def reset(self) -> None:
        """Nothing is remembered."""


def _slots_from_table(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor, width: int
) -> None:
    spans = [table[row, start:end] for row, start, end in zip(*(x.tolist() for x in (rows, starts, ends)), strict=True)]
    found = torch.cat(spans)
    slots[: found.shape[0]] = found


def _slots_to_table(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor, width: int
) -> None:
    at = 0
    for row, start, end in zip(*(x.tolist() for x in (rows, starts, ends)), strict=True):
        table[row, start:end] = slots[at : at + end - start]
        at += end - start


def _accepted_slots(accepted: torch.Tensor, slots: torch.Tensor, found: torch.Tensor) -> None:
    accepted = accepted.flatten()
    accepted = accepted[accepted >= 0].long()
    found[: accepted.shape[0]] = slots[accepted]


def _chain(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    batch_size: int,
    drafts: int,
) -> None:
    order = torch.arange(drafts)
    positions.copy_((lengths[:, None] + order).flatten())
    index.copy_(torch.arange(batch_size)[:, None] * drafts + order)
    next_token.copy_(torch.where(order + 1 < drafts, order + 1, -1).expand(batch_size, -1))
    next_sibling.fill_(-1)


def _accept(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **links: torch.Tensor,
) -> None:
    """Accept drafts up to the first that is not what the model predicts."""
    drafts = candidates.shape[1]
    right = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(1).sum(1)
    order = torch.arange(drafts)
    accepted = order <= right[:, None]
    index = torch.arange(candidates.shape[0])[:, None] * drafts + order
    accept_index.copy_(torch.where(accepted, index, -1))
    accept_token_num.copy_(right)
    predicts.copy_(target_predict.flatten())


def _around_forward_extend(
    call: Callable[..., Any],
    backend: Any,
    /,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not forward_batch.forward_mode.is_target_verify():
        return call(q, k, v, layer, forward_batch, *args, **kwargs)
    fields = ("seq_lens", "extend_prefix_lens", "extend_seq_lens")
    before = {name: getattr(forward_batch, name) for name in fields}
    drafts = forward_batch.spec_info.draft_token_num
    lengths = forward_batch.seq_lens
    forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens = lengths, torch.full_like(lengths, drafts)
    forward_batch.seq_lens = lengths + drafts
    try:
        return call(q, k, v, layer, forward_batch, *args, **kwargs)
    finally:
        for name, value in before.items():
            setattr(forward_batch, name, value)


_REPLACED: dict[str, dict[str, Any]] = {
    # Only tried out when the pool is made: what is moved is moved by torch.
    "cache_move": {"copy_all_layer_kv_cache_cpu": lambda *args: None},
    "cache_locs": {"assign_extend_cache_locs_cpu": _slots_from_table},
    "eagle": {"fill_accept_out_cache_loc_cpu": _accepted_slots},
    "reconstruct_tree": {"reconstruct_indices_from_tree_mask": _chain},
    "spec_tree": {"sgl_verify_tree_greedy_cpu": _accept},
    "allocation": {"assign_req_to_token_pool_cpu": _slots_to_table},
    "ngram_worker": {"NgramCorpus": LastOccurrence},
}
