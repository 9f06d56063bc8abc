"""What goes wrong between an outbox, its database and its relay, each with its code and whether it happened."""

from __future__ import annotations

from protocol.errors import Outcome, PlainsongError, Unavailable


class OutboxUnusable(PlainsongError):
    """This database or session cannot hold an outbox: nothing happened."""

    code = "outbox_unusable"
    title = "There can be no outbox here"


class OutboxMissing(OutboxUnusable):
    """The tables of the outbox are not there: nothing happened."""

    code = "outbox_missing"
    title = "The outbox has not been made"


class OutboxUnavailable(Unavailable):
    """The outbox's database cannot be reached, or did not do it: what waits there goes on waiting."""

    code = "outbox_unavailable"
    title = "The outbox cannot be reached"


class OutboxBusy(Unavailable):
    """Another relay is at work at this outbox: this one did nothing."""

    code = "outbox_busy"
    title = "Another relay is at work"


class OutboxInDoubt(PlainsongError):
    """Of some messages nobody can say whether the topic has them. They are kept, and nothing is sent of that topic.

    ``Relay.decide``, or ``plainsong outbox decide``, says what to do with them.
    """

    code = "outbox_in_doubt"
    title = "Nobody knows whether these messages were published"
    outcome: Outcome = "unknown"

    def __init__(self, detail: str = "", *, hint: str = "", topic: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.topic = topic
