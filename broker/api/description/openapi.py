"""The description of the HTTP API in OpenAPI 3.1, made from the declarations of its routes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args

from broker.api.schemas import (
    ISOLATION,
    MILLISECONDS,
    POSITIVE,
    REQUESTS,
    STRING,
    WAIT_MS,
    Schema,
    array,
    by_status,
    ref,
)
from broker.api.shapes import Shapes
from plainsong.protocol.answers.problems import ProblemFields
from plainsong.protocol.answers.topics import TopicColumn
from plainsong.protocol.codec.cloud_events import BATCH_TYPE, EVENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.http.route import Body, Route

_NAMES: dict[str, Schema] = {
    "namespace": {"type": "string", "pattern": "^[a-zA-Z0-9_]{1,255}$"},
    "topic": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,255}$"},
    "reader": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,255}$"},
    "producer": {"type": "string", "minLength": 1, "maxLength": 255, "description": "any text of at most 255 bytes"},
    "transaction": {"type": "string", "pattern": "^[0-9]{1,19}$"},
    "file": {"type": "string", "description": "its path, which may contain slashes"},
    "message": {"type": "string", "pattern": "^[0-9a-fA-F]{40}$"},
    "code": {"type": "string", "pattern": "^[a-z_]{1,80}$"},
    "instance": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,100}$"},
    "backup": {"type": "string", "pattern": "^[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}$"},
    "digest": {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "SHA-256 of its bytes"},
}
_POSITION: Schema = {**STRING, "pattern": "^([0-9]{1,19}|[0-9a-fA-F]{40})$"}
#: Bodies of events have the same schema at every route.
_EVENTS: dict[str, Schema] = {EVENT_TYPE: ref("CloudEvent"), BATCH_TYPE: array(ref("CloudEvent"))}
_QUERY: dict[str, tuple[str, Schema]] = {
    "ifNotExists": ("succeed if the topic exists with these properties", {"type": "boolean", "default": False}),
    "put_definitions.dryRun": ("return what would happen; change nothing", {"type": "boolean", "default": False}),
    "withoutDamaged": ("skip what cannot be read, and list it in leftOut", {"type": "boolean", "default": False}),
    "complete": ("true once the client has written a complete backup", {"type": "boolean", "default": False}),
    "prune": ("delete everything that the document does not name", {"type": "boolean", "default": False}),
    "put_definitions.namespace": ("prune only topics of this namespace", _NAMES["namespace"]),
    "ttl": ("time to live of all messages of the request, in seconds", POSITIVE),
    "wait_ms": ("how long to wait for a message", WAIT_MS),
    "max_bytes": ("maximum payload bytes of the page; at least one message is returned", POSITIVE),
    "isolation": ("committed: only committed messages, up to the first undecided one", ISOLATION),
    "as_of_ms": ("read as of this moment, in milliseconds since 1970", MILLISECONDS),
    "payload": ("base64: every payload in base64", {"enum": ["text", "base64"], "default": "text"}),
    "longs": ("string: write pointers as strings", {"enum": ["number", "string"], "default": "number"}),
    "from": ("the id or time in milliseconds to start at", _POSITION),
    "to": ("the id or time to stop before", _POSITION),
    "list_chain.limit": (
        "maximum number of entries",
        {"type": "integer", "minimum": 1, "maximum": 1000, "default": 1000},
    ),
    "list_chain.after": (
        "the id of the entry to start after; default: start with the oldest entry",
        {"type": "string", "pattern": "^[0-9a-fA-F]{40}$"},
    ),
    "messages": ("include the messages that the entries cover", {"type": "boolean", "default": True}),
    "limit": ("maximum number of entries", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
    "list_all_topics.limit": (
        "maximum number of topics",
        {"type": "integer", "minimum": 1, "maximum": 500, "default": 100},
    ),
    "list_all_topics.after": ("`next` of the previous page", STRING),
    "topics": ("up to 200 topics, as namespace:topic,…", STRING),
    "kinds": ("the kinds of events to send, comma-separated: topics, transactions, attention, cluster", STRING),
    "payloadBytes": ("how many bytes of each payload to return", {"type": "integer", "minimum": 0}),
    "filter": ("only messages whose payload contains this text", STRING),
    "deleted": (
        "list deleted topics instead, each as an object with its size",
        {"type": "boolean", "default": False},
    ),
    "dryRun": ("check, and return what would change; change nothing", {"type": "boolean", "default": False}),
    "q": ("part of namespace:topic, case-insensitive", STRING),
    "namespace": ("only this namespace", _NAMES["namespace"]),
    "match": (
        "only these topics, comma-separated: namespace:topic, each part a name or a prefix followed by *",
        STRING,
    ),
    "sort": (
        "the column to sort by",
        {"enum": list(get_args(TopicColumn)), "default": "name"},
    ),
    "order": ("ascending or descending", {"enum": ["asc", "desc"], "default": "asc"}),
    "follow.limit": ("end the stream after this many messages", POSITIVE),
    "reader": ("the id of the last message read", ref("MessageId")),
    "get_lag.reader": ("return only this reader, as one object", _NAMES["reader"]),
    "after": ("continue after this name or place", STRING),
    "generation": ("the topic's generation; default: the current one", POSITIVE),
    "topic": ("the topic, as namespace:topic", STRING),
    "state": ("only transactions in this state", {"enum": ["in_progress", "invalid", "committed", "aborted"]}),
}
#: Types of answers with a schema.
_DESCRIBED = ("application/json", "text/plain")
_REQUEST_HEADERS = {
    "Plainsong-Reader": "the reader's name, under which its lag is shown",
    "If-None-Match": "a known ETag: 304 if it is still current",
    "Last-Event-ID": "the id of the last event received: the stream continues after it, and `from` is ignored",
    "Prefer": "return=representation: return the effect of the change",
    "traceparent": (
        "the W3C trace context: it and tracestate become attributes of every message that has none of its own"
    ),
    "If-Match": "the ETag of the topic as read: 412 if it has changed since",
}
_HEADERS = {
    "Plainsong-Set-Aside": "number of rows within the page that were set aside, if any",
    "Plainsong-Scanned": "number of messages searched for the text of filter",
    "Location": "the path of the redirect",
    "ETag": "identifies this version, for If-Match or If-None-Match",
    "Plainsong-Last-Id": "the position to resume after",
    "Plainsong-End": "end, more or held: why the page ended",
    "Plainsong-Held-By": "the write pointer of the undecided message that ended the page",
    "Plainsong-Held-Since": "publish time of that message, in milliseconds since 1970",
    "Plainsong-Hidden-Messages": "number of messages from there on; 1000+ if there are more than a thousand",
    "Plainsong-Generation": "the topic's generation; only for a publish under a write pointer",
    "Plainsong-Duplicate": "true: nothing new was stored; partial: some of it was; only for a producer's publish",
    "Plainsong-Last-Sequence-Id": "the producer's highest stored sequence id",
    "Allow": "the allowed methods",
    "Retry-After": "seconds to wait before a retry",
    "X-Request-Id": "the client's, or one generated by the daemon; the log has it too",
}
#: Statuses with an additional header.
_STATUS_HEADERS = {405: "Allow", 429: "Retry-After", 503: "Retry-After"}


def description(routes: Iterable[Route[Any]], version: str) -> dict[str, Any]:
    """Return the whole document."""
    shapes = Shapes(REQUESTS)
    shapes.schema(ProblemFields)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = paths.setdefault(route.path, _path(route.path))
        path[route.method.lower()] = _operation(route, shapes)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Plainsong",
            "version": version,
            "description": "Topics of messages in one durable order. The guide is docs/http.md.",
        },
        "paths": paths,
        # The empty entry is for a daemon without authentication.
        "security": [{"token": []}, {"certificate": []}, {}],
        "components": {
            "schemas": shapes.components,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": (
                        "a token from plainsong token create, or from the OpenID provider that the daemon trusts"
                    ),
                },
                "certificate": {
                    "type": "mutualTLS",
                    "description": "a client certificate, if the daemon asks for one",
                },
            },
        },
    }


def _path(path: str) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    if not names:
        return {}
    return {"parameters": [{"name": n, "in": "path", "required": True, "schema": _NAMES[n]} for n in names]}


def _operation(route: Route[Any], shapes: Shapes) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": route.name,
        "tags": [route.tag],
        "summary": route.doc,
        "responses": _responses(route, shapes),
        "x-plainsong-verb": route.verb if isinstance(route.verb, str) else list(route.verbs),
        "x-plainsong-on": route.on,
    }
    if route.on == "nobody":
        made["security"] = []
    if route.parameters or route.headers:
        made["parameters"] = [*[_query(route, name) for name in route.parameters], *map(_request_header, route.headers)]
    if route.body is not None and route.body.schema is not None:
        content = {kind: _content(route.body, kind) for kind in route.body.types}
        made["requestBody"] = {"required": route.body.required, "content": content}
    return made


def _query(route: Route[Any], name: str) -> dict[str, Any]:
    text, schema = _QUERY.get(f"{route.name}.{name}") or _QUERY[name]
    return {"name": name, "in": "query", "description": text, "schema": schema}


def _request_header(name: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": _REQUEST_HEADERS[name], "schema": STRING}


def _event_content(kind: str) -> dict[str, Any]:
    """Describe a body of events; other types get an empty description."""
    return {"schema": _EVENTS[kind]} if kind in _EVENTS else {}


def _content(body: Body, kind: str) -> dict[str, Any]:
    if kind != "application/json":
        return _event_content(kind)  # the guide has Avro's schemas
    content: dict[str, Any] = {"schema": body.schema}
    return {**content, "example": body.example} if body.example is not None else content


def _responses(route: Route[Any], shapes: Shapes) -> dict[str, Any]:
    answered: dict[str, Any] = {
        "description": route.answered,
        "headers": _headers(("X-Request-Id", *route.answer_headers)),
    }
    if route.answer is not None:
        answered["content"] = {
            kind: {"schema": shapes.schema(route.answer)} if kind in _DESCRIBED else _event_content(kind)
            for kind in route.answer_types
        }
    responses = {str(route.success): answered}
    if "If-None-Match" in route.headers:
        responses["304"] = {"description": "not modified: If-None-Match still matches", "headers": answered["headers"]}
    for status, codes in by_status((*route.errors, *_refusals(route))).items():
        responses[str(status)] = _problem(status, codes)
    return responses


def _refusals(route: Route[Any]) -> tuple[str, ...]:
    """Return the codes of refusals by authentication, authorization and quotas."""
    if route.on == "nobody":
        return ()
    named = ("unauthenticated", "authentication_unavailable")
    return named if route.on == "name" else (*named, "forbidden", "quota_exceeded")


def _problem(status: int, codes: list[str]) -> dict[str, Any]:
    schema = {"allOf": [ref("Problem"), {"type": "object", "properties": {"code": {"enum": codes}}}]}
    more = (_STATUS_HEADERS[status],) if status in _STATUS_HEADERS else ()
    return {
        "description": ", ".join(codes),
        "headers": _headers(("X-Request-Id", *more)),
        "content": {"application/problem+json": {"schema": schema}},
    }


def _headers(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: {"description": _HEADERS[name], "schema": STRING} for name in names}
