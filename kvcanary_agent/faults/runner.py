"""Runs a case: the engine's host side, one pool and one canary per rank, and the judgement of what was reported."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcanary_agent.canary import (
    Canary,
    ForwardStep,
    GroupStep,
    Kind,
    KnownTokens,
    Sink,
    Violation,
    compare_ranks,
)
from kvcanary_agent.settings import Settings

from . import operations as ops
from .engine_state import EngineState, PlannedRow
from .pool import EmbeddedPool, StoredBlocks, token_contexts

_SETTINGS = Settings(mode="log", content="full", sweep_slots_per_step=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A violation, the index of the operation during which it was reported, and the rank that reported it."""

    operation: int
    rank: int
    violation: Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The exception that ended a case, and during which operation (-1: before the first)."""

    operation: int
    message: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case.

    Attributes:
        reports: Everything that was reported, in order.
        problems: Why the case fails, one sentence each; empty if it passes.
        crash: The exception that ended it, if one did; that too is a problem.
    """

    case: ops.Case
    reports: tuple[Report, ...]
    problems: tuple[str, ...]
    crash: Crash | None

    @property
    def passed(self) -> bool:
        return not self.problems


def run_case(case: ops.Case) -> Outcome:
    """Run one case from its first to its last operation and judge it. Never raises for what the canary does."""
    reports: list[Report] = []
    crash = None
    index = -1
    try:
        run = _Run(case.geometry, reports)
        for index, operation in enumerate(case.operations):
            run.perform(index, operation)
    except Exception as error:
        crash = Crash(operation=index, message=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    problems = judge(case.expectations, reports)
    if crash is not None:
        problems = [f"operation {index} ended with {crash.message}", *problems]
    return Outcome(case=case, reports=tuple(reports), problems=tuple(problems), crash=crash)


def judge(expectations: Sequence[ops.Expectation], reports: Sequence[Report]) -> list[str]:
    """What is wrong with these reports, one sentence each."""
    problems: list[str] = []
    unexpected = dict.fromkeys(
        f"{report.violation.kind} during operation {report.operation}, which nothing expects"
        for report in reports
        if not any(
            report.violation.kind in expected.kinds and report.operation >= expected.first for expected in expectations
        )
    )
    problems.extend(unexpected)
    for expected in expectations:
        matching = [
            report.violation
            for report in reports
            if report.violation.kind in expected.kinds
            and expected.first <= report.operation <= expected.last
            and expected.req in (None, report.violation.request)
        ]
        wanted = f"{_either(expected.kinds)} during operations {expected.first} to {expected.last}"
        if expected.req is not None:
            wanted += f" for request {expected.req}"
        missing = sorted(expected.slots - {violation.slot for violation in matching})
        if missing:
            problems.append(f"no {wanted} for slot {', '.join(map(str, missing))}")
        elif not matching:
            problems.append(f"no {wanted}")
    return problems


def _either(kinds: frozenset[Kind]) -> str:
    return " or ".join(sorted(kinds))


class _Sink(Sink):
    """Adds what one rank's canary reports to the reports of the run."""

    def __init__(self, run: _Run, rank: int) -> None:
        self._run, self._rank = run, rank

    def violation(self, violation: Violation) -> None:
        self._run.reports.append(Report(operation=self._run.index, rank=self._rank, violation=violation))

    def lost_violations(self, count: int) -> None:
        raise RuntimeError(f"{count} violations did not fit the canary's ring")


class _Run:
    """A case while it runs.

    Attributes:
        index: The operation that is being performed, -1 before the first.
        reports: Everything reported so far.
    """

    def __init__(self, geometry: ops.Geometry, reports: list[Report]) -> None:
        self.index = -1
        self.reports = reports
        self._geometry = geometry
        self._state = EngineState(geometry)
        self._pools = [EmbeddedPool(geometry, rank) for rank in range(geometry.ranks)]
        self._canaries = [Canary(pool.layout(), _SETTINGS, _Sink(self, rank)) for rank, pool in enumerate(self._pools)]
        self._stored: dict[str, list[StoredBlocks]] = {}
        # For replays: what each row of each forward wrote, [(group, slots, contexts)].
        self._written: dict[tuple[int, str], list[tuple[int, Sequence[int], Sequence[bytes]]]] = {}

    def perform(self, index: int, operation: ops.Operation) -> None:
        self.index = index
        match operation:
            case ops.Alloc(req=req, blocks=blocks, group=group):
                for canary in self._canaries:
                    canary.allocated(blocks, group=group, request=req)
            case ops.Share(req=req, group=group):
                blocks = self._state.blocks_of_reference(operation)
                for canary in self._canaries:
                    canary.shared(blocks, group=group, request=req)
            case ops.FreeRequest(cached=cached) | ops.FreeBlocks(cached=cached):
                for given in self._state.given_back(operation):
                    for canary in self._canaries:
                        canary.freed(given.blocks, group=given.group, request=given.req, cached=cached)
            case ops.Forward():
                self._forward(operation)
            case ops.ReplayWrite(of=of, req=req):
                for group, slots, contexts in self._written[of, req]:
                    for pool in self._pools:
                        pool.write(group, slots, contexts)
            case ops.Poke(rank=rank):
                for pool in self._pools if rank is None else [self._pools[rank]]:
                    pool.poke(operation)
            case ops.CopyBlock(source=source, destination=destination, group=group):
                for pool, canary in zip(self._pools, self._canaries, strict=True):
                    pool.copy_block(operation)
                    canary.copied([source], [destination], group=group)
            case ops.StoreBegin(key=key, blocks=blocks, group=group):
                for canary in self._canaries:
                    canary.stored(key, blocks, group=group)
            case ops.StoreEnd(key=key, blocks=blocks, group=group):
                self._stored[key] = [pool.store(group, blocks) for pool in self._pools]
            case ops.Load():
                self._load(operation)
            case ops.Index(key_tokens=tokens, block=block, group=group):
                namespace = self._state.namespace_of_block(group, block)
                for canary in self._canaries:
                    canary.indexed(tokens, block, group=group, namespace=namespace)
            case ops.Rollback(req=req, to=to):
                for canary in self._canaries:
                    canary.rolled_back(req, to)
            case ops.Epoch():
                for canary in self._canaries:
                    canary.weights_changed()
            case ops.Sweep():
                for canary in self._canaries:
                    canary.sweep()
            case ops.Request() | ops.Map():
                pass
        self._state.apply(index, operation)

    def _load(self, load: ops.Load) -> None:
        for rank, (pool, canary) in enumerate(zip(self._pools, self._canaries, strict=True)):
            if load.rank in (None, rank):
                pool.load(self._stored[load.key][rank], load.blocks, load.layers)
                canary.loaded(load.key, load.blocks, group=load.group, request=load.req)

    def _forward(self, forward: ops.Forward) -> None:
        rows = self._state.plan(forward)
        step = _step(rows, forward, len(self._geometry.groups))
        for canary in self._canaries:
            canary.before_forward(step)
        for row in rows:
            contexts = token_contexts(
                row.history, row.tokens, row.positions, namespace=row.namespace, epoch=self._state.epoch
            )
            writes = [(group, slots, contexts) for group, slots in enumerate(row.landings)]
            self._written[self.index, row.req] = list(writes)
            for group, slots, _ in writes:
                for pool in self._pools:
                    pool.write(group, slots, contexts)
        for pool in self._pools:
            pool.write_garbage(forward.group, forward.pad, forward.pad_value, self.index)
        for canary in self._canaries:
            canary.after_forward()
        if len(self._canaries) > 1:
            compare_ranks(self._canaries)


def _step(rows: Sequence[PlannedRow], forward: ops.Forward, num_groups: int) -> ForwardStep:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row.tokens))
    return ForwardStep(
        requests=[row.req for row in rows],
        prefix_lens=_int32([row.start for row in rows]),
        query_offsets=_int32(offsets),
        token_ids=_int32([token for row in rows for token in row.tokens]),
        positions=_int32([position for row in rows for position in row.positions]),
        groups=[
            GroupStep(
                block_table=_matrix([row.tables[group] for row in rows]),
                write_slots=_int32([slot for row in rows for slot in row.slots[group]]),
                pad_slots=_int32(forward.pad) if group == forward.group else None,
            )
            for group in range(num_groups)
        ],
        known_tokens=KnownTokens(
            tokens=_matrix([[-1 if token is None else token for token in row.known] for row in rows]),
            rows=_int32(range(len(rows))),
            lengths=_int32([len(row.known) for row in rows]),
        ),
        namespaces=[row.namespace for row in rows],
    )


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _matrix(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """``[rows, longest]`` int32, at least one column wide, filled up with -1."""
    width = max([1, *map(len, rows)])
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32).view(len(rows), width)
