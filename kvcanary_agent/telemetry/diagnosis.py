"""From what is wrong with a slot to what probably went wrong in the server, in an engineer's words.

Each rule looks at one violation and at those shortly before it, and yields the causes that it sees, each with a
confidence. Rules are independent of each other; a diagnosis is all their causes, the likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcanary_agent.canary.violation import Kind, Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One explanation.

    Attributes:
        cause: A stable identifier, for example ``"double_allocation"``.
        sentence: What happened and what to look at, naming block, requests, steps, layer and part as far as known.
        confidence: From 0 (a guess) to 1 (nothing else explains it).
    """

    cause: str
    sentence: str
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The explanations of one violation, the likeliest first; at least one."""

    causes: tuple[Cause, ...]

    @property
    def cause(self) -> str:
        return self.causes[0].cause

    @property
    def sentence(self) -> str:
        return self.causes[0].sentence

    @property
    def confidence(self) -> float:
        return self.causes[0].confidence


def diagnose(violation: Violation, recent: Sequence[Violation]) -> Diagnosis:
    """Names the probable causes of ``violation``.

    Args:
        violation: What was found.
        recent: Violations of the same pool before it, oldest first; may be empty.
    """
    rules = (*_RULES.get(violation.kind, ()), _unexplained)
    causes = [cause for rule in rules for cause in rule(violation, recent)]
    return Diagnosis(causes=tuple(sorted(causes, key=lambda cause: -cause.confidence)))


_Rule = Callable[[Violation, Sequence[Violation]], Iterator[Cause]]


def _wrong_address(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    if violation.block < 0:
        yield Cause(
            cause="address_outside_pool",
            sentence=f"{_who(violation)} addresses slot {violation.found or violation.slot} at step {violation.step}, "
            "outside the pool: its block table or slot mapping holds a value that no allocator gave out",
            confidence=0.9,
        )
    elif violation.request is None:
        yield _padding_write(violation)
    else:
        yield Cause(
            cause="slot_mapping_disagrees_with_block_table",
            sentence=f"{_place(violation)}: {_who(violation)} goes there at step {violation.step}, but its block table "
            f"says slot {violation.expected or 'unknown'}: slot mapping and block table disagree, one of them is stale",
            confidence=0.7,
        )


def _padding_write(violation: Violation) -> Cause:
    return Cause(
        cause="padding_writes_live_slot",
        sentence=f"{_place(violation)}: a padded row writes there at step {violation.step} instead of to the null "
        "block: the slot mapping beyond the batch was not reset",
        confidence=0.8,
    )


def _never_written(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    yield Cause(
        cause="read_before_write",
        sentence=f"{_place(violation)}: {_who(violation)} reads it at step {violation.step}, but nobody has written it "
        "since its block was handed out: the computed length runs ahead of the writes, or the write was dropped",
        confidence=0.6,
    )


def _own_entries_swapped(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    if _wrote_it_itself(violation) or violation.held:
        whose = "its own" if _wrote_it_itself(violation) else "in a block that it holds"
        yield Cause(
            cause="block_table_stale_or_swapped",
            sentence=f"{_place(violation)}: at step {violation.step}, {_who(violation)} finds {whose} "
            f"{_recorded(violation)}{_written(violation)}: entries of its block table are swapped or stale",
            confidence=0.8,
        )


def _own_history_changed(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    if _wrote_it_itself(violation):
        yield Cause(
            cause="history_changed",
            sentence=f"{_place(violation)}: {_who(violation)} wrote it itself{_written(violation)}, for other tokens "
            f"than it consists of now, at step {violation.step}: tokens that were rejected or rolled back still count "
            "as computed",
            confidence=0.6,
        )


def _foreign_write(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    """The reader finds what another request wrote: after it (handed out twice) or before it (shared wrongly)."""
    reader, writer = violation.request, violation.writer
    if reader is None or writer is None or reader == writer:
        return
    if not violation.held:
        own_turn, writers_turn = _turn(violation, reader), _turn(violation, writer)
        wrote_after_reader = own_turn is not None and writers_turn is not None and own_turn < writers_turn
        yield Cause(
            cause="double_allocation",
            sentence=f"{_place(violation)}: the block was handed to {writer}, which wrote "
            f"{_recorded(violation)}{_written(violation)}, while {reader} still maps it at step {violation.step}: "
            "double allocation, or freed too early",
            confidence=0.9 if wrote_after_reader else 0.4,
        )
    if violation.recorded_position == violation.position:
        yield Cause(
            cause="wrong_prefix_hit",
            sentence=f"{_place(violation)}: at step {violation.step}, {_who(violation)} reads what {writer} wrote "
            f"at the same position{_written(violation)} after another prefix: a wrong hit of the prefix cache",
            confidence=0.6,
        )
    elif not violation.held:
        yield Cause(
            cause="foreign_block",
            sentence=f"{_place(violation)}: at step {violation.step}, {_who(violation)} reads {_recorded(violation)} "
            f"of {writer}{_written(violation)}: its block table points at a block that is not its own",
            confidence=0.6,
        )


def _shared_across_namespaces(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    yield Cause(
        cause="prefix_shared_across_namespaces",
        sentence=f"{_place(violation)}: {_who(violation)} reads a prefix that {_writer(violation)} "
        f"computed{_written(violation)} under another adapter, cache salt or multimodal input "
        f"({_compared(violation)}): the prefix cache's key leaves it out",
        confidence=0.9,
    )


def _kept_across_weights(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    yield Cause(
        cause="cache_survived_weight_update",
        sentence=f"{_place(violation)}: {_who(violation)} reads what {_writer(violation)} computed"
        f"{_written(violation)} under earlier weights ({_compared(violation)}): the prefix "
        "cache was not reset when the weights changed",
        confidence=0.9,
    )


def _changed_bytes(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    alike = [other for other in recent if other.kind == Kind.CONTENT and other.step == violation.step]
    blocks = {other.block for other in alike} | {violation.block}
    what = (
        f"{_place(violation)}: the bytes of {_bytes_of(violation)} changed after "
        f"{_writer(violation)} wrote them{_written(violation)}, seen at step {violation.step}"
    )
    if not alike:
        yield Cause(
            cause="stray_write",
            sentence=f"{what}: a stray write or a memory error, nothing else was seen damaged in this step",
            confidence=0.5,
        )
    elif len(blocks) == 1:
        yield Cause(
            cause="block_overwritten",
            sentence=f"{what}, like {len(alike)} more of the block: a transfer, a swap or a copy wrote to the block "
            "outside the model's forward",
            confidence=0.5,
        )
    else:
        yield Cause(
            cause="many_blocks_overwritten",
            sentence=f"{what}, like {len(alike)} more in {len(blocks)} blocks: a transfer, a swap or a kernel writes "
            "through wrong addresses",
            confidence=0.4,
        )


def _allocator_broke_its_rules(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    if violation.position is None:
        twice = "double allocation" in violation.detail
        yield Cause(
            cause="double_allocation" if twice else "allocator_misuse",
            sentence=f"block {violation.block} (group {violation.group}), step {violation.step}: "
            f"{'handed to ' if twice else ''}{_who(violation)}: {_told(violation)}"
            + (f"; {violation.writer} held it last" if violation.writer and not twice else ""),
            confidence=0.9,
        )
    else:
        yield Cause(
            cause="block_used_without_holding_it",
            sentence=f"{_place(violation)}: {_who(violation)} uses it at step {violation.step}: {_told(violation)}; "
            f"{_writer(violation)} wrote it last{_written(violation)}: a stale block table, or the "
            "block was freed too early",
            confidence=0.8,
        )


def _written_outside_the_step(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    if violation.request is None:
        yield _padding_write(violation)
    else:
        yield Cause(
            cause="write_outside_the_step",
            sentence=f"{_place(violation)}: {_bytes_of(violation)} changed at step {violation.step}, though no request "
            f"was to write there ({_writer(violation)} wrote it{_written(violation)}): a kernel writes "
            "through a wrong slot mapping or out of bounds",
            confidence=0.7,
        )


def _write_dropped(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    yield Cause(
        cause="write_dropped",
        sentence=f"{_place(violation)}: {_who(violation)} was to write {_bytes_of(violation)} at step {violation.step} "
        "but the bytes stayed as they were: the cache write was skipped or went elsewhere",
        confidence=0.7,
    )


def _not_finite(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    yield Cause(
        cause="nonfinite_values",
        sentence=f"{_place(violation)}: {_bytes_of(violation)} holds NaN or infinity that {_who(violation)} reads at "
        f"step {violation.step}, written by {_writer(violation)}{_written(violation)}: an overflow in "
        "the model, uninitialised memory, or wrong scales",
        confidence=0.6,
    )


def _transfer_damaged(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    yield Cause(
        cause="transfer_incomplete_or_too_late",
        sentence=f"{_place(violation)}: {_bytes_of(violation)} came back from a transfer other than "
        f"{_writer(violation)} wrote it{_written(violation)}: the copy was partial, raced with a write, or "
        "the block was reused before it ended",
        confidence=0.8,
    )


def _index_wrong(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    yield Cause(
        cause="prefix_index_wrong",
        sentence=f"{_place(violation)}: {_told(violation)}, which {_writer(violation)} wrote"
        f"{_written(violation)}: the next prompt with that prefix gets a wrong hit",
        confidence=0.9,
    )


def _ranks_disagree(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    yield Cause(
        cause="rank_divergence",
        sentence=f"{_who(violation)} at step {violation.step}: {_told(violation)}: this rank's pool or block table has "
        "diverged",
        confidence=0.8,
    )


def _unexplained(violation: Violation, recent: Sequence[Violation]) -> Iterator[Cause]:
    compared = _compared(violation)
    yield Cause(
        cause="unexplained",
        sentence=f"{_place(violation)}: {violation.kind} violation for {_who(violation)} at step {violation.step}: "
        f"{_told(violation)}{f' ({compared})' if compared else ''}, written by {_writer(violation)}"
        f"{_written(violation)}",
        confidence=0.1,
    )


_RULES: dict[Kind, tuple[_Rule, ...]] = {
    Kind.ADDRESS: (_wrong_address,),
    Kind.UNWRITTEN: (_never_written,),
    Kind.POSITION: (_own_entries_swapped, _foreign_write),
    Kind.TOKEN: (_own_history_changed, _foreign_write),
    Kind.NAMESPACE: (_shared_across_namespaces,),
    Kind.EPOCH: (_kept_across_weights,),
    Kind.CHAIN: (_own_history_changed, _foreign_write),
    Kind.CONTENT: (_changed_bytes,),
    Kind.OWNERSHIP: (_allocator_broke_its_rules,),
    Kind.WILD_WRITE: (_written_outside_the_step,),
    Kind.LOST_WRITE: (_write_dropped,),
    Kind.NONFINITE: (_not_finite,),
    Kind.TRANSFER: (_transfer_damaged,),
    Kind.INDEX: (_index_wrong,),
    Kind.RANK: (_ranks_disagree,),
}


def _wrote_it_itself(violation: Violation) -> bool:
    return violation.writer is not None and violation.writer == violation.request


def _turn(violation: Violation, request: str) -> int | None:
    """Index of the last time that the block went to ``request``; None if none is remembered."""
    return max((turn for turn, writer in enumerate(violation.block_history) if writer == request), default=None)


def _place(violation: Violation) -> str:
    return f"block {violation.block}, slot {violation.slot} (group {violation.group})"


def _who(violation: Violation) -> str:
    if violation.request is None:
        return "a padded row" if violation.kind == Kind.ADDRESS else "no request in particular"
    return violation.request if violation.position is None else f"{violation.request} (position {violation.position})"


def _bytes_of(violation: Violation) -> str:
    return f"layer {violation.layer}, part {violation.part or 'unknown'}" if violation.layer else "some layer"


def _written(violation: Violation) -> str:
    return "" if violation.written_step is None else f" at step {violation.written_step}"


def _recorded(violation: Violation) -> str:
    return "some position" if violation.recorded_position is None else f"position {violation.recorded_position}"


def _compared(violation: Violation) -> str:
    if violation.found is None and violation.expected is None:
        return ""
    return f"found {violation.found or 'nothing'}, wanted {violation.expected or 'nothing'}"


def _told(violation: Violation) -> str:
    return violation.detail or "no more is known"


def _writer(violation: Violation) -> str:
    return violation.writer or "an unknown request"
