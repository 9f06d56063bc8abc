"""What users import to publish and to read; it knows ``protocol`` and never the daemon.

with plainsong.Client() as client:
    client.create_topic("orders", if_not_exists=True)
    client.publish("orders", b"first")
    for message in client.read("orders"):
        print(message.id, message.payload)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from plainsong.aio.client import AsyncClient
    from plainsong.aio.lightweight import AsyncLightweightTransaction
    from plainsong.aio.producer import AsyncProducer
    from plainsong.aio.stream import AsyncStream
    from plainsong.aio.transaction import AsyncTransactionContext
    from plainsong.core.outcomes import Counts, DroppedMessage
    from plainsong.core.producing.receipts import MessageReceipt
    from plainsong.ids import MessageId
    from plainsong.messages import Held, Message, Outgoing, Page, Receipt, Seen
    from plainsong.positions import FilePosition, ServerPosition
    from plainsong.protocol.errors import PlainsongError
    from plainsong.serializers import BYTES, JSON, TEXT, Serializer, Undecodable, dataclass_json
    from plainsong.sync.client import Client
    from plainsong.sync.lightweight import LightweightTransaction
    from plainsong.sync.producer import Producer
    from plainsong.sync.stream import Stream
    from plainsong.sync.transaction import TransactionContext
    from plainsong.transactions.participants import AsyncTransactionAware, TransactionAware
    from plainsong.transactions.values import Transaction, TransactionStatus

#: Where each name lives: loaded when it is asked for, so that the daemon and other commands start without them.
_HOMES = {
    "AsyncClient": "plainsong.aio.client",
    "AsyncLightweightTransaction": "plainsong.aio.lightweight",
    "AsyncProducer": "plainsong.aio.producer",
    "AsyncStream": "plainsong.aio.stream",
    "AsyncTransactionAware": "plainsong.transactions.participants",
    "AsyncTransactionContext": "plainsong.aio.transaction",
    "BYTES": "plainsong.serializers",
    "Client": "plainsong.sync.client",
    "Counts": "plainsong.core.outcomes",
    "DroppedMessage": "plainsong.core.outcomes",
    "FilePosition": "plainsong.positions",
    "Held": "plainsong.messages",
    "JSON": "plainsong.serializers",
    "LightweightTransaction": "plainsong.sync.lightweight",
    "Message": "plainsong.messages",
    "MessageId": "plainsong.ids",
    "MessageReceipt": "plainsong.core.producing.receipts",
    "Outgoing": "plainsong.messages",
    "Page": "plainsong.messages",
    "PlainsongError": "plainsong.errors",
    "Producer": "plainsong.sync.producer",
    "Receipt": "plainsong.messages",
    "Seen": "plainsong.messages",
    "Serializer": "plainsong.serializers",
    "ServerPosition": "plainsong.positions",
    "Stream": "plainsong.sync.stream",
    "TEXT": "plainsong.serializers",
    "Transaction": "plainsong.transactions.values",
    "TransactionAware": "plainsong.transactions.participants",
    "TransactionContext": "plainsong.sync.transaction",
    "TransactionStatus": "plainsong.transactions.values",
    "Undecodable": "plainsong.serializers",
    "dataclass_json": "plainsong.serializers",
}

__all__ = [
    "BYTES",
    "JSON",
    "TEXT",
    "AsyncClient",
    "AsyncLightweightTransaction",
    "AsyncProducer",
    "AsyncStream",
    "AsyncTransactionAware",
    "AsyncTransactionContext",
    "Client",
    "Counts",
    "DroppedMessage",
    "FilePosition",
    "Held",
    "LightweightTransaction",
    "Message",
    "MessageId",
    "MessageReceipt",
    "Outgoing",
    "Page",
    "PlainsongError",
    "Producer",
    "Receipt",
    "Seen",
    "Serializer",
    "ServerPosition",
    "Stream",
    "Transaction",
    "TransactionAware",
    "TransactionContext",
    "TransactionStatus",
    "Undecodable",
    "dataclass_json",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
