"""Caches that are no pool: one tensor for the keys of a layer and one for its values, with a row for each sequence.

They have no slots that could be handed out twice and no tables: what can go wrong is that a row's bytes are not those
that were written, or that a row is another sequence's. So what is kept of each part is a fingerprint for each row and
column, and of each row the tokens that it was computed for. A *column* is what a row's tensor holds for one position.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcanary_agent.kernels.columns import column_prints
from kvcanary_agent.kernels.transit import Answer, is_asynchronous
from kvcanary_agent.settings import Settings

from .keyed_hashes import KeyedHashes
from .schedule import scrub_schedule
from .violation import CheckCounts, Kind, KVCanaryError, Sink, Violation

_STEPS_PER_MEMORY_REPORT = 64

OfRows = Callable[[torch.Tensor], torch.Tensor]
"""What becomes of the rows of a tensor whose first dimension they are: chosen, repeated, put in another order."""


class TensorCaches:
    """All caches of a process that one engine makes: they come and go, and are reported on as one pool.

    Any thread may use a cache of its own.
    """

    def __init__(self, pool: str, settings: Settings, sink: Sink) -> None:
        """Start with none.

        Args:
            pool: The name under which all of them are reported.
            settings: ``mode``, ``content``, ``scrub_period`` and ``reveal_tokens`` count.
            sink: Hears of violations and of every pass of checks.
        """
        self.pool = pool
        self.settings = settings
        self.sink = sink
        self.hashes = KeyedHashes(settings.reveal_tokens)
        self.lock = threading.RLock()
        self.step = 0
        self._opened = 0
        self._open: weakref.WeakSet[TensorCache] = weakref.WeakSet()

    def open(self) -> TensorCache:
        """A new cache."""
        with self.lock:
            self._opened += 1
            cache = TensorCache(self, self._opened)
            self._open.add(cache)
            return cache

    def next_step(self) -> int:
        """The number of a step that begins."""
        with self.lock:
            self.step += 1
            if self.step % _STEPS_PER_MEMORY_REPORT == 1:
                each = [cache.num_bytes for cache in self._open]
                self.sink.records_memory(sum(records for records, _ in each), sum(held for _, held in each))
            return self.step

    def strike(self, part: str, tensor: torch.Tensor, columns: int) -> None:
        """A part is about to be compared; for drills."""


class _Part:
    """What is on record of one layer's keys or values.

    Attributes:
        prints: ``[rows, columns]`` int64.
        known: ``[rows, columns]`` bool: whether the column is judged.
        length: Columns that are in use, as far as the host has followed; of a tensor of fixed size.
        seen: The tensor as it was last recorded.
    """

    __slots__ = ("known", "length", "num_bytes", "prints", "seen")

    def __init__(self, tensor: torch.Tensor, prints: torch.Tensor, known: torch.Tensor, length: int) -> None:
        self.prints, self.known, self.length = prints, known, length
        self.see(tensor)

    def see(self, tensor: torch.Tensor) -> None:
        self.seen = weakref.ref(tensor)
        self.num_bytes = (self.prints.numel() * 9, tensor.numel() * tensor.element_size())


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the device was asked about one part, or the tokens, of all rows in a step."""

    kind: Kind
    step: int
    layer: str | None
    part: str | None
    first_position: int
    answer: Answer


class TensorCache:
    """One cache: verifies at each update that what is there is what was put there."""

    def __init__(self, caches: TensorCaches, number: int) -> None:
        self._caches = caches
        self._number = number
        self._parts: dict[tuple[str, str], _Part] = {}
        # The tokens that each row was computed for, ``[rows, tokens]``; -1 where they are not known.
        self._tokens: torch.Tensor | None = None
        self._due: dict[int, tuple[int, int]] = {}
        self._waiting: list[_Asked] = []
        self._step: int | None = None
        self._start_ns = 0
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._reported: list[Violation] = []

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the records, and of what they describe."""
        each = [part.num_bytes for part in list(self._parts.values())]
        return sum(records for records, _ in each), sum(held for _, held in each)

    # Steps

    def begin_step(self, rows: int, num_new_tokens: int, num_layers: int) -> None:
        """A forward begins that computes so many new tokens for each of ``rows``."""
        self.end_step()
        self._step = self._caches.next_step()
        self._start_ns = time.time_ns()
        settings, parts = self._caches.settings, 2 * num_layers
        if settings.content == "scrub":
            self._due = dict(scrub_schedule(self._step, parts, settings.scrub_period))
        self._caches.sink.step_started(self._step, [self._name(row) for row in range(rows)], rows * num_new_tokens)
        self._hear(wait=False)

    def end_step(self) -> None:
        """Every layer of a step has been updated."""
        if self._step is None:
            return
        self._hear(wait=False)
        counts = CheckCounts(slots={check: (slots, self._failed[check]) for check, slots in self._counts.items()})
        step, self._step = self._step, None
        reported, self._reported = tuple(self._reported), []
        self._counts.clear()
        self._failed.clear()
        with self._caches.lock:
            self._caches.sink.pass_finished("verify", step, self._start_ns, time.time_ns(), counts, reported)

    # Contents

    @property
    def compares_content(self) -> bool:
        return self._caches.settings.content != "off"

    def follows(self, layer: str, part: str, tensor: torch.Tensor, length: int | None = None) -> bool:
        """Whether the tensor is the one that was recorded last, with as much in it as then.

        If it is not, somebody has put another in its place, and what it holds is taken for right as it is.

        Args:
            layer, part: Whose.
            tensor: As it is now.
            length: Columns in use, for a tensor of fixed size whose owner counts them on the host.
        """
        kept = self._parts.get((layer, part))
        return kept is not None and kept.seen() is tensor and length in (None, kept.length)

    def verify(self, index: int, layer: str, part: str, tensor: torch.Tensor, columns: int, first: int = 0) -> None:
        """Compare the first ``columns`` of a part with their records, as far as they are due.

        Args:
            index: Of the part, in the order of the layers.
            layer, part: Whose.
            tensor: ``[rows, heads, columns, dim]``, which `follows`.
            columns: How many of them.
            first: The position of the first one.

        Raises:
            KVCanaryError: In raise mode, if anything is wrong.
        """
        if not columns:
            return
        self._caches.strike(f"{layer}.{part}", tensor, columns)
        full = self._caches.settings.content == "full"
        remainder, modulus = (0, 1) if full else self._due.get(index, (0, 0))
        if not modulus or remainder >= columns:
            return
        kept = self._parts[layer, part]
        due = slice(remainder, columns, modulus)
        found, wanted, known = column_prints(tensor[:, :, due]), kept.prints[:, due], kept.known[:, due]
        differs = (found != wanted) & known
        self._counts["content"] += differs.numel()
        if not is_asynchronous(tensor.device) and not bool(differs.any()):
            return
        # What is wrong is reported once.
        kept.known[:, due] = known & ~differs
        self._judge(Kind.CONTENT, differs, wanted, found, (layer, part), (remainder, modulus, first))

    def appended(self, layer: str, part: str, tensor: torch.Tensor, new: int, follows: bool) -> None:
        """A tensor was replaced by one with ``new`` columns more at the end, and perhaps fewer at the start."""
        columns = tensor.shape[2]
        kept = self._parts.get((layer, part))
        old = columns - min(new, columns)
        if kept is None or not follows or kept.prints.shape[1] < old:
            self._take_for_right(layer, part, tensor, columns)
            return
        prints = column_prints(tensor[:, :, old:])
        start = kept.prints.shape[1] - old
        self._parts[layer, part] = _Part(
            tensor,
            torch.cat([kept.prints[:, start:], prints], 1),
            torch.cat([kept.known[:, start:], torch.ones_like(prints, dtype=torch.bool)], 1),
            columns,
        )

    def written(
        self, layer: str, part: str, tensor: torch.Tensor, at: torch.Tensor, length: int, follows: bool
    ) -> None:
        """New columns were written into a tensor of fixed size.

        Args:
            layer, part, tensor: Which.
            at: ``[n]`` int64 on the tensor's device: the columns.
            length: How many columns are in use now.
            follows: What `follows` said before.
        """
        kept = self._parts.get((layer, part))
        if kept is None or not follows:
            prints = torch.zeros((tensor.shape[0], tensor.shape[2]), dtype=torch.int64, device=tensor.device)
            kept = self._parts[layer, part] = _Part(tensor, prints, torch.zeros_like(prints, dtype=torch.bool), length)
        kept.prints.index_copy_(1, at, column_prints(tensor.index_select(2, at)))
        kept.known.index_fill_(1, at, True)
        kept.length = length
        kept.see(tensor)

    def shifted(self, layer: str, part: str, tensor: torch.Tensor, new: int, length: int, follows: bool) -> None:
        """A full tensor of fixed size has lost its first columns and got ``new`` ones at the end.

        Args:
            layer, part, tensor: Which.
            new: How many.
            length: How many positions have been put in.
            follows: What `follows` said before.
        """
        columns = tensor.shape[2]
        kept = self._parts.get((layer, part))
        before = min(kept.length, columns) if kept is not None else 0
        old = columns - min(new, columns)
        if kept is None or not follows or before < old:
            self._take_for_right(layer, part, tensor, length)
            return
        prints = column_prints(tensor[:, :, old:])
        self._parts[layer, part] = _Part(
            tensor,
            torch.cat([kept.prints[:, before - old : before], prints], 1),
            torch.cat([kept.known[:, before - old : before], torch.ones_like(prints, dtype=torch.bool)], 1),
            length,
        )

    def _take_for_right(self, layer: str, part: str, tensor: torch.Tensor, length: int) -> None:
        prints = column_prints(tensor)
        self._parts[layer, part] = _Part(tensor, prints, torch.ones_like(prints, dtype=torch.bool), length)

    # Rows and columns that move

    def moved(self, layer: str, part: str, tensor: torch.Tensor, of_rows: OfRows) -> None:
        """The rows of a tensor were put into ``tensor``, as ``of_rows`` puts those of its records."""
        kept = self._parts.get((layer, part))
        if kept is not None:
            self._parts[layer, part] = _Part(tensor, of_rows(kept.prints), of_rows(kept.known), kept.length)

    def cropped(self, layer: str, part: str, tensor: torch.Tensor, removed: int) -> None:
        """A tensor was replaced by one without the last ``removed`` columns, and perhaps fewer at the start."""
        kept = self._parts.get((layer, part))
        if kept is None:
            return
        end = kept.prints.shape[1] - removed
        start = end - tensor.shape[2]
        if start < 0:
            self.forget_part(layer, part)
            return
        self._parts[layer, part] = _Part(
            tensor, kept.prints[:, start:end], kept.known[:, start:end].clone(), tensor.shape[2]
        )

    def limited(self, layer: str, part: str, in_use: torch.Tensor, removed: int) -> None:
        """Of a tensor of fixed size, the last ``removed`` columns in use count no longer.

        Args:
            layer, part: Which.
            in_use: ``[columns]`` bool on the tensor's device.
            removed: How many.
        """
        kept = self._parts.get((layer, part))
        if kept is not None:
            kept.known &= in_use
            kept.length -= removed

    def forget_part(self, layer: str, part: str) -> None:
        """Nobody knows what a part holds."""
        self._parts.pop((layer, part), None)

    def forget(self) -> None:
        """Nobody knows what the cache holds."""
        self._parts.clear()
        self._tokens = None

    # Tokens

    def tokens_moved(self, of_rows: OfRows) -> None:
        """The rows of the cache were moved, as ``of_rows`` moves those of its records."""
        if self._tokens is not None:
            self._tokens = of_rows(self._tokens)

    def tokens_cropped(self, removed: int) -> None:
        """The last tokens of each row count no longer."""
        if self._tokens is not None:
            self._tokens = self._tokens[:, : max(0, self._tokens.shape[1] - removed)]

    def expect(self, tokens: torch.Tensor, computed: int) -> None:
        """The next step continues these sequences, of which so many tokens are in the cache.

        Args:
            tokens: ``[rows, tokens]`` integer: all of each, new ones included.
            computed: How many of them were computed before.

        Raises:
            KVCanaryError: In raise mode, if a row was computed for other tokens.
        """
        known = self._tokens
        if known is not None and known.shape != (tokens.shape[0], computed):
            known = None
        if known is None:
            known = tokens.new_full((tokens.shape[0], computed), -1)
        wanted = tokens[:, :computed]
        differs = (known != wanted) & (known >= 0)
        self._counts["token"] += differs.numel()
        # What is wrong is reported once: from now on the row passes for that of these tokens.
        self._tokens = torch.cat([torch.where(known >= 0, wanted, -1), tokens[:, computed:]], 1)
        self._judge(Kind.TOKEN, differs, wanted, known, (None, None), (0, 1, 0))

    # Reports

    def _name(self, row: int) -> str:
        return f"cache-{self._number}.row-{row}"

    def _judge(
        self,
        kind: Kind,
        differs: torch.Tensor,
        wanted: torch.Tensor,
        found: torch.Tensor,
        place: tuple[str | None, str | None],
        columns: tuple[int, int, int],
    ) -> None:
        """Report the first column of each row that differs: now, or when the device has answered.

        Args:
            kind: What is wrong if anything is.
            differs, wanted, found: ``[rows, columns]`` each.
            place: Layer and part, if it is of one.
            columns: Which they are of the tensor: the first, and of how many each time one; and the tensor's first
                position.
        """
        if not differs.numel() or (not is_asynchronous(differs.device) and not bool(differs.any())):
            return
        first = differs.to(torch.uint8).argmax(1, keepdim=True)
        remainder, modulus, position = columns
        column = first * modulus + remainder
        rows = [differs.sum(1, keepdim=True), column, wanted.gather(1, first), found.gather(1, first)]
        answer = Answer(torch.cat([row.to(torch.int64) for row in rows], 1))
        answer.ask()
        self._waiting.append(_Asked(kind, self._step or self._caches.step, *place, position, answer))
        self._hear(wait=self._caches.settings.mode == "raise")

    def _hear(self, *, wait: bool) -> None:
        """Report what the device has found so far."""
        reported = []
        while self._waiting:
            asked = self._waiting[0]
            rows = asked.answer.look(wait=wait)
            if rows is None:
                break
            del self._waiting[0]
            self._failed[str(asked.kind)] += sum(count for count, *_ in rows)
            reported += [self._violation(asked, row, found) for row, found in enumerate(rows) if found[0]]
        with self._caches.lock:
            for violation in reported:
                self._caches.sink.violation(violation)
        self._reported += reported
        if reported and self._caches.settings.mode == "raise":
            self._caches.sink.flush()
            raise KVCanaryError(reported)

    def _violation(self, asked: _Asked, row: int, found: list[int]) -> Violation:
        count, column, wanted, have = found
        hashes = self._caches.hashes
        show = hashes.show_token if asked.kind is Kind.TOKEN else hashes.show_hash
        return Violation(
            kind=asked.kind,
            pool=self._caches.pool,
            group="rows",
            slot=column,
            block=row,
            offset=column,
            step=asked.step,
            request=self._name(row),
            position=asked.first_position + column,
            layer=asked.layer,
            part=asked.part,
            expected=show(wanted),
            found=show(have),
            writer=self._name(row),
            recorded_position=asked.first_position + column,
            detail=f"the first of {count} columns of row {row}" if count > 1 else f"a column of row {row}",
        )
