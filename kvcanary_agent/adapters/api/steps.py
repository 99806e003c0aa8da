"""From what an engine keeps about a step, lists or tensors, to a `ForwardStep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcanary_agent.adapters.api.pools import WatchedPool
from kvcanary_agent.canary import ForwardStep, GroupStep, KnownTokens


class StepError(ValueError):
    """A value of a step that does not fit the others; the message names it, what was found and what is needed."""


def step(
    pool: WatchedPool,
    *,
    requests: Sequence[object] | torch.Tensor,
    block_table: Any,
    table_rows: Any = None,
    token_ids: Any = None,
    write_slots: Any = None,
    positions: Any = None,
    prefix_lens: Any = None,
    seq_lens: Any = None,
    query_lens: Any = None,
    query_offsets: Any = None,
    known_tokens: Any = None,
    namespaces: Sequence[object] | None = None,
) -> ForwardStep:
    """A step.

    Values are tensors on any device, or numbers and lists on the host. A tensor on the pool's device is used as it is;
    anything else is copied there. Values for each row are as many as there are requests, or more: then the first count.

    Args:
        pool: Which pool.
        requests: ``[rows]`` ids. A tensor on a GPU has to be waited for.
        block_table: ``[rows, blocks]``, lists of any lengths; or ``[rows]`` where a request has one block. A list of
            one for each group, if the pool has several; ``write_slots`` then, too.
        table_rows: ``[rows]``: the row of ``block_table`` of each request, where it has one for every possible request.
        token_ids: ``[tokens]``, or ``[rows, tokens of each]``; None if they are not known.
        write_slots: ``[tokens]``; None: the slots that positions and block table give.
        positions: ``[tokens]``; None: those after the prefix.
        prefix_lens: ``[rows]`` tokens computed before; None: from the first position of each row, or ``seq_lens``.
        seq_lens: ``[rows]`` tokens with the new ones.
        query_lens: ``[rows]`` new tokens; ``query_offsets``: ``[rows + 1]`` their prefix sum. None of both: each row
            has as many as the others.
        known_tokens: ``[rows]`` lists of all tokens so far, or a tensor of them with -1 where there is none.
        namespaces: ``[rows]`` what else the K/V depend on, see `ForwardStep`.

    Raises:
        StepError: If the values do not fit each other.
    """
    groups = pool.canary.layout.groups
    names = [str(each) for each in (requests.tolist() if isinstance(requests, torch.Tensor) else requests)]
    of = _Values(pool.canary.layout.device, len(names))
    tables = _of_groups("block_table", block_table, len(groups))
    all_slots = _of_groups("write_slots", write_slots, len(groups))
    tokens = _new_tokens(token_ids, all_slots[0], positions)
    offsets = _offsets(of, tokens, query_lens, query_offsets)
    lengths = offsets[1:] - offsets[:-1]
    at = None if positions is None else of.tensor("positions", positions, tokens)
    if prefix_lens is not None:
        prefix = of.rows("prefix_lens", prefix_lens)
    elif seq_lens is not None:
        prefix = of.rows("seq_lens", seq_lens) - lengths
    elif at is not None and tokens:
        prefix = at[offsets[:-1].to(torch.int64).clamp(max=tokens - 1)]
    else:
        raise StepError("nothing says how long the prefixes are; give prefix_lens, seq_lens or positions")
    if at is None:
        row = _row_of_each(offsets, tokens)
        at = prefix[row] + torch.arange(tokens, device=of.device) - offsets[row]
    group_steps = []
    for group, blocks, slots in zip(groups, tables, all_slots, strict=True):
        table = of.table("block_table", blocks, table_rows)
        if slots is not None:
            to = of.tensor("write_slots", slots, tokens)
        else:
            to = _slots_by(table, _row_of_each(offsets, tokens), at, group.block_size)
        group_steps.append(GroupStep(block_table=table, write_slots=to))
    return ForwardStep(
        requests=names,
        prefix_lens=prefix,
        query_offsets=offsets,
        token_ids=torch.zeros_like(at) if token_ids is None else of.tensor("token_ids", token_ids, tokens),
        positions=at,
        groups=group_steps,
        known_tokens=None if known_tokens is None else _known(of, known_tokens),
        namespaces=None if namespaces is None else _namespaces(namespaces, of.num_rows),
    )


class _Values:
    """Brings values to the pool's device, as integers, and sees that they have the right shape."""

    def __init__(self, device: torch.device, num_rows: int) -> None:
        self.device, self.num_rows = device, num_rows

    def tensor(self, name: str, value: Any, length: int) -> torch.Tensor:
        """``[length]``."""
        found = self._integers(name, value).flatten()
        if found.shape[0] != length:
            raise StepError(f"{name} has {found.shape[0]} values, but there are {length} new tokens")
        return found

    def rows(self, name: str, value: Any, more: int = 0) -> torch.Tensor:
        """``[rows + more]``; a number stands for every row."""
        wanted = self.num_rows + more
        found = self._integers(name, value)
        if found.dim() == 0:
            return found.expand(wanted)
        if found.dim() != 1 or found.shape[0] < wanted:
            raise StepError(f"{name} has shape {tuple(found.shape)}, but there are {self.num_rows} requests")
        return found[:wanted]

    def table(self, name: str, value: Any, rows: Any = None) -> torch.Tensor:
        """``[rows, any]``; lists are padded with -1."""
        found = self._integers(name, _padded(value))
        if found.dim() == 1:
            found = found[:, None]
        if rows is not None and found.dim() == 2 and found.shape[0]:
            # Out of range, an index would end a process with a GPU; within, the tokens tell that it is wrong.
            found = found[self.rows("table_rows", rows).to(torch.int64).clamp(0, found.shape[0] - 1)]
        if found.dim() != 2 or found.shape[0] < self.num_rows:
            raise StepError(f"{name} has shape {tuple(found.shape)}, wanted [{self.num_rows} requests, blocks]")
        return found[: self.num_rows]

    def _integers(self, name: str, value: Any) -> torch.Tensor:
        found = value if isinstance(value, torch.Tensor) else _from_host(name, value)
        if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
            raise StepError(f"{name} has dtype {found.dtype}, wanted integers")
        return found if found.device == self.device else found.to(self.device, non_blocking=True)


def _from_host(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, torch.Tensor) for each in value):
        return torch.cat([each.flatten() for each in value])
    if isinstance(value, (list, tuple)) and not value:
        return torch.zeros(0, dtype=torch.int64)
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StepError(f"{name} is a {type(value).__name__} that is no tensor of integers: {error}") from None


def _padded(value: Any) -> Any:
    """Lists of any lengths as one tensor, with -1 where they end."""
    if not isinstance(value, (list, tuple)) or not value:
        return value
    if all(isinstance(row, torch.Tensor) and row.dim() == 1 for row in value):
        return torch.nn.utils.rnn.pad_sequence(list(value), batch_first=True, padding_value=-1)
    if not all(isinstance(row, (list, tuple)) for row in value):
        return value
    longest = max(1, *(len(row) for row in value))
    return [[*row, *[-1] * (longest - len(row))] for row in value]


def _of_groups(name: str, value: Any, count: int) -> list[Any]:
    """One value for each group."""
    if value is None or count == 1:
        return [value] * count
    if not isinstance(value, (list, tuple)) or len(value) != count:
        raise StepError(f"{name} must be a list of {count}, one for each group of layers")
    return list(value)


def _new_tokens(token_ids: Any, write_slots: Any, positions: Any) -> int:
    for name, given in (("token_ids", token_ids), ("write_slots", write_slots), ("positions", positions)):
        if given is not None:
            return int((given if isinstance(given, torch.Tensor) else _from_host(name, given)).numel())
    raise StepError("nothing says how many tokens are new; give token_ids, write_slots or positions")


def _offsets(of: _Values, tokens: int, query_lens: Any, query_offsets: Any) -> torch.Tensor:
    """``[rows + 1]``."""
    if query_offsets is not None:
        return of.rows("query_offsets", query_offsets, more=1)
    if query_lens is not None:
        lengths = of.rows("query_lens", query_lens)
        if not isinstance(query_lens, torch.Tensor) and (total := _total(query_lens, of.num_rows)) != tokens:
            raise StepError(f"query_lens add up to {total}, but there are {tokens} new tokens")
        return torch.nn.functional.pad(lengths.cumsum(0).clamp(max=tokens), (1, 0))
    if of.num_rows == 0 or tokens % of.num_rows:
        raise StepError(
            f"{tokens} new tokens of {of.num_rows} requests: not the same number for each; give query_lens or "
            "query_offsets"
        )
    return torch.arange(of.num_rows + 1, device=of.device) * (tokens // of.num_rows)


def _row_of_each(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[tokens]`` int64: the row of each new token."""
    tokens_in_order = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    row = torch.searchsorted(offsets[1:].contiguous(), tokens_in_order, right=True)
    return row.clamp(max=max(0, offsets.shape[0] - 2))


def _slots_by(table: torch.Tensor, row: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """``[tokens]``: the slots that the block table gives; -1 where it has no block."""
    column = torch.div(positions, size, rounding_mode="floor")
    block = table[row, column.clamp(0, max(0, table.shape[1] - 1))]
    inside = (column >= 0) & (column < table.shape[1]) & (block >= 0)
    return torch.where(inside, block * size + positions % size, -1)


def _total(lengths: Any, num_rows: int) -> int:
    return lengths * num_rows if isinstance(lengths, int) else sum(map(int, lengths[:num_rows]))


def _known(of: _Values, value: Any) -> KnownTokens:
    tokens = of.table("known_tokens", value)
    lengths = None
    if isinstance(value, (list, tuple)):
        lengths = of.rows("known_tokens", [len(row) for row in value])
    return KnownTokens(tokens=tokens, rows=torch.arange(of.num_rows, device=of.device), lengths=lengths)


def _namespaces(value: Sequence[object], num_rows: int) -> list[str | None]:
    if len(value) < num_rows:
        raise StepError(f"namespaces has {len(value)} values, but there are {num_rows} requests")
    return [None if each is None else str(each) for each in value[:num_rows]]
