"""What a crash left prepared in a database: found by its name, decided by the daemon, never guessed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sqlalchemy import create_engine
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from plainsong.sql.errors import SqlUnavailable, SqlUnusable, first_line
from plainsong.sql.gids import NAMELESS
from plainsong.sql.prepared import BUSY, FORBIDDEN, check_kind, finish, prepared, sqlstate

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.sql.prepared import Prepared
    from plainsong.transactions.values import TransactionState, TransactionStatus

log = logging.getLogger("plainsong.sql")

#: ``gone``: somebody else finished it meanwhile. ``left``: see the advice, if there is one.
Action = Literal["committed", "rolled_back", "gone", "left"]


@dataclass(frozen=True, slots=True)
class Found:
    """One prepared transaction, and what was done about it."""

    gid: str
    transaction_id: int
    state: TransactionState
    """What the daemon says of it."""
    action: Action
    age_s: float
    """Since it was prepared."""
    advice: str = ""
    """What a person has to do; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """All that was found, the oldest first."""

    found: tuple[Found, ...]

    def count(self, action: Action) -> int:
        """How many were treated so."""
        return sum(each.action == action for each in self.found)

    @property
    def unsure(self) -> tuple[Found, ...]:
        """Those that wait for a person."""
        return tuple(each for each in self.found if each.advice)


def recover(database: Engine | str, client: Client) -> Recovery:
    """Finish what was left prepared: committed transactions are committed, aborted and invalid ones rolled back.

    What is in progress is left to its client, and what the daemon does not know is left, and told as an error in
    the log and in the answer. Safe beside clients that are at work and beside other recoveries.

    Args:
      database: an engine, or its URL. It must be the database, and a user, that prepared them.
      client: of the daemon that decided.
    Raises:
      SqlUnusable: it is no database that prepares. SqlUnavailable: the database could not be asked. PlainsongError:
        the daemon could not. What was finished before stays finished; do it again.
    """
    if isinstance(database, Engine):
        return _recover(database, client)
    engine = _engine_of(database)
    try:
        return _recover(engine, client)
    finally:
        engine.dispose()


def _engine_of(url: str) -> Engine:
    """An engine; of the driver that prepares, where the URL names none."""
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        return create_engine(parsed, poolclass=NullPool)
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        hint = "it looks like postgresql://user@host:5432/database"
        raise SqlUnusable(f"this is no URL of a database: {first_line(error)}", hint=hint) from error


def _recover(engine: Engine, client: Client) -> Recovery:
    check_kind(engine)
    found = []
    try:
        waiting = prepared(engine)
    except SQLAlchemyError as error:
        raise SqlUnavailable(f"the database cannot be asked: {first_line(error)}") from error
    for each in waiting:
        treated = _treat(engine, each, client.transactions.get(each.gid.transaction_id))
        level = logging.ERROR if treated.advice else logging.INFO
        log.log(level, "%s is %s: %s. %s", each.gid, treated.state, treated.action, treated.advice)
        found.append(treated)
    return Recovery(tuple(found))


def _treat(engine: Engine, each: Prepared, status: TransactionStatus) -> Found:
    gid, advice = str(each.gid), ""
    action: Action = "left"
    # Ids come from the clock: another service may know one that is the same, and another outcome for it.
    state = status.state if each.gid.service in (NAMELESS, status.service) else "unknown"
    if state == "unknown":
        advice = _by_hand(each)
    elif state != "in_progress":
        commit = state == "committed"
        try:
            is_ours = finish(engine, each.gid, commit=commit)
            action = ("committed" if commit else "rolled_back") if is_ours else "gone"
        except DBAPIError as error:
            if sqlstate(error) == FORBIDDEN:
                advice = f"the database refused, do it as {each.owner}: {first_line(error)}"
            elif sqlstate(error) != BUSY:  # then somebody else is at it
                raise SqlUnavailable(f"{gid} cannot be finished: {first_line(error)}") from error
    return Found(gid, each.gid.transaction_id, state, action, each.age_s, advice)


def _by_hand(each: Prepared) -> str:
    return (
        f"this daemon knows no outcome of {each.gid.transaction_id}: ask the daemon that it was of; if it was this one"
        f" and has forgotten, see whether messages by {each.gid.transaction_id} are committed (plainsong peek), and run"
        f" COMMIT PREPARED '{each.gid}' or ROLLBACK PREPARED '{each.gid}' in this database"
    )
