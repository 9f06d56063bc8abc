"""``plainsong outbox``: create, publish from, inspect and decide, on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from plainsong import Client
from plainsong.cli.command import Exit
from plainsong.cli.main import program, run
from plainsong.errors import ConnectionLost
from plainsong.sql import Outbox, Relay, create_outbox, outbox_tables
from plainsong.sql.relay import RelayProducer
from tests.daemon.harness import Daemon, clean_environ
from tests.ports import free_port


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("outbox") / "data") as daemon:
        yield daemon


_namespaces = iter(range(1_000))


@pytest.fixture
def client(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Client]:
    """A client with its own namespace, which the commands also use."""
    url, namespace = f"http://{daemon.address[0]}:{daemon.address[1]}", f"cli{next(_namespaces)}"
    assert "PLAINSONG_CONTEXT" not in clean_environ()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("PLAINSONG_URL", url)
    monkeypatch.setenv("PLAINSONG_NAMESPACE", namespace)
    with Client(url, namespace=namespace) as client:
        yield client


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def lite(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    create_outbox(engine)
    yield engine
    engine.dispose()


def publish(engine: Engine, *payloads: bytes, topic: str = "orders") -> None:
    with Session(engine) as session:
        Outbox(session).publish(topic, list(payloads))
        session.commit()


def ran(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(program, ["outbox", *words], "plainsong")
    return code, *capfd.readouterr()


@pytest.mark.parametrize("verb", ["create", "status"])
def test_an_unreachable_database_is_reported_in_one_line(verb: str, capfd: pytest.CaptureFixture[str]):
    code, said, told = ran(capfd, verb, "--database", f"postgresql+psycopg://shop@127.0.0.1:{free_port()}/shop")
    assert (code, said) == (Exit.UNAVAILABLE, "")
    assert told.startswith("error: cannot ")
    assert "failed: Connection refused" in told
    assert told.count("\n") == 1


def test_an_outbox_is_created_filled_watched_and_published(url: str, client: Client, capfd: pytest.CaptureFixture[str]):
    assert ran(capfd, "create", "--database", url, "--json") == (
        0,
        '{"tables":["plainsong_outbox","plainsong_outbox_topics"]}\n',
        "",
    )
    assert ran(capfd, "create", "--database", url, "--table", "letters") == (0, "", "")
    engine = create_engine(url)
    publish(engine, b"1", b"2")
    with Session(engine) as session:
        Outbox(session, tables=outbox_tables(name="letters")).publish("letters", b"a")
        session.commit()
    engine.dispose()
    _, out, _ = ran(capfd, "status", "--database", url, "--json")
    found = json.loads(out)
    age_s = found.pop("oldestAgeS")
    assert 0 <= age_s < 60
    topic = {"topic": "orders", "waiting": 2, "oldestAgeS": age_s, "kept": 0}
    topic |= {"producer": None, "nextNumber": 0, "lastSent": -1}
    assert found == {"relay": False, "waiting": 2, "topics": [topic]}
    client.create_topic("orders")
    client.create_topic("letters")
    _, out, _ = ran(capfd, "run", "--database", url, "--once", "--keep", "1h", "--json")
    assert json.loads(out) == {"topic": "orders", "messages": 2}
    assert ran(capfd, "run", "--database", url, "--table", "letters", "--once")[0] == 0
    assert [message.payload for topic in ("orders", "letters") for message in client.read(topic)] == [b"1", b"2", b"a"]
    _, out, _ = ran(capfd, "status", "--database", url)
    headings, row = out.splitlines()
    assert headings.split() == ["TOPIC", "WAITING", "OLDEST", "SENT", "UP", "TO", "KEPT"]
    assert row.split() == ["orders", "0", "-", "1", "2"]


def test_errors_of_the_database_or_the_topic_are_reported_with_a_next_step(
    url: str, client: Client, capfd: pytest.CaptureFixture[str]
):
    code, _, err = ran(capfd, "status", "--database", url)
    assert (code, "no such file" in err) == (Exit.FAILED, True)
    empty = create_engine(url)
    empty.connect().close()
    empty.dispose()
    code, _, err = ran(capfd, "run", "--once", "--database", url, "--json")
    told = json.loads(err)
    assert (code, told["code"]) == (Exit.FAILED, "outbox_missing")
    assert "plainsong outbox create" in told["hint"]
    ran(capfd, "create", "--database", url)
    engine = create_engine(url)
    publish(engine, b"1")
    engine.dispose()
    code, _, err = ran(capfd, "run", "--once", "--database", url)
    assert (code, "orders" in err) == (Exit.NOT_FOUND, True)
    code, _, err = ran(capfd, "status", "--database", "postgresql://nobody@127.0.0.1:1/none")
    assert code == Exit.UNAVAILABLE


def test_an_operator_decides_about_messages_in_doubt_and_is_asked_first(
    lite: Engine, url: str, client: Client, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    client.create_topic("orders")
    publish(lite, b"1")

    def lose(producer: RelayProducer, messages: object) -> None:
        raise ConnectionLost("as if the wire had been cut")

    with monkeypatch.context() as patch:
        patch.setattr(RelayProducer, "publish", lose)
        with pytest.raises(ConnectionLost):
            Relay(lite, client).once()
    for words in (("--resend",), ("--yes",)):
        assert ran(capfd, "decide", "orders", "--database", url, *words)[0] == Exit.USAGE
    code, out, _ = ran(capfd, "decide", "orders", "--database", url, "--resend", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"topic": "orders", "messages": 1, "resend": True})
    assert ran(capfd, "run", "--once", "--database", url)[0] == 0
    assert [message.payload for message in client.read("orders")] == [b"1"]
