"""docs/format.md is correct about producers: its third example matches byte by byte."""

from __future__ import annotations

from test_format_doc import CLOCK_MS, dumps

from plainsong.protocol import keys
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import NamespaceProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.rows import Stamp, decode_row
from plainsong.protocol.topic.asks import Create, Look, OpenProducer, Publish
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.producer_state import Producer
from plainsong.protocol.topic.reading import Paging, key_range
from plainsong.protocol.topic.state import Now, TopicState
from storage.memory import MemoryStore
from tests.codecs import AVRO, AVRO_2

NAME = TopicName("shop", "bills")
BATCH = PublishRequest(
    [b"open 1", b"paid 1"],
    producer="billing",
    producer_epoch=1,
    sequence_ids=[10, 11],
    atomic=True,
    routing_key="1",
)
SINGLE = PublishRequest(
    [b"paid 2"], producer="billing", producer_epoch=1, sequence_ids=[14], attributes=[{"traceparent": "00-1"}]
)


class Example:
    """The steps of the example up to the daemon's stop."""

    def __init__(self):
        self.core, self.store = TopicCore(TopicState(NAME)), MemoryStore()
        self.do(Create(TopicProperties(ttl_s=3600)), 0)
        self.do(OpenProducer("billing"), 3)
        self.do(Publish(BATCH, 12), 5)
        self.do(Publish(SINGLE, 6), 9)

    def do(self, ask, after_ms):
        now = Now(CLOCK_MS + after_ms, 0.0)
        step = self.core.step([("ticket", ask)], now)
        self.store.apply(step.operations)
        ((_, answer),) = self.core.settled(step, now)
        assert not isinstance(answer, Exception), answer
        return answer

    def stop(self):
        step, _ = self.core.close()
        self.store.apply(step.operations)

    def rows(self, table, start=b""):
        """Return keys and values, as in LevelDB, of keys that begin with ``start``."""
        stored = self.store.tables[table].walk(start, start + b"\xff", reverse=False)
        return [(bytes([table]) + key, value) for key, value in stored]


def documented(kind):
    """Return keys and values of the page's rows of one kind."""
    return [(row["key"], row["value"]) for row in dumps(rf"{kind}-\d")]


def test_the_example_is_what_the_topic_writes():
    example = Example()
    example.stop()
    assert documented("stamped") == example.rows(Table.MESSAGE)
    producers = example.rows(Table.METADATA, keys.SYSTEM + keys.PRODUCERS)
    assert documented("producer") == producers + example.rows(Table.METADATA, keys.SYSTEM + keys.PRODUCER)
    namespace = bytes([Table.METADATA]) + keys.namespace_key("shop"), NamespaceProperties("enabled").encode()
    assert documented("namespace") == [namespace]


def test_the_example_can_be_read_by_the_code():
    first, second, third = (decode_row(value) for _, value in documented("stamped"))
    assert Stamp.of(first) == Stamp("billing", 1, range(10, 12), 2)
    assert (first.extras["b"], second.extras, Stamp.of(second)) == (2, {"a": {"routingKey": "1"}}, None)
    assert Stamp.of(third) == Stamp("billing", 1, range(14, 15), 1)
    key, value = documented("producer")[1]
    producer = Producer.decode(keys.parse_system_key(key[1:]).rest.decode(), value)
    assert (producer.name, producer.epoch, producer.persisted) == ("billing", 1, 14)
    assert [(each.low, each.high) for each in producer.recent] == [(10, 11), (14, 14)]


def test_version_2_has_the_attributes_and_version_1_the_items_of_plain_messages():
    example = Example()
    span = example.do(Look(FIRST_BOUND), 20)
    paging = Paging(span, 100, 1 << 20)
    paging.feed_rows(list(example.store.tables[Table.MESSAGE].walk(*key_range(span), reverse=False)))
    page = paging.page()
    polled = AVRO_2.decode_page(AVRO_2.encode_page(page))
    assert [each.attributes for each in polled] == [{"routingKey": "1"}, {"routingKey": "1"}, {"traceparent": "00-1"}]
    ids = [key[-10:] + bytes(10) for key, _ in documented("stamped")]
    plain = [(each, payload) for each, payload in zip(ids, [b"open 1", b"paid 1", b"paid 2"], strict=True)]
    assert [each[:2] for each in AVRO.decode_page(AVRO.encode_page(page))] == plain
