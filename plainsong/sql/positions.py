"""A reader's position in the database of its effects: one row, written in the same transaction as they are.

    with Session(engine) as session, client.read("orders", position=SqlPosition(session, "billing")) as messages:
        for message in messages:
            session.add(Invoice(order=message.payload.decode()))
            messages.save()       # writes the position in the session's transaction
            session.commit()      # effects and position, or neither

Inside ``client.transaction(participants=[SqlParticipant(session)])`` leave out the last two lines. After a rollback,
read again with a new reader, which starts at the position in the database, so that the same messages are read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import BigInteger, Column, DateTime, LargeBinary, MetaData, String, Table, event, func, inspect
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from plainsong import calls
from plainsong.errors import PositionNotSaved
from plainsong.protocol.errors import PositionChanged
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.names import MAX_NAME_BYTES, reader_name
from plainsong.sql.errors import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy.orm import Session, SessionTransaction

    from plainsong.positions import Daemon

#: Default name of the table.
TABLE = "plainsong_positions"


def positions_table(metadata: MetaData, name: str = TABLE) -> Table:
    """Defines the table of positions, to be created by ``metadata.create_all`` or by migrations.

    It has one row for each reader of a topic: the topic's generation, and the id of the last message processed.
    """
    if name in metadata.tables:
        return metadata.tables[name]
    return Table(
        name,
        metadata,
        *(Column(key, String(MAX_NAME_BYTES), primary_key=True) for key in ("namespace", "topic", "reader")),
        Column("generation", BigInteger, nullable=False),
        Column("position", LargeBinary(20), nullable=False),
        Column("changed", DateTime(timezone=True), nullable=False, server_default=func.now(), onupdate=func.now()),
    )


class Stand(NamedTuple):
    """The state of one topic's row."""

    generation: int
    """The topic's current generation."""
    row: tuple[int, bytes] | None
    """Generation and position in the row; None: no row."""


class SqlPosition:
    """Positions of one reader, in a table of the session's database (any that SQLAlchemy supports).

    Nothing here commits: a saved position becomes durable with the session's transaction. In databases that lock
    rows, a second session that starts to read under the same name waits until the first has committed. A session
    whose row was moved by another gets ``PositionChanged``.

    Args:
      session: the ``Session`` that writes the effects.
      reader: its name: letters, digits, underscores and hyphens.
      table: from ``positions_table``; None: one named ``plainsong_positions``.
      create: create the table if it does not exist, in a transaction of its own.
    Raises:
      InvalidName: the reader's name is not allowed.
    """

    #: The position is saved before a transaction's participants commit, since one of them commits it.
    transactional = True

    def __init__(self, session: Session, reader: str, *, table: Table | None = None, create: bool = False) -> None:
        self.reader = reader_name(reader)
        self._session = session
        self._table = positions_table(MetaData()) if table is None else table
        self._create = create
        self._known: dict[str, Stand] = {}
        self._is_stale = False

    def load(self, daemon: Daemon, topics: Iterable[str]) -> dict[str, bytes]:
        """Loads the positions; a topic that has been created again since then is read from its beginning.

        Raises TopicNotFound, errors of the connection, and PositionNotSaved when the table cannot be read.
        """
        generations = {}
        for topic in topics:
            properties = daemon.call(calls.describe_topic(daemon.namespace, topic))
            generations[topic] = int(properties["generation"])
        return self._read(daemon.namespace, generations)

    def save(self, daemon: Daemon, positions: Mapping[str, bytes]) -> None:
        """Saves the positions. Raises PositionChanged and PositionNotSaved: roll back the session's transaction."""
        self._write(daemon.namespace, positions)

    # --- the rows ------------------------------------------------------------------------------

    def _read(self, namespace: str, generations: Mapping[str, int]) -> dict[str, bytes]:
        try:
            if self._create:
                self._make_table()
            columns = self._table.c
            chosen = (columns.namespace == namespace) & (columns.reader == self.reader)
            query = self._table.select().where(chosen & columns.topic.in_(list(generations))).with_for_update()
            rows = {row.topic: (int(row.generation), bytes(row.position)) for row in self._session.execute(query)}
        except SQLAlchemyError as error:
            hint = "create the table by create=True, or by positions_table with your migrations"
            raise PositionNotSaved(f"cannot read positions: {first_line(error)}", hint=hint) from error
        if not event.contains(self._session, "after_soft_rollback", self._after_rollback):
            event.listen(self._session, "after_soft_rollback", self._after_rollback)
        self._is_stale = False
        self._known |= {topic: Stand(generation, rows.get(topic)) for topic, generation in generations.items()}
        return {topic: at if made == generations[topic] else FIRST_BOUND for topic, (made, at) in rows.items()}

    def _write(self, namespace: str, positions: Mapping[str, bytes]) -> None:
        if self._is_stale:
            detail = "the session was rolled back, and with it the work of this reader"
            raise PositionChanged(detail, hint="read again with a new reader: it returns the same messages again")
        for topic, position in positions.items():
            stand = self._known[topic]
            key = {"namespace": namespace, "topic": topic, "reader": self.reader}
            row = (stand.generation, bytes(position))
            try:
                is_ours = self._replace(key, row, stand.row)
            except IntegrityError:
                is_ours = False
            except SQLAlchemyError as error:
                raise PositionNotSaved(f"cannot write the position in {topic}: {first_line(error)}") from error
            if not is_ours:
                detail = f"reader {self.reader} of {topic} is not at the position that this session saved"
                raise PositionChanged(detail, hint="roll back; another process reads under the same name")
            self._known[topic] = Stand(stand.generation, row)

    def _replace(self, key: Mapping[str, str], row: tuple[int, bytes], expected: tuple[int, bytes] | None) -> bool:
        """Replaces ``expected`` by ``row``; False if the row has changed."""
        values = {"generation": row[0], "position": row[1]}
        if expected is None:
            self._session.execute(self._table.insert().values(**key, **values))
            return True
        change = self._table.update().values(**values)
        for name, value in (*key.items(), ("generation", expected[0]), ("position", expected[1])):
            change = change.where(self._table.c[name] == value)
        done: Any = self._session.execute(change)
        return bool(done.rowcount == 1)

    def _make_table(self) -> None:
        bind = self._session.get_bind()
        try:
            self._table.create(bind, checkfirst=True)
        except SQLAlchemyError:  # another process may have created it at the same moment
            if not inspect(bind).has_table(self._table.name, schema=self._table.schema):
                raise
        self._create = False

    def _after_rollback(self, session: Session, previous: SessionTransaction) -> None:
        if previous.parent is None:
            self._is_stale = True
