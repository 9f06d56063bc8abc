"""Plainsong's client library: publish, read and run transactions. It never imports the daemon.

with plainsong.Client() as client:
    client.create_topic("orders", if_not_exists=True)
    client.publish("orders", b"first")
    for message in client.read("orders"):
        print(message.id, message.payload)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plainsong import errors as errors
    from plainsong._async.client import AsyncClient
    from plainsong._async.producer import AsyncLightweightTransaction, AsyncProducer
    from plainsong._async.stream import AsyncStream
    from plainsong._async.transaction import AsyncTransactionContext
    from plainsong._sync.client import Client
    from plainsong._sync.producer import LightweightTransaction, Producer
    from plainsong._sync.stream import Stream
    from plainsong._sync.transaction import TransactionContext
    from plainsong.chains import ChainFault, ChainHead, ChainReport
    from plainsong.messages import (
        Counts,
        DroppedMessage,
        Message,
        MessageId,
        MessageReceipt,
        Outgoing,
        Page,
        Receipt,
        Seen,
        ServiceEvent,
    )
    from plainsong.participants import AsyncTransactionAware, TransactionAware
    from plainsong.positions import FilePosition, ServerPosition
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.page import Held
    from plainsong.serializers import BYTES, JSON, TEXT, Serializer, Undecodable, dataclass_json
    from plainsong.transactions import Transaction, TransactionStatus

    __version__: str

#: The module of each name. A module is imported on first use, so the daemon and other commands start without the client.
_HOMES = {
    "AsyncClient": "plainsong._async.client",
    "AsyncLightweightTransaction": "plainsong._async.producer",
    "AsyncProducer": "plainsong._async.producer",
    "AsyncStream": "plainsong._async.stream",
    "AsyncTransactionAware": "plainsong.participants",
    "AsyncTransactionContext": "plainsong._async.transaction",
    "BYTES": "plainsong.serializers",
    "ChainFault": "plainsong.chains",
    "ChainHead": "plainsong.chains",
    "ChainReport": "plainsong.chains",
    "Client": "plainsong._sync.client",
    "Counts": "plainsong.messages",
    "DroppedMessage": "plainsong.messages",
    "FilePosition": "plainsong.positions",
    "Held": "plainsong.protocol.page",
    "JSON": "plainsong.serializers",
    "LightweightTransaction": "plainsong._sync.producer",
    "Message": "plainsong.messages",
    "MessageId": "plainsong.messages",
    "MessageReceipt": "plainsong.messages",
    "Outgoing": "plainsong.messages",
    "Page": "plainsong.messages",
    "PlainsongError": "plainsong.errors",
    "Producer": "plainsong._sync.producer",
    "Receipt": "plainsong.messages",
    "Seen": "plainsong.messages",
    "Serializer": "plainsong.serializers",
    "ServerPosition": "plainsong.positions",
    "ServiceEvent": "plainsong.messages",
    "Stream": "plainsong._sync.stream",
    "TEXT": "plainsong.serializers",
    "Transaction": "plainsong.transactions",
    "TransactionAware": "plainsong.participants",
    "TransactionContext": "plainsong._sync.transaction",
    "TransactionStatus": "plainsong.transactions",
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
    "ChainFault",
    "ChainHead",
    "ChainReport",
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
    "ServiceEvent",
    "Stream",
    "Transaction",
    "TransactionAware",
    "TransactionContext",
    "TransactionStatus",
    "Undecodable",
    "dataclass_json",
]


#: Modules that are available without a separate import: ``plainsong.errors.TopicNotFound``.
_MODULES = ("errors",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"plainsong.{name}")
    if name == "__version__":
        # Imported on first use like the rest: Spark's executors may lack this module.
        return import_module("plainsong.protocol.version").VERSION
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
