"""When a topic may forget a write pointer: it was decided, or it is older than any transaction may be.

committed, aborted               at once; stored messages that were never published are removed first
rolled back, or nobody knows it  once it is past the maximum lifetime; without one, once the topic's ttl
                                 has passed since it was last used
in progress, invalid             kept: invalid ones until the service has pruned them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import TransactionsUnavailable
from protocol.keys import payload_prefix, stop_after
from protocol.topic.admission import too_old
from protocol.topic.bookkeeping import forget
from protocol.topic.keeping import drop_stored
from protocol.topic.pointer_asks import PointerView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.topic.pending import Pending
    from protocol.topic.pointer_asks import ListPointers
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step
    from protocol.transactions.authority import Standing

#: Pointers whose stored messages one cleaning plan has removed.
MAX_ORPHANS = 10_000


def take_decided(state: TopicState, pointers: Iterable[int]) -> None:
    """These have been committed or aborted."""
    for pointer in pointers:
        pending = state.pending.get(pointer)
        if pending is not None:
            _decide(state, pending)


def settle_known(state: TopicState) -> None:
    """Forget, after a load, what the authority has decided meanwhile."""
    partly_cleaned = state.metadata is not None and state.metadata.partly_cleaned
    for pending in list(state.pending.values()):
        if partly_cleaned:
            forget(state, pending)
        elif pending.pointer > 0 and _standing(state, pending.pointer) in ("committed", "aborted"):
            _decide(state, pending)


def _standing(state: TopicState, pointer: int) -> Standing:
    """What the authority says; while it cannot, nothing is forgotten, and nothing else waits for it."""
    try:
        return state.authority.standing(pointer)
    except TransactionsUnavailable:
        return "in_progress"


def _decide(state: TopicState, pending: Pending) -> None:
    if pending.stored:
        pending.decided = True
    else:
        forget(state, pending)


def plan_pointers(state: TopicState) -> list[tuple[int, bytes, bytes]]:
    """Forget what may be forgotten; of the rest, the ``[start, stop)`` of payload keys that may be removed.

    Those are marked as orphans for good, since some may be gone before the next crash.
    """
    orphans: list[tuple[int, bytes, bytes]] = []
    for pending in list(state.pending.values()):
        if pending.pointer < 0:
            orphans += plan_staged(state, pending, room=len(orphans) < MAX_ORPHANS)
            continue
        standing = _standing(state, pending.pointer)
        old = _is_old(state, pending)
        if standing in ("committed", "aborted"):
            _decide(state, pending)
        if pending.stored and len(orphans) < MAX_ORPHANS and _is_orphan(pending, standing, old=old):
            orphans.append(orphaned(state, pending))
        elif not pending.stored and pending.pointer in state.pending and _is_over(pending, standing, old=old):
            forget(state, pending)
    return orphans


def plan_staged(state: TopicState, pending: Pending, *, room: bool) -> list[tuple[int, bytes, bytes]]:
    """What was staged and not published for as long as a transaction may live, as ``plan_pointers`` gives it."""
    life_ms = state.limits.max_lifetime_ms or state.living_or_last().properties.ttl_ms
    if not pending.orphaned and pending.used_ms + life_ms > state.time_ms:
        return []
    if pending.damaged:
        forget(state, pending)
        return []
    return [orphaned(state, pending)] if room else []


def orphaned(state: TopicState, pending: Pending) -> tuple[int, bytes, bytes]:
    """What is stored under the pointer is never published, from now on: ``[start, stop)`` of its payload keys."""
    if not pending.orphaned:
        pending.orphaned = True
        state.changed.add(pending.pointer)
        if pending.staged_by is not None:
            del state.staged[pending.staged_by]
    start = payload_prefix(state.name, state.living().generation, pending.pointer)
    return pending.pointer, start, stop_after(start)


def orphans_removed(state: TopicState, pointers: Iterable[int]) -> None:
    """The stored messages of these are gone: forget them, or remember that nothing is stored."""
    for pointer in pointers:
        pending = state.pending.get(pointer)
        if pending is None or not pending.orphaned:
            continue
        drop_stored(state, pending)
        if pending.pointer < 0:
            forget(state, pending)
            continue
        standing = _standing(state, pointer)
        if pending.decided or _is_over(pending, standing, old=_is_old(state, pending)):
            forget(state, pending)
        else:
            state.changed.add(pointer)


def _is_orphan(pending: Pending, standing: Standing, *, old: bool) -> bool:
    gone = pending.rolled_back or pending.decided or pending.orphaned
    return gone or (old and standing in ("unknown", "invalid"))


def _is_over(pending: Pending, standing: Standing, *, old: bool) -> bool:
    return old and standing != "invalid" and (pending.rolled_back or standing == "unknown")


def _is_old(state: TopicState, pending: Pending) -> bool:
    if state.limits.max_lifetime_ms > 0:
        return too_old(state, pending.pointer)
    return pending.used_ms + state.living_or_last().properties.ttl_ms < state.time_ms


def list_pointers(state: TopicState, step: Step, ask: ListPointers, now: Now) -> list[PointerView]:
    """All undecided pointers, those without rows last. Raises TopicNotFound."""
    del step, ask, now
    state.living()
    state.usage.drop_before(state.oldest_ms)
    undecided = (each for each in state.pending.values() if each.pointer > 0 and not each.decided)
    known = [_view(state, pending) for pending in undecided]
    return sorted(known, key=lambda view: (view.first is None, view.first or b"", view.pointer))


def _view(state: TopicState, pending: Pending) -> PointerView:
    placed = bool(pending.runs) and not pending.damaged
    return PointerView(
        pending.pointer,
        pending.since_ms,
        first=pending.runs[0].first if placed else None,
        messages=pending.messages,
        bytes=pending.size,
        stored=pending.stored,
        stored_bytes=pending.stored_bytes,
        rolled_back=pending.rolled_back,
        hidden=min(pending.hidden(state.appended), state.usage.messages) if placed else 0,
    )
