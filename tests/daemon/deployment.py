"""A deployment with every kind of stored data, and checks for copies of it."""

from __future__ import annotations

from dataclasses import dataclass

from plainsong import Client, Outgoing
from plainsong.protocol.errors import TopicNotFound
from plainsong.transactions import Transaction
from tests.daemon.harness import eventually

#: Number of the producer's requests, and of messages in each.
REQUESTS, EACH = 40, 500
#: Makes a copy take many steps.
PADDING = bytes(1000)
SHORT_TTL_S = 2


@dataclass
class Deployment:
    """The ids and positions that the service returned."""

    ids: list[bytes]
    reader: bytes
    open: Transaction
    first: bytes
    """The id of the first message; a duplicate is answered with it."""


def fill(client: Client) -> Deployment:
    """Create the deployment on an empty store."""
    client.create_topic("orders", ttl_s=86_400, deduplication="enabled")
    with client.producer("orders", "till") as producer:
        receipts = [producer.publish([b"%d" % n + PADDING for n in range(EACH)]) for _ in range(REQUESTS)]
    client.create_topic("twice")
    client.publish("twice", b"of the first generation")
    client.admin.delete_topic("twice")
    client.create_topic("twice")
    client.publish("twice", b"of the second generation")
    client.create_topic("short", ttl_s=86_400)
    client.publish("short", [Outgoing(b"soon gone", ttl_s=SHORT_TTL_S), Outgoing(b"stays")])
    open_ = client.transactions.begin(timeout_s=600, client_id="mover")
    client.store("orders", [b"stored"], transaction=open_)
    client.publish("orders", [b"undecided"], transaction=open_)
    undone = client.transactions.begin(client_id="mover")
    client.publish("orders", [b"undone"], transaction=undone)
    client.transactions.invalidate(undone)
    client.publish("orders", [b"behind"])
    reader = receipts[1].last_id
    assert reader is not None
    client.admin.set_reader("orders", "ana", reader)
    client.admin.namespaces.set(deduplication="enabled")
    ids = [bytes(message.id) for message in client.read("orders", isolation="uncommitted")]
    first = receipts[0].first_id
    assert first is not None
    return Deployment(ids, bytes(reader), open_, bytes(first))


def is_all_there(client: Client, made: Deployment) -> None:
    """Check that ids, generations, readers, producers, transactions and expiry are as in the original."""
    assert [bytes(message.id) for message in client.read("orders", isolation="uncommitted")] == made.ids
    assert client.admin.properties("twice")["generation"] == "2"
    assert [message.value for message in client.read("twice")] == [b"of the second generation"]
    eventually(
        "what was published for a short time has expired",
        lambda: [message.value for message in client.read("short")] == [b"stays"],
    )
    assert client.admin.reader("orders", "ana")["position"] == made.reader.hex()
    assert client.admin.namespaces.show()["properties"]["deduplication"] == "enabled"
    committed = client.poll("orders", made.ids[-8], isolation="committed")
    assert [message.value for message in committed][-1:] == [b"%d" % (EACH - 1) + PADDING]
    assert committed.held is not None
    assert committed.held.write_pointer == made.open.write_pointer


def duplicates_are_reported(client: Client, made: Deployment) -> None:
    """Check that a repeated message is not stored again, and that the producer continues after its last message."""
    with client.producer("orders", "till") as producer:
        assert producer.last_sequence_id == REQUESTS * EACH - 1
        receipt = producer.publish([b"again"], sequence_ids=[producer.last_sequence_id])
        assert receipt.duplicate
    assert [bytes(message.id) for message in client.read("orders", isolation="uncommitted")] == made.ids


def new_messages_come_behind(client: Client, made: Deployment) -> None:
    """Check that ids still increase, even if the clock is behind."""
    receipt = client.publish("orders", [b"new"])
    assert receipt.first_id is not None
    assert bytes(receipt.first_id) > made.ids[-1]
    made.ids.append(bytes(receipt.first_id))


def open_transactions_can_be_committed(client: Client, made: Deployment) -> None:
    """Check that an open transaction can be committed, and that rolled-back messages stay rolled back."""
    client.transactions.commit(made.open)
    values = [message.value for message in client.poll("orders", made.ids[-8], isolation="committed")]
    assert {b"undecided", b"behind"} <= set(values)
    assert b"undone" not in values


def is_no_topic(client: Client, name: str) -> bool:
    """True if there is no topic of that name."""
    try:
        client.admin.properties(name)
    except TopicNotFound:
        return True
    return False
