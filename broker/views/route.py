"""A route that is not hot: what its view gets, what it gives, and how it is found."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from broker.handlers.query import parse_query
from broker.http.exchange import HttpAnswer
from broker.service import Service
from protocol.codec.json_values import fields_of, parse_json, parse_object
from protocol.errors import InvalidParameter
from protocol.names import TopicName, namespace_name, topic_name

if TYPE_CHECKING:
    from broker.http.answers import AnswerRoom
    from protocol.codec.json_values import Kind

#: The largest body of a request that only says what to do.
SMALL_BODY_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """One request, its body read, decompressed and within the route's bound."""

    path: Mapping[str, str]
    """What stands in the path's places: percent-decoded, not validated."""
    query: str
    """The raw query string, without its question mark."""
    headers: Mapping[str, str]
    """Lower-case names."""
    body: bytes = b""
    request_id: str = ""
    waited_ms: int = 0
    """How much of the wait it asks for is over already, at an instance that could not answer."""
    room: AnswerRoom | None = None
    """What its answer holds until it has left; None: nobody counts."""

    @property
    def namespace(self) -> str:
        """The namespace in the path. Raises InvalidName."""
        return namespace_name(self.path["namespace"])

    @property
    def name(self) -> TopicName:
        """The topic in the path. Raises InvalidName."""
        return topic_name(self.path["namespace"], self.path["topic"])

    def parameters(self, *known: str) -> dict[str, str]:
        """The query's parameters. Raises InvalidParameter for one that is not among ``known``."""
        if self.query and not known:
            raise InvalidParameter("this route has no query parameters", hint="leave out what stands after the ?")
        return parse_query(self.query, known)

    def json(self) -> Any:
        """The body as JSON, whatever its ``Content-Type``; None when there is none. Raises MalformedBody."""
        return parse_json(self.body) if self.body.strip() else None

    def fields(self, kinds: Mapping[str, tuple[str, Kind]]) -> dict[str, Any]:
        """The body as a record: our name → value. Raises MalformedBody, UnknownField."""
        return fields_of(parse_object(self.body), kinds) if self.body.strip() else {}


View: TypeAlias = Callable[[Service, ViewRequest], Awaitable[HttpAnswer]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    name: str
    """Its one name: in metrics, in the description, in the application."""
    method: str
    path: str
    """As in the description: ``/v1/namespaces/{namespace}/topics``."""
    view: View
    max_body_bytes: int = 0
    """The largest body it reads; 0: it has none."""


def json_answer(value: Any, *, headers: list[tuple[str, str]] | None = None) -> HttpAnswer:
    """``value`` as an answer of status 200."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return HttpAnswer(200, body, "application/json", headers or [])
