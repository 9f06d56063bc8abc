"""The topics in AsyncAPI 3.0: one channel for each topic that the client may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.api.answers import json_answer
from broker.api.topics.metrics import parse_match
from broker.http.messages import EVENT_STREAM
from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.catalogue import Catalogue
    from broker.http.messages import Answer, Request
    from broker.security.rights import Rights
    from plainsong.protocol.names import TopicName

#: Topics in one document.
MAX_CHANNELS = 1_000
#: The same for every topic: the daemon does not interpret payloads.
_MESSAGE = {
    "name": "message",
    "title": "A message",
    "summary": "A payload of any bytes, and attributes.",
    "headers": {
        "description": "its attributes",
        "type": "object",
        "additionalProperties": {"type": "string"},
    },
    "payload": {"description": "any bytes; in JSON as text, or as base64 if they are not UTF-8"},
}


@dataclass(frozen=True, slots=True)
class AsyncApi:
    """The route of the document. Any instance answers it, for the topics of all instances."""

    catalogue: Catalogue
    version: str
    is_tls: bool
    """True if clients connect over TLS."""

    async def describe(self, request: Request) -> Answer:
        """Describe the topics that match and on which the client has a grant. Raises InvalidParameter, StoreError."""
        patterns = parse_match(request.parameters("match").get("match", "*:*"))
        seen = [
            name
            for name in await self.catalogue.figures()
            if request.rights.any_on_topic(*name) and any(each.matches(*name) for each in patterns)
        ]
        if len(seen) > MAX_CHANNELS:
            raise InvalidParameter(
                f"{len(seen)} topics match, but a document describes at most {MAX_CHANNELS}",
                hint="match fewer topics, for example match=shop:orders-*",
            )
        host = request.headers.get("host", "")
        return json_answer(describe_topics(sorted(seen), request.rights, self.version, host, is_tls=self.is_tls))


def describe_topics(
    topics: Iterable[TopicName], rights: Rights, version: str, host: str, *, is_tls: bool
) -> dict[str, Any]:
    """Return the whole document: the daemon *receives* what may be published, and *sends* what may be polled.

    Args:
      host: the host name in the request; empty if it had none.
    """
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for name in topics:
        text, path = str(name), f"/v1/namespaces/{name.namespace}/topics/{name.topic}"
        channels[text] = {"address": path, "messages": {"message": {"$ref": "#/components/messages/message"}}}
        if rights.on_topic("publish", *name):
            operations[f"publish {text}"] = _operation("receive", text, "POST", f"{path}/publish")
        if rights.on_topic("poll", *name):
            operations[f"poll {text}"] = _operation("send", text, "POST", f"{path}/poll")
            operations[f"follow {text}"] = {
                **_operation("send", text, "GET", f"{path}/events"),
                "description": f"The response does not end; its type is {EVENT_STREAM}.",
            }
    servers = {"servers": {"daemon": {"host": host, "protocol": "https" if is_tls else "http"}}} if host else {}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Plainsong",
            "version": version,
            "description": "The topics that the caller may see; /openapi.json describes every route.",
        },
        **servers,
        "channels": channels,
        "operations": operations,
        "components": {"messages": {"message": _MESSAGE}},
    }


def _operation(action: str, topic: str, method: str, path: str) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{topic}"},
        "summary": f"{method} {path}",
        "bindings": {"http": {"method": method, "bindingVersion": "0.3.0"}},
    }
