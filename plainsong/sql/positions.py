"""A reader's position in the database of its effects: one row, written in the same transaction as they are.

    with Session(engine) as session, client.read("orders", position=SqlPosition(session, "billing")) as messages:
        for message in messages:
            session.add(Invoice(order=message.payload.decode()))
            messages.save()       # this message is done: its position goes into the session's transaction
            session.commit()      # effects and position, or neither

Inside ``client.transaction(participants=[SqlParticipant(session)])`` both of the last lines are left out. After a
rollback read again with a new reader: it begins where the database says, so that the same messages come again.
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

#: What the table is called, unless somebody says otherwise.
TABLE = "plainsong_positions"


def positions_table(metadata: MetaData, name: str = TABLE) -> Table:
    """The table of positions, for whoever makes tables by ``metadata.create_all`` or by migrations.

    One row for each reader of a topic: the generation of the topic, and the id of the last message done with.
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
    """What is known of one topic's row."""

    generation: int
    """The topic's, now."""
    row: tuple[int, bytes] | None
    """Generation and position in the row; None: there is no row."""


class SqlPosition:
    """Positions of one reader, in a table of the session's database (any that SQLAlchemy knows).

    Nothing here commits: what ``save`` writes becomes durable, or does not, with the session's transaction. While
    one session reads under a name, another that begins to waits until the first has committed, where the
    database locks rows; and whoever finds a row that somebody else moved gets ``PositionChanged``.

    Args:
      session: a ``Session``; the one that the effects are written with.
      reader: its name: letters, digits, underscores and hyphens.
      table: from ``positions_table``; None: one called ``plainsong_positions``.
      create: make the table if it is not there, in a transaction of its own.
    Raises:
      InvalidName: the reader's name is none.
    """

    #: Saved before a transaction's participants commit: it is part of what one of them commits.
    transactional = True

    def __init__(self, session: Session, reader: str, *, table: Table | None = None, create: bool = False) -> None:
        self.reader = reader_name(reader)
        self._session = session
        self._table = positions_table(MetaData()) if table is None else table
        self._create = create
        self._known: dict[str, Stand] = {}
        self._is_stale = False

    def load(self, daemon: Daemon, topics: Iterable[str]) -> dict[str, bytes]:
        """Raises TopicNotFound, what goes wrong on the way, and PositionNotSaved: the table cannot be read.

        A topic that has been made anew since is read from its beginning.
        """
        generations = {}
        for topic in topics:
            properties = daemon.call(calls.describe_topic(daemon.namespace, topic))
            generations[topic] = int(properties["generation"])
        return self._read(daemon.namespace, generations)

    def save(self, daemon: Daemon, positions: Mapping[str, bytes]) -> None:
        """Raises PositionChanged, and PositionNotSaved: the session's transaction must be rolled back."""
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
            hint = "create=True makes the table, or positions_table with your migrations"
            raise PositionNotSaved(f"positions cannot be read: {first_line(error)}", hint=hint) from error
        if not event.contains(self._session, "after_soft_rollback", self._after_rollback):
            event.listen(self._session, "after_soft_rollback", self._after_rollback)
        self._is_stale = False
        self._known |= {topic: Stand(generation, rows.get(topic)) for topic, generation in generations.items()}
        return {topic: at if made == generations[topic] else FIRST_BOUND for topic, (made, at) in rows.items()}

    def _write(self, namespace: str, positions: Mapping[str, bytes]) -> None:
        if self._is_stale:
            detail = "the session was rolled back, and with it what this reader had done"
            raise PositionChanged(detail, hint="read again with a new reader: the same messages come again")
        for topic, position in positions.items():
            stand = self._known[topic]
            key = {"namespace": namespace, "topic": topic, "reader": self.reader}
            row = (stand.generation, bytes(position))
            try:
                is_ours = self._replace(key, row, stand.row)
            except IntegrityError:
                is_ours = False
            except SQLAlchemyError as error:
                raise PositionNotSaved(f"the position in {topic} cannot be written: {first_line(error)}") from error
            if not is_ours:
                detail = f"reader {self.reader} of {topic} is not where this session left it"
                raise PositionChanged(detail, hint="roll back; somebody else reads under the same name")
            self._known[topic] = Stand(stand.generation, row)

    def _replace(self, key: Mapping[str, str], row: tuple[int, bytes], expected: tuple[int, bytes] | None) -> bool:
        """Put ``row`` in the place of ``expected``; False when something else is there."""
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
        except SQLAlchemyError:  # somebody else may have been making it at the same moment
            if not inspect(bind).has_table(self._table.name, schema=self._table.schema):
                raise
        self._create = False

    def _after_rollback(self, session: Session, previous: SessionTransaction) -> None:
        if previous.parent is None:
            self._is_stale = True
