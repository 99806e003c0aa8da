"""The rules: from one violation, in the light of its burst, to the causes that would explain it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvcanary_agent.canary.violation import Kind, Violation
from kvcanary_agent.telemetry.diagnosis.burst import Burst
from kvcanary_agent.telemetry.diagnosis.causes import Cause
from kvcanary_agent.telemetry.diagnosis.words import (
    bytes_of,
    compared,
    damage,
    place,
    recorded,
    told,
    who,
    writer_of,
    written,
)

_Rule = Callable[[Violation, Burst], Iterator[Cause]]


def causes_of(violation: Violation, burst: Burst) -> list[Cause]:
    """Every cause that a rule sees; at least one."""
    rules = (*_RULES.get(violation.kind, ()), _unexplained)
    return [cause for rule in rules for cause in rule(violation, burst)]


def _wrong_address(violation: Violation, burst: Burst) -> Iterator[Cause]:
    if violation.request is None:
        yield _padding_write(violation)
    elif violation.block < 0:
        what = "its block table names block" if "block table" in violation.detail else "it addresses slot"
        yield Cause(
            cause="address_outside_pool",
            sentence=f"{who(violation)}, step {violation.step}: {what} {violation.found or violation.slot}, outside "
            "the pool: a value that no allocator gave out",
            confidence=0.9,
        )
    elif burst.position_was_wrong(violation):
        yield Cause(
            cause="positions_wrong",
            sentence=f"{place(violation)}: {who(violation)} was written there at step {violation.step} under a "
            "position that the slot does not stand for, and its slot mapping is right: the positions of the step are "
            "wrong",
            confidence=0.9,
        )
    else:
        yield Cause(
            cause="slot_mapping_wrong",
            sentence=f"{place(violation)}: {who(violation)} goes there at step {violation.step}, but its block table "
            f"says slot {violation.expected or 'unknown'}: slot mapping and block table disagree, one of them is stale",
            confidence=0.9,
        )


def _padding_write(violation: Violation) -> Cause:
    where = f"slot {violation.found or violation.slot}, outside the pool" if violation.block < 0 else place(violation)
    return Cause(
        cause="padding_writes_live_slot",
        sentence=f"{where}: a padded row writes there at step {violation.step} instead of to the null block: the slot "
        "mapping beyond the batch was not reset",
        confidence=0.8,
    )


def _never_written(violation: Violation, burst: Burst) -> Iterator[Cause]:
    if burst.ranks_disagree(violation):
        yield Cause(
            cause="rank_divergence",
            sentence=f"{place(violation)}: {who(violation)} reads it at step {violation.step}, unwritten on this rank "
            "alone: a load or a write did not reach it",
            confidence=0.85,
        )
    if violation.writer is not None and violation.found == "0" and violation.recorded_position == violation.position:
        yield Cause(
            cause="rejected_tokens_kept",
            sentence=f"{place(violation)}: {who(violation)} reads it at step {violation.step}, but what "
            f"{violation.writer} wrote there{written(violation)} was rolled back: rejected tokens still count as "
            "computed",
            confidence=0.8,
        )
    if _came_by_sharing(violation):
        yield Cause(
            cause="published_before_written",
            sentence=f"{place(violation)}: {who(violation)} reads it at step {violation.step} as part of a prefix that "
            "nobody has written since its block was handed out: it was shared before it was written",
            confidence=0.75,
        )
    yield Cause(
        cause="read_before_write",
        sentence=f"{place(violation)}: {who(violation)} reads it at step {violation.step}, but nobody has written it "
        "since its block was handed out: the computed length runs ahead of the writes, or the write was dropped",
        confidence=0.6,
    )
    yield Cause(
        cause="write_dropped",
        sentence=f"{place(violation)}: {who(violation)} reads it at step {violation.step}, but its write was skipped "
        "or went elsewhere",
        confidence=0.3,
    )


def _came_by_sharing(violation: Violation) -> bool:
    """Whether the reader got the block by a prefix hit; where events do not tell, whether another had it first."""
    own = [event for event in violation.block_events if event.request == violation.request]
    if own:
        return own[-1].event == "shared"
    return violation.request in violation.block_history[1:] and violation.writer is None


def _entries_swapped(violation: Violation, burst: Burst) -> Iterator[Cause]:
    own = _wrote_it_itself(violation)
    exchanged = burst.entries_exchanged(violation)
    if own or violation.held or exchanged:
        whose = "its own" if own else "in a block that it holds" if violation.held else "at another index"
        yield Cause(
            cause="block_table_swapped",
            sentence=f"{place(violation)}: at step {violation.step}, {who(violation)} finds {whose} "
            f"{recorded(violation)}{written(violation)}: entries of its block table are swapped or stale",
            confidence=0.9 if exchanged else 0.8 if own else 0.45,
        )


def _wrong_input(violation: Violation, burst: Burst) -> Iterator[Cause]:
    """A write under another token or position than the request has there; its record does not exist yet."""
    if violation.writer is not None or violation.written_step is not None:
        return
    if violation.kind is Kind.TOKEN:
        yield Cause(
            cause="wrong_input_tokens",
            sentence=f"{place(violation)}: at step {violation.step}, {who(violation)} is computed from another token "
            f"than the request consists of ({compared(violation)})",
            confidence=0.95,
        )
    else:
        yield Cause(
            cause="positions_wrong",
            sentence=f"{place(violation)}: at step {violation.step}, {who(violation)} is computed at another position "
            f"than the request has reached ({compared(violation)})",
            confidence=0.95,
        )


def _own_history_changed(violation: Violation, burst: Burst) -> Iterator[Cause]:
    if _wrote_it_itself(violation):
        yield Cause(
            cause="rejected_tokens_kept",
            sentence=f"{place(violation)}: {who(violation)} wrote it itself{written(violation)}, for other tokens "
            f"than it consists of now, at step {violation.step}: tokens that were rejected or rolled back still count "
            "as computed",
            confidence=0.6,
        )


def _foreign_write(violation: Violation, burst: Burst) -> Iterator[Cause]:
    """The reader finds what another request wrote: after it (handed out twice) or before it (shared wrongly)."""
    reader, writer = violation.request, violation.writer
    if reader is None or writer is None or reader == writer:
        return
    if not violation.held:
        own_turn, writers_turn = _turn(violation, reader), _turn(violation, writer)
        wrote_after_reader = own_turn is not None and writers_turn is not None and own_turn < writers_turn
        yield Cause(
            cause="double_allocation",
            sentence=f"{place(violation)}: the block was handed to {writer}, which wrote "
            f"{recorded(violation)}{written(violation)}, while {reader} still maps it at step {violation.step}: "
            "double allocation, or freed too early",
            confidence=0.9 if wrote_after_reader else 0.4,
        )
    same_position = violation.recorded_position == violation.position
    if same_position or violation.held:
        where = "at the same position" if same_position else f"at {recorded(violation)}"
        yield Cause(
            cause="wrong_prefix_hit",
            sentence=f"{place(violation)}: at step {violation.step}, {who(violation)} reads what {writer} wrote "
            f"{where}{written(violation)}, which is no prefix of it: a wrong hit of the prefix cache",
            confidence=0.8 if violation.held else 0.6,
        )
    else:
        yield Cause(
            cause="foreign_block",
            sentence=f"{place(violation)}: at step {violation.step}, {who(violation)} reads {recorded(violation)} "
            f"of {writer}{written(violation)}: its block table points at a block that is not its own",
            confidence=0.6,
        )


def _shared_across_namespaces(violation: Violation, burst: Burst) -> Iterator[Cause]:
    yield Cause(
        cause="prefix_shared_across_namespaces",
        sentence=f"{place(violation)}: {who(violation)} reads a prefix that {writer_of(violation)} "
        f"computed{written(violation)} under another adapter, cache salt or multimodal input "
        f"({compared(violation)}): the prefix cache's key leaves it out",
        confidence=0.9,
    )


def _kept_across_weights(violation: Violation, burst: Burst) -> Iterator[Cause]:
    yield Cause(
        cause="cache_survived_weight_update",
        sentence=f"{place(violation)}: {who(violation)} reads what {writer_of(violation)} computed"
        f"{written(violation)} under earlier weights ({compared(violation)}): the prefix "
        "cache was not reset when the weights changed",
        confidence=0.9,
    )


def _changed_bytes(violation: Violation, burst: Burst) -> Iterator[Cause]:
    what = damage(violation)
    just_copied = bool(violation.block_events) and violation.block_events[-1].event == "copied"
    if burst.single(violation):
        if just_copied and burst.from_the_first_slot(violation):
            yield Cause(
                cause="copy_incomplete",
                sentence=f"{what}; the last thing that happened to the block was a copy into it at step "
                f"{violation.block_events[-1].step}, which may have left this part out",
                confidence=0.8,
            )
        yield Cause(
            cause="stray_write",
            sentence=f"{what}: a stray write or a memory error, nothing else was seen damaged",
            confidence=0.75,
        )
        return
    extent = _extent(violation, burst)
    whole = burst.whole_token(violation)
    if _came_by_copy(violation):
        yield Cause(
            cause="copy_incomplete",
            sentence=f"{what}; {extent}, and {violation.writer} never had this block: its contents were copied there, "
            "and not all of their bytes arrived",
            confidence=0.8,
        )
    earlier = _earlier_owner(violation)
    if earlier is not None:
        yield Cause(
            cause="late_write",
            sentence=f"{what}; {extent}: a write or a transfer for {earlier}, which had the block before, "
            f"{'landed' if whole else 'may have landed'} late",
            confidence=0.75 if whole else 0.35,
        )
    if whole:
        yield Cause(
            cause="misdirected_write",
            sentence=f"{what}; {extent}: a token of another request was written to this slot",
            confidence=0.6,
        )
    if burst.blocks(violation) == 1:
        yield Cause(
            cause="block_overwritten",
            sentence=f"{what}; {extent}: a transfer, a swap or a copy wrote to the block outside the model's forward",
            confidence=0.5,
        )
    else:
        yield Cause(
            cause="many_blocks_overwritten",
            sentence=f"{what}; {extent}: a transfer, a swap or a kernel writes through wrong addresses",
            confidence=0.5,
        )


def _extent(violation: Violation, burst: Burst) -> str:
    slots, blocks, parts = burst.slots(violation), burst.blocks(violation), burst.parts(violation)
    where = f"{_number(slots, 'slot')} in {_number(blocks, 'block')}"
    if burst.whole_token(violation):
        return f"{where} hit, in all layers"
    return f"{where} hit, this slot in {_number(parts, 'part')}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _came_by_copy(violation: Violation) -> bool:
    """Whether the writer is known never to have had the block lately: then records and bytes were copied into it."""
    owners = {*violation.block_history, *(event.request for event in violation.block_events)}
    return violation.writer is not None and bool(owners) and violation.writer not in owners


def _earlier_owner(violation: Violation) -> str | None:
    """The request that last had the block before the one that wrote the slot; None if none is remembered."""
    owners = violation.block_history
    if violation.writer not in owners:
        return None
    turn = owners.index(violation.writer)
    return owners[turn - 1] if turn else None


def _allocator_broke_its_rules(violation: Violation, burst: Burst) -> Iterator[Cause]:
    if violation.position is not None:
        return
    cause = next((cause for words, cause in _MISUSES if words in violation.detail), "allocator_misuse")
    twice = cause == "double_allocation"
    yield Cause(
        cause=cause,
        sentence=f"block {violation.block} (group {violation.group}), step {violation.step}: "
        f"{'handed to ' if twice else ''}{who(violation)}: {told(violation)}"
        + (f"; {violation.writer} held it last" if violation.writer and not twice else ""),
        confidence=0.9,
    )


# What an allocator's misuse says of itself -> its cause.
_MISUSES = (
    ("double allocation", "double_allocation"),
    ("double free", "double_free"),
    ("null block", "null_block_handed_out"),
    ("shared after it was freed", "prefix_hit_on_freed_block"),
    ("loaded for a request", "block_reused_during_transfer"),
)


def _used_without_holding(violation: Violation, burst: Burst) -> Iterator[Cause]:
    if violation.position is None:
        return
    if "two requests of one step" in violation.detail or "without copy on write" in violation.detail:
        yield Cause(
            cause="tail_shared_without_copy",
            sentence=f"{place(violation)}: {who(violation)}, step {violation.step}: {told(violation)}; "
            f"{writer_of(violation)} wrote it{written(violation)}: a block was shared before it was full, or not "
            "copied when it was written",
            confidence=0.85,
        )
        return
    # An allocator that names no request leaves no history: a free block was at least somebody's.
    had_it = violation.request in violation.block_history or "block that is free" in violation.detail
    yield Cause(
        cause="freed_while_in_use",
        sentence=f"{place(violation)}: {who(violation)} uses it at step {violation.step}: {told(violation)} any more; "
        f"{writer_of(violation)} wrote it last{written(violation)}: the block was freed too early, or the row of the "
        "block table is stale",
        confidence=0.8 if had_it else 0.3,
    )
    yield Cause(
        cause="foreign_block",
        sentence=f"{place(violation)}: {who(violation)} uses it at step {violation.step}: {told(violation)}; "
        f"{writer_of(violation)} wrote it last{written(violation)}: its block table points at a block that is not its "
        "own",
        confidence=0.3 if had_it else 0.8,
    )


def _written_outside_the_step(violation: Violation, burst: Burst) -> Iterator[Cause]:
    if violation.request is None or violation.layer is not None:
        yield _padding_write(violation)
    else:
        yield Cause(
            cause="write_outside_the_step",
            sentence=f"{place(violation)}: {bytes_of(violation)} changed at step {violation.step}, though no request "
            f"was to write there ({writer_of(violation)} wrote it{written(violation)}): a kernel writes "
            "through a wrong slot mapping or out of bounds",
            confidence=0.7,
        )


def _write_dropped(violation: Violation, burst: Burst) -> Iterator[Cause]:
    yield Cause(
        cause="write_dropped",
        sentence=f"{place(violation)}: {who(violation)} was to write {bytes_of(violation)} at step {violation.step} "
        "but the bytes stayed as they were: the cache write was skipped or went elsewhere",
        confidence=0.7,
    )


def _not_finite(violation: Violation, burst: Burst) -> Iterator[Cause]:
    holds = f"{place(violation)}: {bytes_of(violation)} holds NaN or infinity"
    if violation.writer is None and violation.position is None:
        yield Cause(
            cause="nonfinite_in_null_block",
            sentence=f"{holds}, seen at step {violation.step}: attention multiplies the null block by zero, which does "
            "not take NaN away",
            confidence=0.9,
        )
    elif violation.written_step is not None and violation.written_step < violation.step:
        yield Cause(
            cause="stray_write",
            sentence=f"{holds} that {who(violation)} reads at step {violation.step}, and was finite when "
            f"{writer_of(violation)} wrote it{written(violation)}: a stray write or a memory error",
            confidence=0.7,
        )
    yield Cause(
        cause="nonfinite_values",
        sentence=f"{holds} that {who(violation)} reads at step {violation.step}, written by {writer_of(violation)}"
        f"{written(violation)}: an overflow in the model, uninitialised memory, or wrong scales",
        confidence=0.6,
    )


def _transfer_damaged(violation: Violation, burst: Burst) -> Iterator[Cause]:
    what = (
        f"{place(violation)}: {bytes_of(violation)} came back from a transfer other than {writer_of(violation)} wrote "
        f"it{written(violation)}"
    )
    extent = _extent(violation, burst)
    whole = burst.whole_token(violation) and not burst.uniform(violation)
    if burst.single(violation):
        yield Cause(
            cause="stray_write",
            sentence=f"{what}: one part of one slot, a stray write or a memory error before it was stored",
            confidence=0.6,
        )
    yield Cause(
        cause="transfer_incomplete",
        sentence=f"{what}; {extent}: the transfer left layers out, brought nothing, or was not waited for",
        confidence=0.3 if whole or burst.single(violation) else 0.85,
    )
    yield Cause(
        cause="block_reused_during_transfer",
        sentence=f"{what}; {extent}: the block was written to, or given away, before the transfer ended",
        confidence=0.8 if whole else 0.3,
    )
    yield Cause(
        cause="transfer_damaged",
        sentence=f"{what}: the other tier, or the way there, changed it",
        confidence=0.4,
    )


def _index_wrong(violation: Violation, burst: Burst) -> Iterator[Cause]:
    yield Cause(
        cause="prefix_index_wrong",
        sentence=f"{place(violation)}: {told(violation)}, which {writer_of(violation)} wrote"
        f"{written(violation)}: the next prompt with that prefix gets a wrong hit",
        confidence=0.9,
    )


def _ranks_disagree(violation: Violation, burst: Burst) -> Iterator[Cause]:
    yield Cause(
        cause="rank_divergence",
        sentence=f"{who(violation)} at step {violation.step}: {told(violation)}: this rank's pool or block table has "
        "diverged",
        confidence=0.8,
    )


def _unexplained(violation: Violation, burst: Burst) -> Iterator[Cause]:
    values = compared(violation)
    yield Cause(
        cause="unexplained",
        sentence=f"{place(violation)}: {violation.kind} violation for {who(violation)} at step {violation.step}: "
        f"{told(violation)}{f' ({values})' if values else ''}, written by {writer_of(violation)}"
        f"{written(violation)}",
        confidence=0.1,
    )


_RULES: dict[Kind, tuple[_Rule, ...]] = {
    Kind.ADDRESS: (_wrong_address,),
    Kind.UNWRITTEN: (_never_written,),
    Kind.POSITION: (_wrong_input, _entries_swapped, _foreign_write),
    Kind.TOKEN: (_wrong_input, _own_history_changed, _foreign_write),
    Kind.NAMESPACE: (_shared_across_namespaces,),
    Kind.EPOCH: (_kept_across_weights,),
    Kind.CHAIN: (_own_history_changed, _foreign_write),
    Kind.CONTENT: (_changed_bytes,),
    Kind.OWNERSHIP: (_allocator_broke_its_rules, _used_without_holding),
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
