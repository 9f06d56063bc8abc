"""Positions in the database of their effects: reading again, refusals, and no commit unless requested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, func, inspect, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from plainsong.errors import PositionNotSaved
from plainsong.protocol.errors import InvalidName, PositionChanged
from plainsong.protocol.ids import FIRST_BOUND, pack_id
from plainsong.sql import SqlPosition, positions_table

AT_1, AT_2, AT_3 = (pack_id(1_700_000_000_000 + number, 0) for number in (1, 2, 3))


class Topics:
    """A daemon reduced to the generations of topics."""

    namespace = "shop"

    def __init__(self, **generations: int) -> None:
        self.generations = generations

    def call(self, call: Any) -> Any:
        return {"generation": str(self.generations[call.request.path.rpartition("/")[2]])}


def load(position: SqlPosition, topics: Topics) -> dict[str, bytes]:
    return position.load(topics, list(topics.generations))


def save(position: SqlPosition, **positions: bytes) -> None:
    position.save(Topics(), positions)


@pytest.fixture(params=["postgresql", "sqlite"])
def any_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    url = request.getfixturevalue("database") if request.param == "postgresql" else f"sqlite:///{tmp_path / 'one.db'}"
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def made(any_engine: Engine) -> Engine:
    metadata = MetaData()
    positions_table(metadata)
    metadata.create_all(any_engine)
    return any_engine


def test_a_position_is_where_the_last_committed_session_saved_it(made: Engine):
    topics = Topics(orders=1, audit=1)
    with Session(made) as session:
        position = SqlPosition(session, "billing")
        assert load(position, topics) == {}
        save(position, orders=AT_1)
        save(position, orders=AT_2, audit=AT_1)
        session.commit()
    with Session(made) as session:
        assert load(SqlPosition(session, "billing"), topics) == {"orders": AT_2, "audit": AT_1}
        assert load(SqlPosition(session, "other"), topics) == {}


def test_saving_commits_nothing_by_itself(made: Engine):
    with Session(made) as session:
        position = SqlPosition(session, "billing")
        load(position, Topics(orders=1))
        save(position, orders=AT_1)
    with Session(made) as session:
        assert load(SqlPosition(session, "billing"), Topics(orders=1)) == {}


def test_after_a_rollback_the_same_reader_cannot_save_and_a_new_one_reads_the_same_again(made: Engine):
    with Session(made) as session:
        position = SqlPosition(session, "billing")
        load(position, Topics(orders=1))
        save(position, orders=AT_1)
        session.commit()
        session.execute(select(1))
        session.rollback()
        with pytest.raises(PositionChanged, match="rolled back"):
            save(position, orders=AT_2)
        session.rollback()
        assert load(position, Topics(orders=1)) == {"orders": AT_1}
        save(position, orders=AT_2)
        session.commit()


def test_rolling_back_a_savepoint_does_not_end_the_position(engine: Engine):
    with Session(engine) as session:
        position = SqlPosition(session, "billing", create=True)
        load(position, Topics(orders=1))
        session.begin_nested().rollback()
        save(position, orders=AT_1)
        session.commit()


def test_a_row_moved_by_another_reader_is_reported(made: Engine):
    with Session(made) as session:
        first = SqlPosition(session, "billing")
        load(first, Topics(orders=1))
        save(first, orders=AT_1)
        session.commit()
        with Session(made) as other_session:
            other = SqlPosition(other_session, "billing")
            load(other, Topics(orders=1))
            save(other, orders=AT_3)
            other_session.commit()
        with pytest.raises(PositionChanged, match="billing of orders"):
            save(first, orders=AT_2)


def test_the_second_of_two_first_readers_gets_an_error(made: Engine):
    with Session(made) as session:
        first = SqlPosition(session, "billing")
        load(first, Topics(orders=1))
        session.commit()
        with Session(made) as other_session:
            other = SqlPosition(other_session, "billing")
            load(other, Topics(orders=1))
            save(other, orders=AT_1)
            other_session.commit()
        with pytest.raises(PositionChanged):
            save(first, orders=AT_1)


def test_a_recreated_topic_is_read_from_its_beginning(made: Engine):
    with Session(made) as session:
        position = SqlPosition(session, "billing")
        load(position, Topics(orders=1))
        save(position, orders=AT_3)
        session.commit()
        assert load(position, Topics(orders=2)) == {"orders": FIRST_BOUND}
        save(position, orders=AT_1)
        session.commit()
        assert load(SqlPosition(session, "billing"), Topics(orders=2)) == {"orders": AT_1}
        table = positions_table(MetaData())
        assert session.execute(select(func.count()).select_from(table)).scalar_one() == 1


def test_the_table_is_created_on_request(any_engine: Engine):
    with Session(any_engine) as session:
        with pytest.raises(PositionNotSaved, match="cannot read positions") as caught:
            load(SqlPosition(session, "billing"), Topics(orders=1))
        assert "create=True" in caught.value.hint
        session.rollback()
        for _ in range(2):
            load(SqlPosition(session, "billing", create=True), Topics(orders=1))
    assert inspect(any_engine).has_table("plainsong_positions")


def test_the_table_may_have_another_name(any_engine: Engine):
    metadata = MetaData()
    table = positions_table(metadata, "where_readers_stand")
    assert positions_table(metadata, "where_readers_stand") is table
    metadata.create_all(any_engine)
    with Session(any_engine) as session:
        position = SqlPosition(session, "billing", table=table)
        load(position, Topics(orders=1))
        save(position, orders=AT_1)
        session.commit()
        assert session.execute(select(table.c.topic, table.c.reader)).all() == [("orders", "billing")]


def test_an_invalid_name_is_refused(made: Engine):
    with Session(made) as session, pytest.raises(InvalidName):
        SqlPosition(session, "a b")


def test_a_second_reader_of_one_name_waits_until_the_first_has_committed(database: str):
    engine = create_engine(database, connect_args={"options": "-c lock_timeout=50"})
    with Session(engine) as session, Session(engine) as other:
        position = SqlPosition(session, "billing", create=True)
        load(position, Topics(orders=1))
        save(position, orders=AT_1)
        session.commit()
        load(position, Topics(orders=1))
        with pytest.raises(PositionNotSaved, match="lock timeout"):
            load(SqlPosition(other, "billing"), Topics(orders=1))
        other.rollback()
        save(position, orders=AT_2)
        session.commit()
        assert load(SqlPosition(other, "billing"), Topics(orders=1)) == {"orders": AT_2}
    engine.dispose()
