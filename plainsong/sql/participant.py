"""A SQLAlchemy session as a participant of a transaction: its rows and the messages become visible together, or not at all.

The session's work happens in one transaction of the database, which is prepared (PREPARE TRANSACTION) before the
transaction service decides, and finished (COMMIT PREPARED, ROLLBACK PREPARED) when it has. Whatever dies in
between, a prepared transaction waits in the database until somebody finishes it: this participant, or ``recover``.
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
#: ``idle``: not in a transaction. ``open``: the session works. ``preparing``: nobody knows whether it is prepared.
#: ``prepared``: it waits for the decision. ``deciding``: the decision is being carried out.
Phase = Literal["idle", "open", "preparing", "prepared", "deciding"]
#: Engines of which it is known that they can take part, and those that were recovered because that was wanted.
_ready: WeakSet[Engine] = WeakSet()
_recovered: WeakSet[Engine] = WeakSet()


class NamedConnection(Connection):
    """A connection whose two-phase transactions have the name that it was made with."""

    def __init__(self, engine: Engine, gid: Gid) -> None:
        super().__init__(engine)
        self.gid = gid

    def begin_twophase(self, xid: Any = None) -> TwoPhaseTransaction:
        """As ``Connection.begin_twophase``, which would draw a name that nobody can recover by."""
        return super().begin_twophase(str(self.gid) if xid is None else xid)


class SqlParticipant:
    """Enlists a session, of PostgreSQL through psycopg 3, in the transaction of a client.

        with client.transaction(participants=[SqlParticipant(session)]) as tx:
            session.add(Order(id=17))
            tx.publish("orders", b"17")

    The session must not be in a transaction of its own when the block begins, and is not committed, rolled back
    or closed inside of it; savepoints are free. Afterwards it is as after ``session.commit()`` or
    ``session.rollback()``. May be used for one transaction after the other, by one thread at a time.

    Args:
      session: with one engine; for another database add another participant with another session. Of a
        ``scoped_session`` it is this thread's.
      engine: which one, for a session that has several.
      execution_options: of its connection, such as ``{"isolation_level": "SERIALIZABLE"}``.
      recover_with: finish what earlier programs left in doubt in this database, by what this client's daemon
        knows of it, when the first transaction of this process begins there.
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

    # --- what a transaction asks of it ---------------------------------------------------------

    def start_tx(self, transaction: Transaction) -> None:
        """Begin a transaction of the session. Raises SqlUnusable, and what SQLAlchemy raises: nothing happened."""
        if self._phase == "open":
            self.abandon_tx()
        elif self._phase != "idle":
            self._let_go()
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
            self._let_go()
            raise
        self._phase = "open"

    def abandon_tx(self) -> None:
        """Another participant could not start: the session is as before, and its connection goes back to the pool."""
        self._phase = "deciding"
        try:
            self._session.rollback()
        finally:
            self._let_go()

    def update_tx(self, transaction: Transaction) -> None:
        """After a checkpoint: the session's transaction goes on."""

    def tx_changes(self) -> Collection[bytes]:
        """None: the database detects its own conflicts. From here on, committing is meant."""
        self._finishing = True
        return ()

    def commit_tx(self) -> bool:
        """Prepare, or at a checkpoint flush. Raises SqlMisused, and what SQLAlchemy raises: it can be undone."""
        if self._lost:
            raise SqlMisused(self._lost, hint="leave it to the transaction; savepoints (begin_nested) are free")
        if not self._finishing:
            self._session.flush()
            return True
        self._phase = "preparing"
        self._session.prepare()
        self._phase = "prepared"
        return True

    def post_tx_commit(self) -> None:
        """Let the rows be seen.

        Raises:
          SqlInDoubt: the database could not be told; the rows are kept, and ``recover`` shows them.
        """
        self._phase = "deciding"
        try:
            self._session.commit()
        except SQLAlchemyError as error:
            self._finish_elsewhere(error)
        finally:
            self._let_go()

    def rollback_tx(self) -> bool:
        """Undo everything; False when the database could not be told and may keep something prepared."""
        may_be_prepared = self._phase in ("preparing", "prepared")
        self._phase = "deciding"
        try:
            self._session.rollback()
        except SQLAlchemyError:
            self._session.invalidate()
        try:
            # What a broken PREPARE left cannot be asked of the session.
            return not may_be_prepared or self._is_rolled_back()
        finally:
            self._let_go()

    # --- how it is finished when the session's own connection cannot ---------------------------

    def _finish_elsewhere(self, cause: SQLAlchemyError) -> None:
        self._session.invalidate()
        engine, gid = self._at_work()
        try:
            finish(engine, gid, commit=True)
        except SQLAlchemyError:
            detail = f"the transaction is committed, its rows in {self.name} wait as prepared transaction {gid}: {first_line(cause)}"
            raise SqlInDoubt(detail, hint="recover(engine, client), or plainsong tx recover, shows them") from cause

    def _is_rolled_back(self) -> bool:
        engine, gid = self._at_work()
        try:
            finish(engine, gid, commit=False)
        except SQLAlchemyError as error:
            log.warning(
                "%s may keep prepared transaction %s until it is recovered: %s", self.name, gid, first_line(error)
            )
            return False
        return True

    def _at_work(self) -> tuple[Engine, Gid]:
        assert self._engine is not None
        assert self._connection is not None
        return self._engine, self._connection.gid

    # --- what the session must and must not do -------------------------------------------------

    def _usable_engine(self) -> Engine:
        """The engine of the session, which can take part."""
        session = self._session
        if not isinstance(session, Session):
            hint = "take a Session; an AsyncSession cannot take part" if hasattr(session, "sync_session") else ""
            raise SqlUnusable(f"{type(session).__name__} is no session of sqlalchemy.orm", hint=hint)
        if session.in_transaction():
            raise SqlUnusable(
                "the session is in a transaction already, which began before this one",
                hint="commit or roll it back first; whatever belongs to the transaction goes inside its block",
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

    def _let_go(self) -> None:
        """The session is free again, whatever became of the transaction."""
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
                hint="leave that to the transaction, which commits rows and messages together",
            )

    def _after_begin(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        if self._phase == "open" and connection.engine is not self._engine:
            self._lost = f"the session reached a second database, {connection.engine.url.render_as_string()}"
            raise SqlMisused(self._lost, hint="give that one a session and a participant of its own")

    def _after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None and self._phase == "open":
            self._lost = "the session was rolled back or closed inside the transaction"

    def _commit_twophase(self, connection: Connection, xid: Any, is_prepared: bool) -> None:
        if self._phase == "prepared":
            connection.invalidate()
            raise SqlMisused(f"nobody has decided about {xid} yet", hint="recover asks the daemon, and finishes it")

    def _rollback_twophase(self, connection: Connection, xid: Any, is_prepared: bool) -> None:
        """Whoever closes the session while nobody knows the decision lets go of the connection, not of the rows.

        The same after a PREPARE that failed: to roll back what is not there would hide why.
        """
        if self._phase in ("preparing", "prepared"):
            connection.invalidate()
