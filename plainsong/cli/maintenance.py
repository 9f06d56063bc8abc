"""The requests of ``plainsong maintain`` without a method in the client: the kind of store, and a topic's removable rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.calls import Call, Request, object_of, topic_path
from plainsong.cli.connection import run_call

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.protocol.answers.topics import Maintenance


def store_kind(client: Client) -> str:
    """The kind of the daemon's store: ``leveldb``, ``memory``, ``hbase``."""
    return str(run_call(client, Call(Request("GET", "/version"), object_of)).get("store", ""))


def maintenance(client: Client, topic: str) -> Maintenance:
    """``POST …/maintenance``: the topic's removable rows, once the daemon has made that durable. Raises TopicNotFound."""
    path = topic_path(client.namespace, topic, "/maintenance?longs=string")
    call: Call[Maintenance] = Call(Request("POST", path), object_of, "harmless")
    return run_call(client, call)
