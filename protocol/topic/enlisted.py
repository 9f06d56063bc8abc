"""Which write pointers a topic may write under, where somebody else decides them: those it has been enlisted for.

Whoever decides a pointer knows the topics that are enlisted for it, and has each of them close it first. What the topic
hears of decisions comes late, and is good enough for forgetting; it never is for writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from protocol.errors import TransactionsUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.topic.pointer_asks import ClosePointers
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step
    from protocol.transactions.authority import Standing

#: What may become of a pointer still: only who decides it can say more.
_OPEN = ("in_progress", "unknown", "deciding")


class NotEnlisted(TransactionsUnavailable):
    """The topic has to be enlisted for the pointer first: nothing happened, and it can be asked again after that."""

    title = "The topic is not enlisted for this write pointer"


class Enlistment(Protocol):
    """What one owner of a topic is enlisted for; ends with it."""

    def holds(self, pointer: int) -> bool:
        """Whether the topic is enlisted for a pointer."""
        ...

    def close(self, pointers: Iterable[int]) -> None:
        """It is not any more, and what was asked before this does not make it so again."""
        ...


def standing_to_write(state: TopicState, pointer: int) -> Standing:
    """What became of a pointer under which something is to be written.

    Raises:
      NotEnlisted, TransactionsUnavailable: nobody here can say; nothing happened.
    """
    if state.enlistment is None:
        return state.authority.standing(pointer)
    if not state.enlistment.holds(pointer):
        raise _not_enlisted(state, pointer)
    return "invalid" if _is_known_invalid(state, pointer) else "in_progress"


def standing_to_roll_back(state: TopicState, pointer: int) -> Standing:
    """The same for a client's rollback, which what was aborted or is invalid may have at any time."""
    if state.enlistment is None:
        return state.authority.standing(pointer)
    if state.enlistment.holds(pointer):
        return "in_progress"
    standing = state.authority.standing(pointer)
    if standing in _OPEN:
        raise _not_enlisted(state, pointer)
    return standing


def close(state: TopicState, pointers: Iterable[int]) -> None:
    """Nothing more is written under these, unless the topic is enlisted again."""
    if state.enlistment is not None:
        state.enlistment.close(pointers)


def close_pointers(state: TopicState, step: Step, ask: ClosePointers, now: Now) -> None:
    """Close them; what was asked before this in the same step is durable before it is answered."""
    del step, now
    close(state, ask.pointers)


def _is_known_invalid(state: TopicState, pointer: int) -> bool:
    """Its time may be over: that is nothing its topics are asked about, so it is heard of in passing."""
    try:
        return state.authority.standing(pointer) == "invalid"
    except TransactionsUnavailable:
        return False


def _not_enlisted(state: TopicState, pointer: int) -> NotEnlisted:
    return NotEnlisted(
        f"topic {state.name} is not enlisted for write pointer {pointer}", hint="nothing happened; send it again"
    )
