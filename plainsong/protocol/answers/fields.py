"""The parts of the types of answers: keywords of JSON Schema, and fields that many answers share."""

from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeAlias, TypedDict, TypeVar

T = TypeVar("T")


class Json:
    """Keywords of JSON Schema for a field, as metadata of ``Annotated``. Of two, the later one takes precedence."""

    def __init__(self, description: str = "", /, **keywords: object) -> None:
        self.keywords = {**keywords, "description": description} if description else keywords


class Component(NamedTuple):
    """The form of a type in openapi.json."""

    name: str = ""
    """Its name among the schemas; empty: it is written out where it is used."""
    description: str = ""
    is_open: bool = False
    """True if an answer may have further fields."""
    of_requests: bool = False
    """True if requests declare the schema, so that the type only refers to it."""


#: Types with a name, with a description, or open to further fields; all others are written out where they are used.
COMPONENTS: dict[object, Component] = {}


def component(name: str = "", description: str = "", *, is_open: bool = False) -> Callable[[T], T]:
    """Show the decorated type as a ``Component``."""

    def decorate(shape: T) -> T:
        COMPONENTS[shape] = Component(name, description, is_open)
        return shape

    return decorate


Count: TypeAlias = Annotated[int, Json(minimum=0)]
Positive: TypeAlias = Annotated[int, Json(minimum=1)]
Milliseconds: TypeAlias = Annotated[int, Json("milliseconds since 1970", minimum=0)]
Base64: TypeAlias = Annotated[str, Json(contentEncoding="base64")]
#: A string if the request asks for ``longs=string``, otherwise a number, which may exceed 2^53.
Pointer: TypeAlias = Annotated[int | str, Json()]
#: The cursor of a list.
Next: TypeAlias = Annotated[str, Json("`after` of the next page; null on the last page")] | None
IdText: TypeAlias = Annotated[
    str, Json("20 bytes in hex; sorts in the order of the topic", pattern="^[0-9a-f]{40}$"), Component("MessageId")
]


class Base64Payload(TypedDict):
    """A payload that is not text, or that was requested in base64."""

    base64: Base64


Payload: TypeAlias = Annotated[
    str | Base64Payload,
    Json("text, or any bytes in base64; in responses base64 only if the bytes are not UTF-8"),
    Component("Payload"),
]
