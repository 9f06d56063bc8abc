"""How the course of a transaction speaks to those who take part: to the messages in steps, to others by ``Tell``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from plainsong.core.effects import Tell
from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from plainsong.core.effects import Steps
    from plainsong.transactions.participants import AnyParticipant
    from plainsong.transactions.values import Transaction

#: What a participant must have.
METHODS = ("start_tx", "update_tx", "tx_changes", "commit_tx", "post_tx_commit", "rollback_tx")


class Member(Protocol):
    """A participant whose methods are steps."""

    @property
    def name(self) -> str:
        """What errors call it; never raises."""
        ...

    def start_tx(self, transaction: Transaction) -> Steps[None]:
        """A transaction has begun."""
        ...

    def update_tx(self, transaction: Transaction) -> Steps[None]:
        """It goes on under another pointer."""
        ...

    def tx_changes(self) -> Steps[Collection[bytes]]:
        """What was changed."""
        ...

    def commit_tx(self) -> Steps[bool]:
        """Make it durable."""
        ...

    def post_tx_commit(self) -> Steps[None]:
        """It is committed."""
        ...

    def rollback_tx(self) -> Steps[bool]:
        """Undo it."""
        ...


class Foreign:
    """A member that is somebody else's object, asynchronous or not."""

    def __init__(self, participant: AnyParticipant) -> None:
        for method in METHODS:
            if not callable(getattr(participant, method, None)):
                raise InvalidParameter(
                    f"{type(participant).__name__} cannot take part in a transaction: it has no {method}",
                    hint="see plainsong.TransactionAware",
                )
        self.participant = participant

    @property
    def name(self) -> str:
        """Its own name, or its type's."""
        try:
            return str(self.participant.name)
        except Exception:  # noqa: BLE001 - the name is only for errors, and must not be one
            return type(self.participant).__name__

    def start_tx(self, transaction: Transaction) -> Steps[None]:
        """``participant.start_tx``."""
        yield from _told(self.participant.start_tx, transaction)

    def update_tx(self, transaction: Transaction) -> Steps[None]:
        """``participant.update_tx``."""
        yield from _told(self.participant.update_tx, transaction)

    def tx_changes(self) -> Steps[Collection[bytes]]:
        """``participant.tx_changes``; raises TypeError when that is no collection of bytes."""
        changes: Any = yield from _told(self.participant.tx_changes)
        if isinstance(changes, (bytes, bytearray, str)) or not all(isinstance(each, bytes) for each in changes):
            raise TypeError("tx_changes has to return a collection of bytes")
        return list(changes)

    def commit_tx(self) -> Steps[bool]:
        """``participant.commit_tx``; anything but True is a failure."""
        return bool((yield from _told(self.participant.commit_tx)) is True)

    def post_tx_commit(self) -> Steps[None]:
        """``participant.post_tx_commit``."""
        yield from _told(self.participant.post_tx_commit)

    def rollback_tx(self) -> Steps[bool]:
        """``participant.rollback_tx``; anything but True is a failure."""
        return bool((yield from _told(self.participant.rollback_tx)) is True)

    def abandon_tx(self) -> Steps[None]:
        """``participant.abandon_tx``, if it has one."""
        abandon = getattr(self.participant, "abandon_tx", None)
        if abandon is not None:
            yield from _told(abandon)


def _told(method: Callable[..., Any], *arguments: Any) -> Steps[Any]:
    return (yield Tell(lambda: method(*arguments)))
