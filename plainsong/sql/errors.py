"""Errors between a database and the daemon, each with its code and whether it happened.

What goes wrong between a database and a transaction, each with its code and whether it happened.
"""

from __future__ import annotations

from plainsong.protocol.errors import Outcome, PlainsongError, Unavailable


def first_line(error: BaseException) -> str:
    """What an error says, without the lines that a database driver adds."""
    return str(error).partition("\n")[0]


class SqlUnusable(PlainsongError):
    """This database, engine or session cannot take part in a transaction: nothing happened."""

    code = "sql_unusable"
    title = "This database or session cannot take part"


class SqlUnavailable(Unavailable):
    """The database cannot be reached: what was not finished before is as it was."""

    code = "sql_unavailable"
    title = "The database cannot be reached"


class SqlMisused(PlainsongError):
    """The session was committed, rolled back or closed inside the transaction that it is part of: nothing happened."""

    code = "sql_misused"
    title = "The session belongs to the transaction"


class SqlInDoubt(PlainsongError):
    """The transaction is committed, and its rows are safe in the database, but not to be seen yet.

    ``recover`` shows them, now or later; doing the work again would do it twice.
    """

    code = "sql_in_doubt"
    title = "Rows wait for recovery"
    outcome: Outcome = "applied"


# --- outbox errors ---------------------------------------------------------------------------------
#
# What goes wrong between an outbox, its database and its relay, each with its code and whether it happened.


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
