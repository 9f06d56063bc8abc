"""A SQLAlchemy session as a participant of a transaction: its rows and the messages become visible together, or not at all.

The session's work happens in one database transaction, which is prepared (PREPARE TRANSACTION) before the transaction
service decides, and finished (COMMIT PREPARED, ROLLBACK PREPARED) afterwards. Whatever process dies in between, the
prepared transaction waits in the database until this participant or ``recover`` finishes it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session

from plainsong.sql.errors import SqlInDoubt, SqlMisused, SqlUnusable, first_line
from plainsong.sql.prepared import check_allowed, check_kind, finish, new_gid, recover

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sqlalchemy.engine import TwoPhaseTransaction
    from sqlalchemy.orm import SessionTransaction

    from plainsong import Client, Transaction
    from plainsong.sql.prepared import Gid

log = logging.getLogger("plainsong.sql")
#: ``idle``: not in a transaction. ``open``: the session works. ``preparing``: it may be prepared.
#: ``prepared``: it waits for the decision. ``deciding``: the decision is being carried out.
Phase = Literal["idle", "open", "preparing", "prepared", "deciding"]
#: Engines that are known to be able to take part, and engines that were recovered for ``recover_with``.
_ready: WeakSet[Engine] = WeakSet()
_recovered: WeakSet[Engine] = WeakSet()


class NamedConnection(Connection):
    """A connection whose two-phase transactions have a given name."""

    def __init__(self, engine: Engine, gid: Gid) -> None:
        super().__init__(engine)
        self.gid = gid

    def begin_twophase(self, xid: Any = None) -> TwoPhaseTransaction:
        """Like ``Connection.begin_twophase``, which would draw a name that recovery could not find."""
        return super().begin_twophase(str(self.gid) if xid is None else xid)


class SqlParticipant:
    """Enlists a session, of PostgreSQL through psycopg 3, in the transaction of a client.

        with client.transaction(participants=[SqlParticipant(session)]) as tx:
            session.add(Order(id=17))
            tx.publish("orders", b"17")

    The session must not be in a transaction when the block begins, and must not be committed, rolled back or closed
    inside it; savepoints are allowed. Afterwards its state is the same as after ``session.commit()`` or
    ``session.rollback()``. A participant can be used for several transactions in turn, by one thread at a time.

    Args:
      session: a session with one engine, or a ``scoped_session`` for this thread's; for another database, add another
        participant with another session.
      engine: the engine, for a session with several.
      execution_options: for the session's connection, such as ``{"isolation_level": "SERIALIZABLE"}``.
      recover_with: a client. When the first transaction of this process begins in this database, finish those that
        earlier programs left in doubt there, according to this client's daemon.
    """

    def __init__(
        self,
        session: Session | scoped_session[Session],
        *,
        engine: Engine | None = None,
        execution_options: Mapping[str, Any] | None = None,
        recover_with: Client | None = None,
    ) -> None:
        self._session = session() if isinstance(session, scoped_session) else session
        self._chosen = engine
        self._options = dict(execution_options or {})
        self._recover_with = recover_with
        self._phase: Phase = "idle"
        self._lost = ""
        self._finishing = False
        self._twophase = False
        self._engine: Engine | None = None
        self._connection: NamedConnection | None = None
        self._listening: list[tuple[Any, str, Any]] = []

    @property
    def name(self) -> str:
        """The database, as errors name it."""
        engine = self._engine or self._chosen
        return "the SQL session" if engine is None else f"the SQL session of {engine.url.render_as_string()}"

    # --- calls by the transaction ----------------------------------------------------------------

    def start_tx(self, transaction: Transaction) -> None:
        """Begins a transaction of the session. Raises SqlUnusable and SQLAlchemy's errors: nothing happened."""
        if self._phase == "open":
            self.abandon_tx()
        elif self._phase != "idle":
            self._release()
        engine = self._engine = self._usable_engine()
        gid = new_gid(transaction.service, transaction.id)
        self._lost, self._finishing, self._twophase = "", False, self._session.twophase
        self._connection = connection = NamedConnection(engine, gid)
        try:
            self._listen(connection)
            self._session.twophase = True
            self._session.begin()
            self._session.connection({"bind": connection}, execution_options=self._options)
        except BaseException:
            self._session.rollback()
            self._release()
            raise
        self._phase = "open"

    def abandon_tx(self) -> None:
        """Undoes ``start_tx`` when another participant failed to start; the connection returns to the pool."""
        self._phase = "deciding"
        try:
            self._session.rollback()
        finally:
            self._release()

    def update_tx(self, transaction: Transaction) -> None:
        """After a checkpoint; the session's transaction continues."""

    def tx_changes(self) -> Collection[bytes]:
        """None: the database detects its own conflicts. Called first when the transaction commits."""
        self._finishing = True
        return ()

    def commit_tx(self) -> bool:
        """Prepares, or flushes at a checkpoint. Raises SqlMisused and SQLAlchemy's errors: it can be rolled back."""
        if self._lost:
            raise SqlMisused(self._lost, hint="the transaction ends the session; savepoints (begin_nested) are allowed")
        if not self._finishing:
            self._session.flush()
            return True
        self._phase = "preparing"
        self._session.prepare()
        self._phase = "prepared"
        return True

    def post_tx_commit(self) -> None:
        """Makes the rows visible.

        Raises:
          SqlInDoubt: the database could not be reached; the rows are kept, and ``recover`` makes them visible.
        """
        self._phase = "deciding"
        try:
            self._session.commit()
        except SQLAlchemyError as error:
            self._finish_elsewhere(error)
        finally:
            self._release()

    def rollback_tx(self) -> bool:
        """Rolls back; False when the database could not be reached and may keep a prepared transaction."""
        may_be_prepared = self._phase in ("preparing", "prepared")
        self._phase = "deciding"
        try:
            self._session.rollback()
        except SQLAlchemyError:
            self._session.invalidate()
        try:
            # The session cannot tell what a broken PREPARE left.
            return not may_be_prepared or self._is_rolled_back()
        finally:
            self._release()

    # --- finishing without the session's connection ----------------------------------------------

    def _finish_elsewhere(self, cause: SQLAlchemyError) -> None:
        self._session.invalidate()
        engine, gid = self._locked()
        try:
            finish(engine, gid, commit=True)
        except SQLAlchemyError:
            detail = f"the transaction is committed, its rows in {self.name} wait as prepared transaction {gid}: {first_line(cause)}"
            raise SqlInDoubt(
                detail, hint="recover(engine, client), or plainsong tx recover, makes them visible"
            ) from cause

    def _is_rolled_back(self) -> bool:
        engine, gid = self._locked()
        try:
            finish(engine, gid, commit=False)
        except SQLAlchemyError as error:
            log.warning(
                "%s may keep prepared transaction %s until it is recovered: %s", self.name, gid, first_line(error)
            )
            return False
        return True

    def _locked(self) -> tuple[Engine, Gid]:
        assert self._engine is not None
        assert self._connection is not None
        return self._engine, self._connection.gid

    # --- rules for the session -------------------------------------------------------------------

    def _usable_engine(self) -> Engine:
        """Checks the session and returns its engine."""
        session = self._session
        if not isinstance(session, Session):
            hint = "use a Session; an AsyncSession cannot take part" if hasattr(session, "sync_session") else ""
            raise SqlUnusable(f"{type(session).__name__} is not a session of sqlalchemy.orm", hint=hint)
        if session.in_transaction():
            raise SqlUnusable(
                "the session is already in a transaction",
                hint="commit or roll it back first; work of the transaction belongs inside its block",
            )
        bind = self._chosen or session.get_bind()
        if not isinstance(bind, Engine):
            raise SqlUnusable("the session is bound to a connection", hint="bind it to an engine")
        check_kind(bind)
        if bind not in _ready:
            check_allowed(bind)
            _ready.add(bind)
        if self._recover_with is not None and bind not in _recovered:
            recover(bind, self._recover_with)
            _recovered.add(bind)
        return bind

    def _listen(self, connection: NamedConnection) -> None:
        for target, name, listener in (
            (self._session, "before_commit", self._before_commit),
            (self._session, "after_begin", self._after_begin),
            (self._session, "after_transaction_end", self._after_transaction_end),
            (connection, "commit_twophase", self._commit_twophase),
            (connection, "rollback_twophase", self._rollback_twophase),
        ):
            event.listen(target, name, listener)
            self._listening.append((target, name, listener))

    def _release(self) -> None:
        """Frees the session, whatever the outcome of the transaction."""
        for target, name, listener in self._listening:
            event.remove(target, name, listener)
        self._listening.clear()
        self._session.twophase = self._twophase
        self._phase = "idle"
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _before_commit(self, session: Session) -> None:
        if self._phase == "open" and not session.in_nested_transaction():
            raise SqlMisused(
                "the session was committed inside the transaction",
                hint="the transaction commits rows and messages together",
            )

    def _after_begin(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        if self._phase == "open" and connection.engine is not self._engine:
            self._lost = f"the session used a second database, {connection.engine.url.render_as_string()}"
            raise SqlMisused(self._lost, hint="give that database its own session and participant")

    def _after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None and self._phase == "open":
            self._lost = "the session was rolled back or closed inside the transaction"

    def _commit_twophase(self, connection: Connection, xid: Any, is_prepared: bool) -> None:
        if self._phase == "prepared":
            connection.invalidate()
            raise SqlMisused(f"{xid} is undecided", hint="recover() asks the daemon for the outcome, and finishes it")

    def _rollback_twophase(self, connection: Connection, xid: Any, is_prepared: bool) -> None:
        """Keep the rows if the session is closed before the decision is known: only the connection is released.

        The same after a failed PREPARE: rolling back a transaction that does not exist would hide the error.
        """
        if self._phase in ("preparing", "prepared"):
            connection.invalidate()
