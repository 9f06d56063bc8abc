"""Errors between a database and the daemon, each with its code and whether the request happened."""

from __future__ import annotations

from typing import TypeVar

from plainsong.protocol.errors import Outcome, PlainsongError, Unavailable


def first_line(error: BaseException) -> str:
    """The error's message without the lines that a database driver adds."""
    return str(error).partition("\n")[0]


#: The packages of drivers that are not called like them.
_PACKAGES = {"psycopg2": "psycopg2-binary"}

E = TypeVar("E", bound=PlainsongError)


def without_driver(kind: type[E], missing: ModuleNotFoundError) -> E:
    """The error for a URL whose driver is not installed."""
    name = (missing.name or "").partition(".")[0]
    hint = "pip install 'plainsong-client[sql]'" if name == "psycopg" else f"pip install {_PACKAGES.get(name, name)}"
    return kind(f"this database needs the package {name}, which is not installed", hint=hint)


class SqlUnusable(PlainsongError):
    """This database, engine or session cannot take part in a transaction: nothing happened."""

    code = "sql_unusable"
    title = "This database or session cannot take part"


class SqlUnavailable(Unavailable):
    """The database cannot be reached; work not finished before is unchanged."""

    code = "sql_unavailable"
    title = "The database cannot be reached"


class SqlMisused(PlainsongError):
    """The session was committed, rolled back or closed inside its transaction: nothing happened."""

    code = "sql_misused"
    title = "The session belongs to the transaction"


class SqlInDoubt(PlainsongError):
    """The transaction is committed, and its rows are safe in the database, but not visible yet.

    ``recover`` makes them visible; doing the work again would do it twice.
    """

    code = "sql_in_doubt"
    title = "Rows wait for recovery"
    outcome: Outcome = "applied"


# --- outbox ----------------------------------------------------------------------------------------


class OutboxUnusable(PlainsongError):
    """This database or session cannot hold an outbox: nothing happened."""

    code = "outbox_unusable"
    title = "This database or session cannot hold an outbox"


class OutboxMissing(OutboxUnusable):
    """The tables of the outbox do not exist: nothing happened."""

    code = "outbox_missing"
    title = "The outbox has no tables"


class OutboxUnavailable(Unavailable):
    """The outbox's database cannot be reached, or failed; its messages keep waiting."""

    code = "outbox_unavailable"
    title = "The outbox cannot be reached"


class OutboxBusy(Unavailable):
    """Another relay works on this outbox; this one did nothing."""

    code = "outbox_busy"
    title = "Another relay is running"


class OutboxInDoubt(PlainsongError):
    """It is unknown whether the topic has some messages. They are kept, and nothing more is sent to that topic.

    ``Relay.decide``, or ``plainsong outbox decide``, resolves this.
    """

    code = "outbox_in_doubt"
    title = "These messages may have been published"
    outcome: Outcome = "unknown"

    def __init__(self, detail: str = "", *, hint: str = "", topic: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.topic = topic
