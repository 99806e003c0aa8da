"""Random histories of a toy engine, faults included, for comparing implementations of the checks with each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from kvcanary_agent.canary import ForwardStep
from kvcanary_agent.kernels.checks import Checks
from kvcanary_agent.kernels.plan import Fault
from kvcanary_agent.kernels.records import Column
from kvcanary_agent.kernels.ring import Field
from tests.canary.toy import Row, ToyEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a history is about."""

    layout: str
    block_size: int
    content: str
    known_tokens: bool
    reports_ownership: bool
    window: int | None
    seed: int
    steps: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a canary has seen and kept: ring entries after each pass, counts, and its records at the end."""

    entries: list[list[tuple[int, ...]]]
    counts: dict[str, tuple[int, int]]
    tables: list[torch.Tensor]
    fingerprints: list[torch.Tensor]


@contextmanager
def checks_by(implementation: Callable[..., Checks]) -> Iterator[None]:
    """Canaries made inside use this implementation."""
    with patch("kvcanary_agent.canary.canary.checks_for", implementation):
        yield


def hear(setting: Setting, implementation: Callable[..., Checks]) -> Heard:
    """Run the history of a setting."""
    group = {} if setting.window is None else {"window": setting.window}
    with checks_by(implementation):
        toy = ToyEngine(
            setting.layout,
            blocks=40,
            block_size=setting.block_size,
            reports_ownership=setting.reports_ownership,
            known_tokens=setting.known_tokens,
            settings={"content": setting.content, "scrub_period": 6, "sweep_slots_per_step": 2},
            null_block=0,
            **group,
        )
    entries: list[list[tuple[int, ...]]] = []
    report = toy.canary._reporter.faults

    def spy(of_pass: list[list[int]]) -> None:
        entries.append(sorted(tuple(entry) for entry in of_pass))
        report(of_pass)

    with patch.object(toy.canary._reporter, "faults", spy):
        _History(toy, random.Random(setting.seed)).run(steps=setting.steps)
        # What a GPU has found in the last passes is fetched by looks that never came.
        toy.canary._hear(wait=True)
    counts: dict[str, tuple[int, int]] = {}
    for _, _, of_pass, _ in toy.sink.passes:
        for check, (slots, failed) in of_pass.slots.items():
            before = counts.get(check, (0, 0))
            counts[check] = before[0] + slots, before[1] + failed
    records = toy.canary._records
    return Heard(
        entries=entries,
        counts=counts,
        tables=[each.table[:, : Column.CLAIM] for each in records],
        fingerprints=[each.fingerprints for each in records],
    )


def without_content_of_broken_chains(entries: list[list[tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
    """Bytes that differ where the chain breaks, too, are evidence that only some implementations look for."""
    kept = []
    for of_pass in entries:
        broken = {(entry[Field.GROUP], entry[Field.SLOT]) for entry in of_pass if entry[Field.KIND] == Fault.CHAIN}
        kept.append(
            [
                entry
                for entry in of_pass
                if entry[Field.KIND] != Fault.CONTENT or (entry[Field.GROUP], entry[Field.SLOT]) not in broken
            ]
        )
    return kept


class _History:
    def __init__(self, toy: ToyEngine, choose: random.Random) -> None:
        self._toy, self._choose = toy, choose

    def run(self, *, steps: int) -> None:
        toy, choose = self._toy, self._choose
        toy.start("a", [choose.randrange(50) for _ in range(choose.randrange(1, 3 * toy.block_size))])
        for number in range(steps):
            self._fault_in_memory()
            self._step(number)

    def _fault_in_memory(self) -> None:
        toy, choose = self._toy, self._choose
        if choose.random() < 0.3:
            group = choose.randrange(len(toy.groups))
            slot = choose.randrange(toy.groups[group].num_slots)
            toy.poke(slot, choose.randrange(len(toy.groups[group].parts)), mask=1 << choose.randrange(7), group=group)

    def _step(self, number: int) -> None:
        toy, choose = self._toy, self._choose
        running = [name for name, request in toy.requests.items() if request.tables[0] and choose.random() < 0.7]
        rows = [row for row in map(self._continue, running) if row is not None]
        if choose.random() < 0.4 and len(toy.free_blocks) > 12:
            rows.append(self._arrive(f"r{number}"))
        if not rows:
            return
        step, writes = toy.plan(*rows, pad_slots=self._padding())
        toy.canary.before_forward(self._disturbed(step))
        if choose.random() < 0.1:
            toy.canary.abandon_step()
            return
        toy.forward(write for write in writes if choose.random() > 0.05)
        for row in rows:
            request = toy.requests[row.request]
            request.computed = (request.computed if row.start is None else row.start) + row.count
        toy.canary.after_forward()

    def _arrive(self, name: str) -> Row:
        toy, choose = self._toy, self._choose
        namespace = choose.choice([None, None, "other"])
        donor = choose.choice([request for request in toy.requests.values() if request.tables[0]])
        shared = choose.randrange(donor.computed // toy.block_size + 1)
        tokens = donor.tokens[: shared * toy.block_size]
        if choose.random() < 0.2:
            tokens = [token + choose.randrange(2) for token in tokens]
        new = choose.randrange(1, 2 * toy.block_size)
        toy.request(name, [*tokens, *[choose.randrange(50) for _ in range(new)]], namespace)
        if shared:
            toy.share(name, donor.name, shared)
        toy.allocate(name, -(-(shared * toy.block_size + new) // toy.block_size) - shared)
        return Row(request=name, count=new)

    def _continue(self, name: str) -> Row | None:
        toy, choose = self._toy, self._choose
        request = toy.requests[name]
        if request.computed // toy.block_size >= len(request.tables[0]):
            if len(toy.free_blocks) < 2:
                return None
            toy.allocate(name, 1)
        request.tokens.append(choose.randrange(50))
        if len(request.tokens) <= request.computed:
            return None
        fault = choose.random()
        if fault < 0.05:
            return Row(request=name, slots=[choose.randrange(-1, toy.groups[0].num_slots + 2)])
        if fault < 0.1:
            return Row(request=name, tokens=[choose.randrange(50)])
        if fault < 0.15:
            return Row(request=name, positions=[request.computed + 1])
        return Row(request=name)

    def _padding(self) -> list[int] | None:
        toy, choose = self._toy, self._choose
        if choose.random() < 0.5:
            return None
        return [choose.choice([-1, 0, 1, choose.randrange(-3, toy.groups[0].num_slots + 3)]) for _ in range(3)]

    def _disturbed(self, step: ForwardStep) -> ForwardStep:
        choose = self._choose
        for group_step in step.groups:
            table = group_step.block_table
            if table.shape[1] and choose.random() < 0.2:
                row, column = choose.randrange(table.shape[0]), choose.randrange(table.shape[1])
                table[row, column] = choose.randrange(-1, 42)
        return step
