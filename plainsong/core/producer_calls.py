"""The calls about producers and about namespaces, as requests and ways to read their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from plainsong.core.attempts import Call
from plainsong.core.calls import as_json, json_of, namespace_path, nothing, topic_path
from plainsong.core.effects import Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.core.effects import Answer

_JSON = (("Content-Type", "application/json"),)


def _record(answer: Answer) -> dict[str, Any]:
    return dict(json_of(answer))


def producer_path(namespace: str, topic: str, producer: str, rest: str = "") -> str:
    """Any text may name a producer: what a path cannot have is escaped. Raises InvalidName."""
    return topic_path(namespace, topic, "/producers/" + quote(producer, safe="") + rest)


def list_producers(namespace: str, topic: str, after: str | None, limit: int) -> Call[dict[str, Any]]:
    """``GET /{t}/producers``: one page, with what the topic knows about all of them."""
    query = {"limit": str(limit), **({} if after is None else {"after": after})}
    return Call(Request("GET", topic_path(namespace, topic, "/producers?" + urlencode(query))), _record)


def show_producer(namespace: str, topic: str, producer: str, generation: int | None = None) -> Call[dict[str, Any]]:
    """``GET /{t}/producers/{name}``; with a generation also of one that is gone."""
    query = "" if generation is None else f"?generation={generation}"
    return Call(Request("GET", producer_path(namespace, topic, producer, query)), _record)


def delete_producer(namespace: str, topic: str, producer: str) -> Call[None]:
    """``DELETE /{t}/producers/{name}``."""
    return Call(Request("DELETE", producer_path(namespace, topic, producer)), nothing, "twice")


def list_namespaces() -> Call[list[str]]:
    """``GET /v1/namespaces``."""

    def read(answer: Answer) -> list[str]:
        return [str(name) for name in json_of(answer)]

    return Call(Request("GET", "/v1/namespaces"), read)


def show_namespace(namespace: str) -> Call[dict[str, Any]]:
    """``GET /v1/namespaces/{ns}/properties``."""
    return Call(Request("GET", namespace_path(namespace) + "/properties"), _record)


def set_namespace(namespace: str, properties: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """``PUT /v1/namespaces/{ns}/properties``: replaces all of them."""
    path = namespace_path(namespace) + "/properties"
    return Call(Request("PUT", path, _JSON, as_json(properties)), _record, "harmless")
