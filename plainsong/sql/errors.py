"""What goes wrong between a database and a transaction, each with its code and whether it happened."""

from __future__ import annotations

from protocol.errors import Outcome, PlainsongError, Unavailable


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
