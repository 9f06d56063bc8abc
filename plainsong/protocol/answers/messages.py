"""Answers with messages, to publishes, and about the readers of a topic."""

from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

from plainsong.protocol.answers.fields import Count, IdText, Json, Milliseconds, Payload, Pointer, Positive, component
from plainsong.protocol.answers.problems import ProblemFields


@component("PublishResponse")
class PublishResponseFields(TypedDict):
    """The answer to a publish under a write pointer, which a rollback takes."""

    transactionWritePointer: Annotated[
        int | str | None,
        Json("may exceed 2^53: a string of digits is accepted too, and returned with longs=string"),
    ]
    startTimestamp: Milliseconds
    startSequenceId: Count
    endTimestamp: Milliseconds
    endSequenceId: Count
    duplicate: NotRequired[bool]


@component("Receipt")
class ReceiptFields(TypedDict):
    """The answer to a publish without a write pointer."""

    firstId: IdText | None
    lastId: IdText | None
    generation: Positive
    duplicate: NotRequired[bool]
    deduplicated: NotRequired[bool]
    lastSequenceId: NotRequired[int | None]
    stored: NotRequired[Annotated[list[Count], Json("only if a part was stored before")] | None]
    dropped: NotRequired[list[Count] | None]


@component("Message")
class MessageFields(TypedDict):
    """A message of a poll."""

    id: IdText
    payload: Payload
    attributes: NotRequired[dict[str, str]]


class ManyPage(TypedDict):
    """The page of one topic, with the fields that a single poll has as headers."""

    messages: list[MessageFields]
    lastId: IdText | None
    end: Literal["end", "more", "held"]
    heldBy: NotRequired[Pointer]
    heldSince: NotRequired[Milliseconds]
    hiddenMessages: NotRequired[str]
    setAside: NotRequired[Count]


class ManyError(TypedDict):
    """The error of one topic."""

    error: ProblemFields


@component("ManyAnswer")
class ManyPages(TypedDict):
    """The answer to a poll of many topics."""

    topics: dict[str, ManyPage | ManyError]


class BatchIndex(TypedDict):
    """The place of a message in its atomic batch."""

    index: Count
    count: Count


MessageState: TypeAlias = Literal["plain", "committed", "open", "rolled-back", "invalid", "damaged", "set-aside"]
#: Declared as a dictionary, since ``from`` is a keyword of Python.
ShownMessage = TypedDict(
    "ShownMessage",
    {
        "id": NotRequired[IdText],
        "state": MessageState,
        "detail": NotRequired[Annotated[str, Json("what is wrong with a damaged message, which has no other fields")]],
        "from": NotRequired[
            Annotated[IdText, Json("first id of a range that was set aside; such rows have no id of their own")]
        ],
        "to": NotRequired[Annotated[IdText, Json("last id of that range")]],
        "rows": NotRequired[
            Annotated[Count, Json("number of rows in that range; null if some could not be read")] | None
        ],
        "publishTimeMs": NotRequired[Milliseconds],
        "expiresMs": NotRequired[Milliseconds],
        "writePointer": NotRequired[Pointer | None],
        "size": NotRequired[Count],
        "payload": NotRequired[Payload | None],
        "truncated": NotRequired[
            Annotated[bool, Json("true: only the beginning of the payload is returned; size is that of the whole")]
        ],
        "attributes": NotRequired[dict[str, str] | None],
        "producer": NotRequired[str | None],
        "sequenceId": NotRequired[int | None],
        "batch": NotRequired[BatchIndex | None],
    },
)
component("ShownMessage", is_open=True)(ShownMessage)


@component("Reader")
class ReaderRow(TypedDict):
    """A saved position."""

    name: str
    position: IdText
    generation: Positive
    changedMs: Milliseconds
    expiresMs: Milliseconds
