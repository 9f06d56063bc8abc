"""The calls about a cluster: who is there and who owns what, drains and pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from plainsong.core.attempts import Call
from plainsong.core.calls import as_json, json_of, nothing
from plainsong.core.effects import Request
from plainsong.protocol.cluster import instance_name
from plainsong.protocol.names import topic_name

if TYPE_CHECKING:
    from plainsong.core.effects import Answer

_JSON = (("Content-Type", "application/json"),)


def _record(answer: Answer) -> dict[str, Any]:
    return dict(json_of(answer))


def show_cluster(namespace: str = "", topic: str | None = None) -> Call[dict[str, Any]]:
    """``GET /v1/cluster``, with the owner of a topic if one is named. Raises InvalidName."""
    query = "" if topic is None else "?" + urlencode({"topic": str(topic_name(namespace, topic))})
    return Call(Request("GET", "/v1/cluster" + query), _record)


def drain_instance(instance: str, *, drained: bool) -> Call[None]:
    """``PUT`` and ``DELETE /v1/cluster/instances/{instance}/drain``. Raises InvalidName."""
    path = f"/v1/cluster/instances/{instance_name(instance)}/drain"
    return Call(Request("PUT" if drained else "DELETE", path), nothing, "harmless")


def pin_topic(namespace: str, topic: str, instance: str) -> Call[None]:
    """``PUT /v1/cluster/pins/{namespace}/{topic}``. Raises InvalidName."""
    body = as_json({"instance": instance_name(instance)})
    return Call(Request("PUT", _pin(namespace, topic), _JSON, body), nothing, "harmless")


def unpin_topic(namespace: str, topic: str) -> Call[None]:
    """``DELETE`` of the same. Raises InvalidName."""
    return Call(Request("DELETE", _pin(namespace, topic)), nothing, "harmless")


def _pin(namespace: str, topic: str) -> str:
    topic_name(namespace, topic)
    return f"/v1/cluster/pins/{namespace}/{topic}"
