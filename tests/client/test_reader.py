"""Reading in a loop, with and without a position, against the real daemon."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from plainsong import JSON, FilePosition, ServerPosition, Undecodable
from plainsong.errors import Closed, PositionNotSaved
from plainsong.positions import Position
from plainsong.protocol.errors import InvalidName, InvalidParameter, PositionChanged, TopicNotFound
from tests.client.client_under_test import Client, only_threads
from tests.daemon.harness import eventually

pytestmark = pytest.mark.usefixtures("both_clients")


def numbers(client: Client, topic: str, count: int, first: int = 0) -> None:
    client.publish(topic, [b"%d" % n for n in range(first, first + count)])


def read(reader) -> list[int]:
    return [int(message.payload) for message in reader]


@pytest.fixture(params=["file", "server"])
def position(request: pytest.FixtureRequest, tmp_path: Path):
    """Return a function that makes positions for the same place, as another process would."""
    return {"file": lambda: FilePosition(tmp_path / "position"), "server": lambda: ServerPosition("loop")}[
        request.param
    ]


def test_reading_ends_at_the_end_and_begins_at_the_given_position(client: Client, topic: str):
    numbers(client, topic, 25)
    assert read(client.read(topic, page_messages=10)) == list(range(25))
    third = client.poll(topic, limit=3).last_id
    assert read(client.read(topic, third, limit=5)) == [3, 4, 5, 6, 7]
    assert read(client.read(topic, until=third)) == [0, 1]
    assert read(client.read(topic, "-1h", limit=1)) == [0]
    assert read(client.read(topic, "newest")) == []


def test_a_follower_gets_later_messages(client: Client, topic: str):
    numbers(client, topic, 3)

    def publish_when_parked() -> None:
        for n in (3, 4):
            eventually("a poll is parked", lambda: client.admin.stats(topic)["parkedPolls"])
            numbers(client, topic, 1, n)
            eventually("the poll is answered", lambda n=n: n in found)

    found: list[int] = []
    thread = threading.Thread(target=publish_when_parked)
    thread.start()
    found.extend(int(message.payload) for message in client.read(topic, follow=True, limit=5))
    thread.join()
    assert found == [0, 1, 2, 3, 4]


def test_several_topics_are_read_each_in_its_order_and_take_turns(client: Client):
    topics = [client.create_topic(f"several-{n}").name for n in range(3)]
    for name in topics:
        numbers(client, name, 50)
    found = [(message.topic, int(message.payload)) for message in client.read(topics, page_messages=10)]
    for name in topics:
        assert [n for who, n in found if who == name] == list(range(50))
    assert {who for who, _ in found[:30]} == set(topics), "no topic waits for the end of another"


def test_several_topics_are_followed_with_one_wait(client: Client):
    topics = [client.create_topic(f"followed-{n}").name for n in range(3)]
    found: list[tuple[str, int]] = []

    def publish_when_parked() -> None:
        for n, name in enumerate(topics):
            eventually("a poll is parked", lambda name=name: client.admin.stats(name)["parkedPolls"])
            numbers(client, name, 2, n)
            eventually("both have arrived", lambda n=n: len(found) >= 2 * n + 2)

    thread = threading.Thread(target=publish_when_parked)
    thread.start()
    found.extend((message.topic, int(message.payload)) for message in client.read(topics, follow=True, limit=6))
    thread.join()
    assert found == [(name, n + k) for n, name in enumerate(topics) for k in range(2)]


def test_a_pattern_includes_the_topics_it_matches(client: Client):
    for name in ("fit-1", "fit-2", "unfit"):
        client.create_topic(name)
        numbers(client, name, 2)
    assert {message.topic for message in client.read("fit-*")} == {"fit-1", "fit-2"}
    assert {message.topic for message in client.read(["fit-[2]", "unfit"])} == {"fit-2", "unfit"}
    assert list(client.read("none-*")) == []


def test_a_message_that_does_not_decode_does_not_end_a_loop(client: Client, topic: str):
    client.publish(topic, [b"1", b"{", b"3"])
    values = [message.value for message in client.read(topic, serializer=JSON)]
    assert (values[0], values[2]) == (1, 3)
    assert isinstance(values[1], Undecodable)


def test_a_missing_topic_is_an_error(client: Client):
    with pytest.raises(TopicNotFound):
        list(client.read("not-there"))
    with pytest.raises(TopicNotFound):
        list(client.read("not-there", follow=True))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"topics": "no spaces"}, InvalidName),
        ({"topics": []}, InvalidParameter),
        ({"topics": "t", "limit": 0}, InvalidParameter),
        ({"topics": "t", "page_messages": 0}, InvalidParameter),
        ({"topics": "t", "follow": True, "until": "-1m"}, InvalidParameter),
    ],
)
def test_invalid_arguments_are_refused_at_once(client: Client, arguments, error):
    with pytest.raises(error):
        client.read(**arguments)


# --- positions ------------------------------------------------------------------------------------


def test_the_next_reader_continues_where_the_last_one_stopped(client: Client, topic: str, position):
    numbers(client, topic, 10)
    assert read(client.read(topic, position=position())) == list(range(10))
    numbers(client, topic, 2, 10)
    assert read(client.read(topic, position=position())) == [10, 11]
    assert read(client.read(topic, position=position())) == []


def test_leaving_a_loop_delivers_the_current_message_again(client: Client, topic: str, position):
    only_threads("leaving a loop in a task saves nothing more")
    numbers(client, topic, 10)
    for message in client.read(topic, position=position()):
        if message.payload == b"4":
            break
    assert read(client.read(topic, position=position(), limit=1)) == [4]


def test_an_exception_in_a_loop_delivers_the_current_message_again(client: Client, topic: str, position):
    numbers(client, topic, 10)

    def fail_at(reader, n: bytes) -> None:
        for message in reader:
            if message.payload == n:
                raise ValueError(n)

    with pytest.raises(ValueError, match="3"):
        fail_at(client.read(topic, position=position()), b"3")
    with pytest.raises(ValueError, match="6"), client.read(topic, position=position()) as reader:
        fail_at(reader, b"6")
    assert read(client.read(topic, position=position(), limit=1)) == [6]


def test_a_block_that_ends_normally_finishes_the_current_message(client: Client, topic: str, position):
    numbers(client, topic, 10)
    with client.read(topic, position=position()) as reader:
        for message in reader:
            if message.payload == b"4":
                break
    assert read(client.read(topic, position=position(), limit=1)) == [5]


def test_saving_by_hand_includes_the_current_message(client: Client, topic: str, position):
    numbers(client, topic, 10)
    reader = client.read(topic, position=position())
    next(reader), next(reader)
    reader.save()
    assert read(client.read(topic, position=position(), limit=1)) == [2]
    with reader:
        assert int(next(reader).payload) == 2
    assert read(client.read(topic, position=position(), limit=1)) == [3]
    with pytest.raises(Closed), reader:
        pass


def test_a_position_is_saved_after_a_number_of_messages_and_before_a_wait(client: Client, topic: str, tmp_path: Path):
    saves: list[int] = []

    class Noted(FilePosition):
        def save(self, operations, positions):
            saves.append(len(at))
            return super().save(operations, positions)

    numbers(client, topic, 25)
    at: list[int] = []
    reader = client.read(topic, position=Noted(tmp_path / "p"), save_every=10, save_interval_s=3600)
    at.extend(int(message.payload) for message in reader)
    assert saves == [10, 20, 25]


def test_a_moving_start_is_saved_before_anything_is_read(client: Client, topic: str, position):
    numbers(client, topic, 3)
    assert read(client.read(topic, "newest", position=position())) == []
    numbers(client, topic, 2, 3)
    # As after a crash before the first save: "newest" must not skip messages that were published since.
    assert read(client.read(topic, "newest", position=position())) == [3, 4]


def test_each_topic_of_a_reader_has_a_position_of_its_own(client: Client, position):
    topics = [client.create_topic(f"own-{n}", if_not_exists=True).name for n in range(2)]
    for name in topics:
        client.publish(name, b"1")
    assert len(read(client.read(topics, position=position()))) >= 2
    client.publish(topics[1], b"2")
    assert read(client.read(topics, position=position())) == [2]


def test_two_readers_of_one_name_do_not_overwrite_each_other(client: Client, topic: str):
    numbers(client, topic, 10)
    slow = client.read(topic, position=ServerPosition("both"), save_every=1)
    next(slow), next(slow)
    assert len(read(client.read(topic, position=ServerPosition("both")))) == 9
    with pytest.raises(PositionChanged):
        next(slow)
    assert client.admin.reader(topic, "both")["position"] == str(client.poll(topic)[-1].id)


def test_a_file_that_is_not_a_position_is_left_alone(client: Client, topic: str, tmp_path: Path):
    file = tmp_path / "position"
    for content in ("", "{}", '{"positions": {"default:t": "xyz"}}', "\udc80"):
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(PositionNotSaved):
            list(client.read(topic, position=FilePosition(file)))
        assert file.read_bytes() == content.encode("utf-8", "surrogateescape")


def test_a_position_that_cannot_be_written_is_reported_and_the_old_one_stays(
    client: Client, topic: str, tmp_path: Path
):
    numbers(client, topic, 3)
    file = tmp_path / "position"
    read(client.read(topic, position=FilePosition(file), limit=1))
    before = file.read_bytes()
    reader = client.read(topic, position=FilePosition(file))
    next(reader)
    file.rename(tmp_path / "kept")
    file.mkdir()
    with pytest.raises(PositionNotSaved):
        reader.save()
    assert (tmp_path / "kept").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_a_position_file_is_human_readable(client: Client, topic: str, tmp_path: Path):
    numbers(client, topic, 1)
    read(client.read(topic, position=FilePosition(tmp_path / "p")))
    told = json.loads((tmp_path / "p").read_text())
    assert told == {"version": 1, "positions": {f"default:{topic}": str(client.poll(topic).last_id)}}


def test_both_positions_implement_their_protocol(tmp_path: Path):
    kept: list[Position] = [FilePosition(tmp_path / "p"), ServerPosition("name")]
    assert kept
    with pytest.raises(InvalidName):
        ServerPosition("no spaces")
