"""What a crash left prepared in a database: found by its name, decided by the daemon, never guessed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError

from plainsong.sql.prepared import check_kind, finish, prepared

if TYPE_CHECKING:
    from plainsong.sql.prepared import Prepared
    from plainsong.transactions.values import TransactionState, TransactionStatus

log = logging.getLogger("plainsong.sql")

#: ``gone``: somebody else finished it meanwhile. ``left``: see the advice, if there is one.
Action = Literal["committed", "rolled_back", "gone", "left"]


class Outcomes(Protocol):
    """Where outcomes are asked for."""

    def get(self, transaction: int) -> TransactionStatus:
        """What became of one."""
        ...


class Knows(Protocol):
    """A ``Client``, as far as recovery needs it."""

    @property
    def transactions(self) -> Outcomes:
        """Its transaction service."""
        ...


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


def recover(database: Engine | str, client: Knows) -> Recovery:
    """Finish what was left prepared: committed transactions are committed, aborted and invalid ones rolled back.

    What is in progress is left to its client, and what the daemon does not know is left, and told as an error in
    the log and in the answer. Safe beside clients that are at work and beside other recoveries.

    Args:
      database: an engine, or its URL. It must be the database, and a user, that prepared them.
      client: of the daemon that decided.
    Raises:
      PlainsongError: the daemon could not be asked. SQLAlchemyError: the database could not. What was finished
        before stays finished; do it again.
    """
    if isinstance(database, Engine):
        return _recover(database, client)
    engine = create_engine(database)
    try:
        return _recover(engine, client)
    finally:
        engine.dispose()


def _recover(engine: Engine, client: Knows) -> Recovery:
    check_kind(engine)
    found = []
    for each in prepared(engine):
        treated = _treat(engine, each, client.transactions.get(each.gid.transaction_id).state)
        level = logging.ERROR if treated.advice else logging.INFO
        log.log(
            level,
            "%s, %s: %s%s%s",
            each.gid,
            treated.state,
            treated.action,
            ": " * bool(treated.advice),
            treated.advice,
        )
        found.append(treated)
    return Recovery(tuple(found))


def _treat(engine: Engine, each: Prepared, state: TransactionState) -> Found:
    gid, advice = str(each.gid), ""
    action: Action = "left"
    if state == "unknown":
        advice = _by_hand(each)
    elif state != "in_progress":
        commit = state == "committed"
        try:
            is_ours = finish(engine, each.gid, commit=commit)
            action = ("committed" if commit else "rolled_back") if is_ours else "gone"
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            advice = f"the database refused, do it as {each.owner}: {' '.join(str(error.orig).split())}"
    return Found(gid, each.gid.transaction_id, state, action, each.age_s, advice)


def _by_hand(each: Prepared) -> str:
    return (
        f"this daemon knows no outcome of {each.gid.transaction_id}: ask the daemon that it was of; if it was this one"
        f" and has forgotten, see whether messages by {each.gid.transaction_id} are committed (plainsong peek), and run"
        f" COMMIT PREPARED '{each.gid}' or ROLLBACK PREPARED '{each.gid}' in this database"
    )
