"""The canary of one pool: what adapters call, once per event and twice per step."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from kvcanary_agent.kernels import plan
from kvcanary_agent.kernels.checks import Checks
from kvcanary_agent.kernels.dispatch import checks_for
from kvcanary_agent.kernels.hashing import chain_seed
from kvcanary_agent.kernels.plan import Rows, Writes
from kvcanary_agent.kernels.records import UNKNOWN, Records
from kvcanary_agent.kernels.ring import ViolationRing
from kvcanary_agent.kernels.transit import Answer, is_asynchronous, lists_to_device, to_device
from kvcanary_agent.settings import Settings

from .block_log import BlockLog
from .claims import Evidence, IndexClaims
from .layout import KVGroup, KVLayout
from .neighbourhood import slots_around
from .occupancy import Occupancy
from .ownership import Misuse, Ownership
from .prefix_index import broken_entries
from .reporting import Recent, Reporter
from .schedule import Patrol, scrub_schedule
from .step import ForwardStep, GroupStep
from .transfers import StoredRecords, enter_foreign
from .violation import CheckCounts, Kind, KVCanaryError, Neighbourhood, Sink, Violation

RING_CAPACITY = 4096
# A part of fewer bytes than this may well hold the same bytes for two tokens.
_TELLING_BYTES = 8


class Canary:
    """Verifies, step by step, that what requests read from a pool is what was written for them.

    Not safe for concurrent use: all calls come from the thread that runs the model's steps.
    """

    def __init__(self, layout: KVLayout, settings: Settings, sink: Sink) -> None:
        """Allocate the records.

        Args:
            layout: The pool.
            settings: ``mode``, ``content``, ``scrub_period``, ``sweep_slots_per_step`` and ``reveal_tokens`` count.
            sink: Hears of violations and of every pass of checks.
        """
        self.layout = layout
        self.settings = settings
        self._sink = sink
        self._step = 0
        self._epoch = 0
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._failed: defaultdict[str, int] = defaultdict(int)
        self._pending: list[Any] | None = None
        self._broken_entries = Recent()
        self._read_last: tuple[Sequence[str], list[tuple[Rows, Any]]] | None = None
        # Owners and seeds of the last batch: most steps compute the same requests as the step before.
        self._batch: tuple[object, torch.Tensor, torch.Tensor] | None = None
        self._last_held_rows: list[tuple[list[int], torch.Tensor] | None] = [None] * len(layout.groups)
        # In-place updates must work in and outside inference mode, whichever the engine is in now.
        with torch.inference_mode(False):
            self._records = [_records_of(group, settings.content) for group in layout.groups]
            self._ring = ViolationRing(RING_CAPACITY, layout.device, len(layout.groups))
            self._ownership = [Ownership(g.num_blocks, g.null_block, g.device) for g in layout.groups]
            self._occupancy = [Occupancy(g.num_blocks, g.null_block, g.device) for g in layout.groups]
            self._checks = [
                checks_for(records, self._ring, index, self._count) for index, records in enumerate(self._records)
            ]
        # How often each block was handed out, or its contents given up, since the device was told last.
        self._voided: list[Counter[int]] = [Counter() for _ in layout.groups]
        self._claims = [IndexClaims(records) for records in self._records]
        # What a group's allocator did with blocks, in words, and whether that was wrong, for allocators on the device.
        self._unnamed: deque[tuple[int, str, Answer]] = deque()
        self._stored = [StoredRecords(records) for records in self._records]
        self._patrols = [Patrol(group) for group in layout.groups]
        self._logs = [BlockLog() for _ in layout.groups]
        self._reporter = Reporter(layout, self._ownership, self._logs, sink, settings.reveal_tokens)
        sink.records_memory(
            self._ring.num_bytes
            + sum(records.num_bytes for records in self._records)
            + sum(checks.num_bytes for checks in self._checks)
            + sum(ownership.num_bytes for ownership in self._ownership)
            + sum(occupancy.num_bytes for occupancy in self._occupancy),
            layout.num_bytes,
        )

    @property
    def step(self) -> int:
        """The number of the current step; the first is 1."""
        return self._step

    # Events

    def allocated(self, blocks: Sequence[int], *, group: int = 0, request: str | None = None) -> None:
        """The allocator hands these blocks to a request as new: whatever their records say no longer counts."""
        if not blocks:
            return
        self.recycled(blocks, group=group)
        self._logs[group].note(self._step, "allocated", request, blocks)
        if not self._reporter.reports_ownership:
            self._ownership[group].remember(blocks, request)
            return
        self._misused(group, self._ownership[group].allocated(blocks, request))

    def shared(self, blocks: Sequence[int], *, group: int = 0, request: str | None = None) -> None:
        """A prefix hit: the request takes one more reference to each of these blocks."""
        self._logs[group].note(self._step, "shared", request, blocks)
        if self._reporter.reports_ownership:
            self._misused(group, self._ownership[group].shared(blocks, request))

    def freed(self, blocks: Sequence[int], *, group: int = 0, request: str | None = None, cached: bool = False) -> None:
        """One reference to each of these blocks is taken back.

        Args:
            blocks: Block numbers.
            group: Which group of layers.
            request: Whose reference; None if that is not known.
            cached: The contents stay valid for a later `shared`.
        """
        self._logs[group].note(self._step, "cached" if cached else "freed", request, blocks)
        if self._reporter.reports_ownership:
            ownership = self._ownership[group]
            misuses = ownership.freed(blocks, request, cached)
            self._voided[group].update(set(ownership.unreadable(blocks)))
            self._misused(group, misuses)

    def taken(self, blocks: torch.Tensor, *, group: int = 0) -> None:
        """As `allocated`, from an allocator that keeps its lists on the device and does not say for whom it is.

        Args:
            blocks: ``[n]`` int64 on the pool's device; -1 stands for none.
            group: Which group of layers.
        """
        self._records[group].block_generation.index_add_(0, blocks.clamp(min=0), (blocks >= 0).to(torch.int32))
        wrong = self._occupancy[group].taken(blocks)
        self._ask_of(group, blocks, wrong, "handed out while {} still uses it: double allocation")

    def returned(self, blocks: torch.Tensor, *, group: int = 0) -> None:
        """As `freed`, from an allocator that keeps its lists on the device; nobody may read the blocks any more.

        Args:
            blocks: ``[n]`` int64 on the pool's device; -1 stands for none.
            group: Which group of layers.
        """
        wrong = self._occupancy[group].returned(blocks)
        self._records[group].block_generation.index_add_(0, blocks.clamp(min=0), (blocks >= 0).to(torch.int32))
        self._ask_of(group, blocks, wrong, "freed although it is free: double free")

    def all_returned(self, *, group: int = 0) -> None:
        """The allocator starts anew, with every block free; nobody may read any of them."""
        self._occupancy[group].all_returned()
        self._records[group].block_generation += 1

    def recycled(self, blocks: Sequence[int], *, group: int = 0) -> None:
        """The bytes of these blocks go to another group of layers, which shares them with this one."""
        self._voided[group].update(set(blocks))
        self._claims[group].drop(blocks)

    def index_reset(self) -> None:
        """The prefix index was emptied: no block that is free now may be shared any more."""
        for voided, ownership in zip(self._voided, self._ownership, strict=True):
            voided.update(set(ownership.uncached()))

    def follow_ownership(self, told: bool) -> None:
        """From now on the adapter tells of every block allocated, shared and freed, from a pool that is all free; or no
        longer. Overrides the layout's ``reports_ownership``, for an adapter that learns it only when events arrive."""
        self._reporter.reports_ownership = told
        for ownership in self._ownership:
            ownership.forget()

    def copied(self, src_blocks: Sequence[int], dst_blocks: Sequence[int], *, group: int = 0) -> None:
        """The engine copies whole blocks (copy on write, defragmentation): their records travel along.

        All sources are taken as they are at the call. The bytes may follow until the next forward.
        """
        if not src_blocks:
            return
        self._settle()
        self._logs[group].note(self._step, "copied", None, dst_blocks)
        records = self._records[group]
        src, dst = lists_to_device([src_blocks, dst_blocks], records.device)
        records.put_into(dst, records.taken_from(src))

    def stored(self, key: Hashable, blocks: Sequence[int] | torch.Tensor, *, group: int = 0) -> None:
        """A copy of these blocks to another tier begins: what their records say now is kept under ``key``.

        Args:
            key: Of the copy.
            blocks: Block numbers, on the host or as ``[n]`` int64 on the pool's device.
            group: Which group of layers.
        """
        self._settle()
        self._stored[group].keep(key, self._at(blocks))

    def discarded(self, key: Hashable, *, group: int = 0) -> None:
        """The copy under ``key`` is gone from its tier, or about to be overwritten there."""
        self._stored[group].drop(key)

    def has_stored(self, key: Hashable, *, group: int = 0) -> bool:
        """Whether `stored` has kept something under ``key`` that is not forgotten."""
        return key in self._stored[group]

    def loaded(
        self,
        key: Hashable,
        blocks: Sequence[int] | torch.Tensor,
        *,
        picked: Sequence[int] | None = None,
        group: int = 0,
        request: str | None = None,
        complete: bool = True,
    ) -> None:
        """What was stored under ``key`` is back, in these blocks: it must be what the kept records describe.

        Call it when the copy has completed. What came under a key that is not known, or not any more, is not judged
        until it is written anew. A copy that goes on during the forward that reads it is told of twice: before the
        forward with ``complete`` False, so that its tokens are known but no bytes are compared, and after it.

        Args:
            key: Of the copy.
            blocks: Block numbers, on the host or as ``[n]`` int64 on the pool's device.
            picked: Which of the blocks that were stored under ``key`` each of them is; None: the first ones, in order.
            group: Which group of layers.
            request: For whom it came, if that is known; only of blocks that are given on the host.
            complete: Whether the copy has ended.
        """
        if not isinstance(blocks, torch.Tensor):
            self._logs[group].note(self._step, "loaded", request, blocks)
            if self._reporter.reports_ownership and request is not None:
                self._misused(group, self._ownership[group].loaded(blocks, request))
        self._settle()
        at = self._at(blocks)
        if self._stored[group].restore(key, at, None if picked is None else to_device(picked, self.layout.device)):
            self._came_back(group, at, request, complete)
        else:
            self.arriving(at, group=group)

    def arriving(self, blocks: Sequence[int] | torch.Tensor, *, group: int = 0) -> None:
        """A copy from another tier into these blocks is under way: nobody knows what they hold.

        They are not judged before `loaded` or `adopted` tells of the copy's end, or they are written anew.
        """
        self._settle()
        records, at = self._records[group], self._at(blocks)
        records.generation.view(-1, records.block_size).index_fill_(0, at, UNKNOWN)
        records.forget_block_prints(at)
        # Nor does anybody know which token is there, so no write can be seen to be lost by it.
        records.step.view(-1, records.block_size).index_fill_(0, at, UNKNOWN)
        records.has_unknown = True

    def adopted(
        self,
        blocks: Sequence[int],
        tokens: Sequence[int],
        *,
        request: str,
        group: int = 0,
        namespace: str | None = None,
        fingerprints: torch.Tensor | None = None,
        complete: bool = True,
    ) -> None:
        """K/V that another process has computed has arrived in these blocks, under a key that this one never stored.

        Args:
            blocks: Block numbers; all of their slots are filled.
            tokens: What the blocks hold, from position 0 of the request on; as many as the blocks have slots.
            request: For whom it came.
            group: Which group of layers.
            namespace: Of the request.
            fingerprints: What `fingerprints` said of the blocks where they were stored: the bytes must be those.
                None: the bytes are taken for right as they are now.
            complete: As for `loaded`.
        """
        owner = self._reporter.number_of(request)
        seed = self._reporter.seed_of(namespace, self._epoch)
        self._settle()
        records = self._records[group]
        at, tokens_at = lists_to_device([blocks, tokens], records.device)
        # Step 0 is that of slots which nobody has ever written, and the coming step's are those it writes itself.
        self._step = max(1, self._step)
        enter_foreign(records, at, tokens_at, seed=seed, owner=owner, step=self._step)
        if fingerprints is not None:
            records.fingerprints_by_block[:, at] = fingerprints.to(records.device, non_blocking=True)
        elif complete:
            self._checks[group].measure(at)
        self._came_back(group, at, request, complete)

    def fingerprints(self, blocks: Sequence[int], *, group: int = 0) -> torch.Tensor | None:
        """``[parts, blocks, block_size]`` int64 of what was written to these blocks, for `adopted` in another process;
        None if any of their slots was not written since the block was handed out, or is not fingerprinted yet.

        Waits for the device.
        """
        self._settle()
        records, at = self._records[group], to_device(blocks, self.layout.device)
        current = records.generation.view(-1, records.block_size)[at] == records.block_generation[at][:, None]
        if not bool((current & (records.fingerprinted.view(-1, records.block_size)[at] == 1)).all()):
            return None
        return records.fingerprints_by_block[:, at].cpu()

    def _at(self, blocks: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Block numbers as ``[n]`` int64 on the pool's device."""
        return blocks if isinstance(blocks, torch.Tensor) else to_device(blocks, self.layout.device)

    def _came_back(self, group: int, blocks: torch.Tensor, request: str | None, complete: bool) -> None:
        if not complete:
            records = self._records[group]
            records.fingerprinted.view(-1, records.block_size).index_fill_(0, blocks, 0)
            records.forget_block_prints(blocks)
            return
        owner = self._reporter.number_of(request) if request is not None else 0
        self._checks[group].verify_transfer(blocks, owner, self._step)
        self._hear(wait=False)

    def rolled_back(self, request: str, length: int) -> None:
        """Tokens of the request from position ``length`` on are rejected: what it wrote there no longer counts.

        Its blocks are those that `allocated` and `shared` have told of, so this needs ``reports_ownership``.
        """
        self._settle()
        owner = self._reporter.number_of(request)
        for ownership, records in zip(self._ownership, self._records, strict=True):
            size = records.block_size
            blocks = ownership.table(request)[length // size :]
            if not blocks:
                continue
            slots = to_device(blocks, records.device)[:, None] * size + torch.arange(size, device=records.device)
            void = (records.owner[slots] == owner) & (records.position[slots] >= length)
            records.generation[slots] = records.generation[slots].masked_fill_(void, 0)

    def indexed(self, tokens: Sequence[int], block: int, *, group: int = 0, namespace: str | None = None) -> None:
        """The prefix index claims that ``block`` holds the K/V of the last block of these tokens.

        The claim is checked as soon as the block is written: now, if it is and the host need not wait for the device,
        otherwise with the passes of the steps that follow.
        """
        self._claims[group].add(tokens, block, namespace)
        if not is_asynchronous(self.layout.device):
            self._settle()
            self._ask_claims()
            self._judge_claims(wait=False)

    def walked_index(
        self, slots: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor, *, group: int = 0
    ) -> None:
        """All that the prefix index holds: each slot must be written, for its position, after the slot before it.

        Waits for the device, so it is for moments in which the engine has nothing to do.

        Args:
            slots: ``[n]`` int64 on the pool's device.
            positions: ``[n]`` int64: the position that the index has each slot for.
            previous: ``[n]`` int64: the slot of the position before; -1 at the start of a prompt.
            group: Which group of layers.

        Raises:
            KVCanaryError: In raise mode, if anything is wrong.
        """
        start = time.time_ns()
        self._settle()
        failed = broken_entries(self._records[group], slots, positions, previous)
        self._count("index", slots.shape[0], len(failed))
        for at in failed:
            self._report_entry(group, int(slots[at]), int(positions[at]))
        self._finish("sweep", start)

    def traced(self, request: str, headers: Mapping[str, str]) -> None:
        """A request begins, under a name that an earlier one may have had; reports about it name its trace.

        Args:
            request: The request.
            headers: W3C trace context as the request brought it: ``traceparent`` and ``tracestate``, or nothing.
        """
        self._sink.traced(request, headers)

    def weights_changed(self) -> None:
        """The model's weights are others from now on: K/V of before belongs to an earlier epoch."""
        self._epoch += 1

    def reset(self) -> None:
        """The pool's contents are gone (sleep and wake): nothing counts as written, or as handed out."""
        for records, ownership, occupancy, claims, voided in zip(
            self._records, self._ownership, self._occupancy, self._claims, self._voided, strict=True
        ):
            records.forget()
            ownership.forget()
            occupancy.forget()
            claims.forget()
            voided.clear()

    # Steps

    def before_forward(self, step: ForwardStep) -> None:
        """Enter the step's writes into the records, then verify everything that the step will read.

        Raises:
            KVCanaryError: In raise mode, if anything is wrong.
        """
        start = time.time_ns()
        self._step += 1
        self._sink.step_started(self._step, step.requests, step.token_ids.shape[0])
        self._settle()
        self._ask_claims()
        owners, seeds = self._owners_and_seeds(step)
        known = None
        if step.known_tokens is not None:
            known = plan.KnownTokens(
                tokens=step.known_tokens.tokens, rows=step.known_tokens.rows, lengths=step.known_tokens.lengths
            )
        shared: dict[type[Checks], _Shared] = {}
        due = []
        self._pending = []
        for index, group_step in enumerate(step.groups):
            checks = self._checks[index]
            if type(checks) not in shared:
                shared[type(checks)] = _Shared(checks, step)
            of_step = shared[type(checks)]
            rows = self._rows(index, group_step, step, (owners, seeds, of_step.prefix_lens))
            writes = Writes(
                rows=of_step.write_rows,
                offsets=of_step.offsets,
                tokens=of_step.tokens,
                positions=of_step.positions,
                slots=checks.integers(group_step.write_slots),
                known=known,
            )
            self._pending.append(self._enter_writes(index, rows, writes, group_step))
            due.append((rows, checks.verify_reads(rows, self.layout.groups[index].window, known)))
        for index, (rows, reads) in enumerate(due):
            self._verify_content(index, rows, reads)
        self._read_last = (step.requests, due)
        self._finish("verify", start)

    def after_forward(self) -> None:
        """Fingerprint what the step has written, then patrol a part of everything recorded.

        Raises:
            KVCanaryError: In raise mode, if a write was lost, or the patrol finds anything wrong.
        """
        if self._pending is None:
            return
        start = time.time_ns()
        pending, self._pending = self._pending, None
        self._settle()
        self._ask_claims()
        if self.settings.content != "off":
            for index, written in enumerate(pending):
                self._record_content(index, written)
        self._finish("record", start)
        if self.settings.content != "off" and self.settings.sweep_slots_per_step:
            start = time.time_ns()
            for index, patrol in enumerate(self._patrols):
                patrol.advance(self.settings.sweep_slots_per_step, _Check(self, index))
            self._finish("sweep", start)

    def abandon_step(self) -> None:
        """The forward did not complete: nobody knows what it has written.

        A slot that was to hold something else than before counts as unwritten; one that was to be given the same once
        more, or was abandoned before, is not judged until it is written anew.
        """
        pending, self._pending = self._pending or [], None
        for index, written in enumerate(pending):
            self._checks[index].abandon(written)

    def sweep(self) -> None:
        """Patrol over everything recorded, once, now.

        Raises:
            KVCanaryError: In raise mode, if anything is wrong.
        """
        start = time.time_ns()
        self._settle()
        for index, group in enumerate(self.layout.groups):
            check = _Check(self, index)
            for part in range(len(self._records[index].views)):
                check(0, group.num_blocks, part)
        self._finish("sweep", start)

    def digest(self) -> dict[str, int]:
        """What each request of the last step reads, in one number, worked out when it is asked for.

        Ranks that agree have equal digests: it covers blocks, positions, chains and whether the slots were written.
        """
        if self._read_last is None:
            return {}
        requests, due = self._read_last
        total = torch.zeros(len(requests), dtype=torch.int64, device=self.layout.device)
        for checks, (rows, reads) in zip(self._checks, due, strict=True):
            total = total * 31 + checks.digest(rows, reads)
        return dict(zip(requests, total.tolist(), strict=True))

    def disagree(self, expected: dict[str, int]) -> None:
        """Report each request of the last step whose digest is not that of the other ranks."""
        digest = self.digest()
        for request in sorted(digest.keys() | expected.keys()):
            own, others = digest.get(request), expected.get(request)
            if own == others:
                continue
            self._reporter.report(
                Violation(
                    kind=Kind.RANK,
                    pool=self.layout.pool,
                    group=self.layout.groups[0].name,
                    slot=-1,
                    block=-1,
                    offset=-1,
                    step=self._step,
                    request=request,
                    expected=None if others is None else self._reporter.show_hash(others),
                    found=None if own is None else self._reporter.show_hash(own),
                    detail=f"rank {self.layout.rank} of {self.layout.world_size} reads something else than the others",
                )
            )

    def slots_around(self, group: str, block: int) -> Neighbourhood | None:
        """What the records say about a block and those beside it, for a report: it waits for the device.

        None if there is no such block.
        """
        self._settle()
        for described, records in zip(self.layout.groups, self._records, strict=True):
            if described.name == group and 0 <= block < described.num_blocks:
                return slots_around(records, self._reporter, group, block)
        return None

    def close(self) -> None:
        """Let go of the engine's tensors; no other call may follow."""
        self._sink.close()
        del self.layout, self._reporter
        self._pending = self._read_last = None
        self._records, self._checks, self._claims, self._stored, self._patrols = [], [], [], [], []

    # Parts of a step

    def _settle(self) -> None:
        """Tell the device what events have said since the last time, in one copy that the host does not wait for."""
        if not any(self._voided) and not any(ownership.has_changes for ownership in self._ownership):
            return
        lists: list[Sequence[int]] = []
        for voided, ownership in zip(self._voided, self._ownership, strict=True):
            lists += [list(voided), list(voided.values()), *ownership.take_changes()]
            voided.clear()
        tensors = iter(lists_to_device(lists, self.layout.device))
        for records, ownership in zip(self._records, self._ownership, strict=True):
            blocks, times, *changes = islice(tensors, 7)
            if blocks.numel():
                records.block_generation.index_add_(0, blocks, times.to(torch.int32))
            ownership.apply(changes)

    def _owners_and_seeds(self, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows]`` int32 and int64."""
        namespaces = step.namespaces or [None] * len(step.requests)
        batch = (tuple(step.requests), tuple(namespaces), self._epoch)
        if self._batch is None or self._batch[0] != batch:
            owners, seeds = lists_to_device(
                [
                    [self._reporter.number_of(request) for request in step.requests],
                    [self._reporter.seed_of(namespace, self._epoch) for namespace in namespaces],
                ],
                self.layout.device,
            )
            self._batch = batch, owners.to(torch.int32), seeds
        return self._batch[1:]

    def _rows(
        self,
        index: int,
        group_step: GroupStep,
        step: ForwardStep,
        shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> Rows:
        owners, seeds, prefix_lens = shared
        ownership = self._ownership[index]
        block_table = self._checks[index].integers(group_step.block_table)
        if not block_table.shape[1]:
            block_table = block_table.new_full((block_table.shape[0], 1), -1)
        return Rows(
            step=self._step,
            owners=owners,
            seeds=seeds,
            prefix_lens=prefix_lens,
            block_table=block_table,
            held=self._held(index),
            held_rows=self._held_rows(index, step.requests),
            references=ownership.references,
            first_holders=ownership.first_holders,
        )

    def _held(self, index: int) -> torch.Tensor | None:
        if self.layout.reports_occupancy:
            return self._occupancy[index].held
        return self._ownership[index].held if self._reporter.reports_ownership else None

    def _held_rows(self, index: int, requests: Sequence[str]) -> torch.Tensor:
        """``[rows]`` int64: sent again only when another request stands in a row, or has another row of ``held``."""
        rows = [0] * len(requests) if self.layout.reports_occupancy else self._ownership[index].rows(requests)
        last = self._last_held_rows[index]
        if last is None or last[0] != rows:
            last = self._last_held_rows[index] = rows, to_device(rows, self.layout.device)
        return last[1]

    def _enter_writes(self, index: int, rows: Rows, writes: Writes, group_step: GroupStep) -> Any:
        pad_slots = group_step.pad_slots
        if pad_slots is not None:
            pad_slots = self._checks[index].integers(pad_slots) if pad_slots.numel() else None
        return self._checks[index].enter(
            rows, writes, pad_slots, self.layout.groups[index].null_block, self.settings.content == "full"
        )

    def _verify_content(self, index: int, rows: Rows, reads: Any) -> None:
        parts = len(self.layout.groups[index].parts)
        if self.settings.content == "full":
            self._checks[index].verify_content(rows, reads, [(part, (0, 1)) for part in range(parts)])
        elif self.settings.content == "scrub":
            due = scrub_schedule(self._step, parts, self.settings.scrub_period)
            self._checks[index].verify_content(rows, reads, due)

    def _record_content(self, index: int, written: Any) -> None:
        group, checks = self.layout.groups[index], self._checks[index]
        checks.record_content(written)
        if group.null_block is None:
            return
        parts = len(group.parts)
        part = self._step % parts
        due = range(parts) if self.settings.content == "full" else range(part, part + 1)
        checks.check_null_block(due, group.null_block, self._step)

    def _ask_claims(self) -> None:
        for claims in self._claims:
            claims.ask()

    def _judge_claims(self, *, wait: bool) -> None:
        """Compare what the prefix index claims with the records, for the blocks that are written by now."""
        for group, (claims, records) in enumerate(zip(self._claims, self._records, strict=True)):
            for block, claim, evidence in claims.answers(wait=wait):
                epoch = self._reporter.epoch_of(evidence.seed)
                if epoch is None:
                    continue
                wanted = _wrapped(claim.chain + chain_seed(claim.namespace, epoch))
                found = evidence.chain_after
                if self.layout.groups[group].window == 1:
                    # No token sees its predecessor, so nothing but the tokens themselves is recorded for certain.
                    found = wanted if evidence.chain_of_block == claim.chain_of_block else ~wanted
                self._count("index", records.block_size, 0 if wanted == found else records.block_size)
                if wanted != found:
                    self._report_claim(group, block, wanted, found, evidence)

    def _report_claim(self, group: int, block: int, wanted: int, found: int, evidence: Evidence) -> None:
        described = self.layout.groups[group]
        self._reporter.report(
            Violation(
                kind=Kind.INDEX,
                pool=self.layout.pool,
                group=described.name,
                slot=block * described.block_size,
                block=block,
                offset=0,
                step=self._step,
                expected=self._reporter.show_hash(wanted),
                found=self._reporter.show_hash(found),
                writer=self._reporter.name_of(evidence.writer),
                written_step=evidence.written_step,
                block_history=self._ownership[group].history(block),
                block_events=self._logs[group].of(block),
                detail="the prefix index promises the K/V of other tokens than the block holds",
            )
        )

    def _report_entry(self, group: int, slot: int, position: int) -> None:
        records, size = self._records[group], self._records[group].block_size
        recorded = int(records.position[slot])
        if not self._broken_entries.add((group, slot, position, int(records.step[slot]))):
            return
        self._reporter.report(
            Violation(
                kind=Kind.INDEX,
                pool=self.layout.pool,
                group=self.layout.groups[group].name,
                slot=slot,
                block=slot // size,
                offset=slot % size,
                step=self._step,
                expected=str(position),
                found=str(recorded),
                writer=self._reporter.name_of(int(records.owner[slot])),
                written_step=int(records.step[slot]),
                recorded_position=recorded,
                block_history=self._ownership[group].history(slot // size),
                detail=f"the prefix index has the slot for position {position} of a prefix that is not what is there",
            )
        )

    # Reports

    def _count(self, check: str, slots: int, failed: int) -> None:
        self._counts[check] += slots
        self._failed[check] += failed

    def _misused(self, group: int, misuses: list[Misuse]) -> None:
        if misuses:
            self._reporter.misuses(group, self._step, misuses)

    def _ask_of(self, group: int, blocks: torch.Tensor, wrong: torch.Tensor, detail: str) -> None:
        """Report the ``wrong`` ones of ``blocks``, with what an allocator did: now, or when the device has answered."""
        records = self._records[group]
        owners = records.owner[blocks.clamp(min=0) * records.block_size]
        answer = Answer(torch.stack([blocks, wrong.to(torch.int64), owners.to(torch.int64)], 1))
        answer.ask()
        self._unnamed.append((group, detail, answer))
        if not is_asynchronous(self.layout.device):
            self._judge_unnamed(wait=False)

    def _judge_unnamed(self, *, wait: bool) -> None:
        while self._unnamed:
            group, detail, answer = self._unnamed[0]
            rows = answer.look(wait=wait)
            if rows is None:
                return
            del self._unnamed[0]
            writers = [(block, self._reporter.name_of(owner)) for block, wrong, owner in rows if wrong]
            self._misused(
                group,
                [Misuse(block, None, writer, detail.format(writer or "another request")) for block, writer in writers],
            )

    def _hear(self, *, wait: bool) -> list[list[int]]:
        """Report what the device has found so far, or, without waiting for it, had found at the look before."""
        entries, lost = self._ring.drain() if wait else self._ring.poll()
        if entries:
            self._reporter.faults(entries)
        if lost:
            self._sink.lost_violations(lost)
        self._judge_claims(wait=wait)
        self._judge_unnamed(wait=wait)
        return entries

    def _finish(self, phase: str, start_ns: int) -> None:
        entries = self._hear(wait=self.settings.mode == "raise")
        for checks in self._checks:
            checks.collect()
        counts = CheckCounts(slots={check: (slots, self._failed[check]) for check, slots in self._counts.items()})
        self._counts.clear()
        self._failed.clear()
        violations = self._reporter.take()
        self._sink.pass_finished(phase, self._step, start_ns, time.time_ns(), counts, violations)
        if self.settings.mode != "raise":
            return
        # A patrol meets the same rotten slot round after round, and nobody may ever read it: it raises once.
        found = list(violations) or [self._reporter.decode(entry) for entry in entries if phase != "sweep"]
        if found:
            self.abandon_step()
            self._sink.flush()
            raise KVCanaryError(found)


class _Shared:
    """What the writes of all groups of a step have in common, in the form that their checks read."""

    def __init__(self, checks: Checks, step: ForwardStep) -> None:
        self.prefix_lens, self.offsets = checks.integers(step.prefix_lens), checks.integers(step.query_offsets)
        self.tokens, self.positions = checks.integers(step.token_ids), checks.integers(step.positions)
        self.write_rows = checks.write_rows(self.offsets, step.token_ids.shape[0])


class _Check:
    """Patrols a run of blocks of one group."""

    def __init__(self, canary: Canary, group: int) -> None:
        self._canary, self._group = canary, group

    def __call__(self, first_block: int, num_blocks: int, part: int) -> None:
        self._canary._checks[self._group].patrol(first_block, num_blocks, part, self._canary._step)


def _wrapped(number: int) -> int:
    """As a signed 64-bit number."""
    return (number + 2**63) % 2**64 - 2**63


def _records_of(group: KVGroup, content: str) -> Records:
    parts = () if content == "off" else group.parts
    return Records(
        group.num_blocks,
        group.block_size,
        group.device,
        [part.view for part in parts],
        [part.number_type or part.view.dtype for part in parts],
        ["scale" not in part.part and part.bytes_per_slot >= _TELLING_BYTES for part in parts],
    )


def compare_ranks(canaries: Sequence[Canary]) -> None:
    """Report, through its own sink, every rank whose last step read something else than most ranks did.

    Where there is no majority, every rank is reported.
    """
    digests = [canary.digest() for canary in canaries]
    votes = Counter(tuple(sorted(digest.items())) for digest in digests)
    if len(votes) < 2:
        return
    (winner, most), (_, next_most) = votes.most_common(2)
    for canary, digest in zip(canaries, digests, strict=True):
        if most > next_most:
            canary.disagree(dict(winner))
        else:
            canary.disagree(next(other for other in digests if other != digest))
