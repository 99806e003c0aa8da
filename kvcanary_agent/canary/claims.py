"""What the prefix index promises: that a block holds the K/V of these tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcanary_agent.kernels.hashing import mix
from kvcanary_agent.kernels.records import Column, Records
from kvcanary_agent.kernels.transit import Answer, lists_to_device


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A block's promise.

    Attributes:
        length: How many tokens the prefix has that ends with the block.
        chain: The sum that they add to a seed, a signed 64-bit number.
        chain_of_block: The share of the block's own tokens in it.
        namespace: Of the prefix.
    """

    length: int
    chain: int
    chain_of_block: int
    namespace: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the records of a block say, when all its slots are written.

    Attributes:
        seed, chain_after: Of the last slot.
        chain_of_block: What the recorded tokens add at the claim's positions.
        writer, written_step: Of the first slot.
    """

    seed: int
    chain_after: int
    chain_of_block: int
    writer: int
    written_step: int


class IndexClaims:
    """The claims of one group that are not judged yet.

    A claim is looked at when it is asked for, and judged with the next answer that says that its block is written.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._open: dict[int, Claim] = {}
        self._asked: tuple[list[tuple[int, Claim]], Answer] | None = None

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, tokens: Sequence[int], block: int, namespace: str | None) -> None:
        """The index promises that ``block`` holds the last ``block_size`` of ``tokens``."""
        chain, of_block = _chains(tokens, self._records.block_size)
        self._open[block] = Claim(len(tokens), chain, of_block, namespace)

    def drop(self, blocks: Sequence[int]) -> None:
        """These blocks are handed out as new: nothing is promised of them any more."""
        for block in blocks:
            self._open.pop(block, None)

    def forget(self) -> None:
        """Nothing is promised."""
        self._open.clear()
        self._asked = None

    def ask(self) -> None:
        """Have the device look at every open claim, unless it is still at it."""
        if self._asked is not None or not self._open:
            return
        claims = list(self._open.items())
        blocks, starts = lists_to_device(
            [[block for block, _ in claims], [claim.length - self._records.block_size for _, claim in claims]],
            self._records.device,
        )
        answer = Answer(self._look_up(blocks, starts))
        answer.ask()
        self._asked = claims, answer

    def answers(self, *, wait: bool = False) -> Iterator[tuple[int, Claim, Evidence]]:
        """Block, claim and evidence of each claim that can be judged by now."""
        if self._asked is None:
            return
        claims, answer = self._asked
        rows = answer.look(wait=wait)
        if rows is None:
            return
        self._asked = None
        for (block, claim), (complete, seed, chain_after, of_block, writer, step) in zip(claims, rows, strict=True):
            if not complete:
                continue
            if self._open.get(block) is claim:
                del self._open[block]
            yield (
                block,
                claim,
                Evidence(seed=seed, chain_after=chain_after, chain_of_block=of_block, writer=writer, written_step=step),
            )

    def _look_up(self, blocks: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """For each block whether it is written, and the fields of `Evidence`: ``[blocks, 6]`` int64."""
        records, size = self._records, self._records.block_size
        generation = records.generation.view(-1, size)[blocks]
        complete = (generation == records.block_generation[blocks][:, None]).all(1)
        table = records.table.view(records.num_blocks, size, len(Column))
        last = table[blocks, size - 1]
        positions = starts[:, None] + torch.arange(size, device=blocks.device)
        of_block = mix(table[blocks, :, Column.TOKEN], positions).sum(1)
        first = blocks * size
        return torch.stack(
            [
                complete.to(torch.int64),
                last[:, Column.SEED],
                last[:, Column.CHAIN_AFTER],
                of_block,
                records.owner[first].to(torch.int64),
                records.step[first].to(torch.int64),
            ],
            1,
        )


def _chains(tokens: Sequence[int], block_size: int) -> tuple[int, int]:
    """What all tokens and what the last ``block_size`` of them add to a chain, worked out on the host."""
    added = mix(torch.tensor(tokens, dtype=torch.int64, device="cpu"), torch.arange(len(tokens), device="cpu"))
    return int(added.sum()), int(added[-block_size:].sum())
