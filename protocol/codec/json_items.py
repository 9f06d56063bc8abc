"""The list ``messages`` of a JSON publish: payloads, and objects that say more about one message.

"text"   {"base64": …}   {"bytes": …}                                          a payload
{"payload": …, "ttlSeconds": …, "sequenceId": …, "attributes": {…}}            an item, told by its payload
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.codec import json_values as values
from protocol.codec.base import MAX_MESSAGES
from protocol.errors import InvalidSequenceIds, MalformedBody, RequestTooLarge, UnknownField, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

_ITEM: Mapping[str, tuple[str, values.Kind]] = {
    "payload": ("payload", values.payload),
    "ttlSeconds": ("ttl_s", values.nullable(values.int32, "int")),
    "sequenceId": ("sequence_id", values.nullable(values.int64, "long")),
    "attributes": ("attributes", values.nullable(values.strings, "map")),
}
#: What an item says → the request's own list of the same, and that list's name in JSON.
_LISTS = {
    "ttl_s": ("message_ttls_s", "messageTtlsSeconds"),
    "sequence_id": ("sequence_ids", "sequenceIds"),
    "attributes": ("attributes", "attributes"),
}


def put_messages(request: dict[str, Any], given: Any) -> None:
    """Add ``messages`` to the request's fields, and the lists of what its items say besides.

    Raises:
      MalformedBody, UnknownField: an entry is neither form, or says what a list of the request says too.
      InvalidSequenceIds: some items have a sequence id and some have none.
      RequestTooLarge: more than ``MAX_MESSAGES``.
    """
    if not isinstance(given, list):
        values.refuse("messages", given, "a list")
    if len(given) > MAX_MESSAGES:
        raise RequestTooLarge(f"{len(given)} messages", hint=f"send at most {MAX_MESSAGES} at a time")
    items: dict[int, dict[str, Any]] = {}
    request["messages"] = [
        _utf8(entry, index) if type(entry) is str else _message(entry, index, items)
        for index, entry in enumerate(given)
    ]
    for key, (name, shown) in _LISTS.items():
        if any(item.get(key) is not None for item in items.values()):
            _put_list(request, name, shown, [items.get(index, {}).get(key) for index in range(len(given))])


def _utf8(entry: str, index: int) -> bytes:
    try:
        return entry.encode()
    except UnicodeEncodeError:
        return values.utf8(entry, f"messages[{index}]")


def _message(entry: Any, index: int, items: dict[int, dict[str, Any]]) -> bytes:
    """The payload of an entry that is no string; what else it says goes to ``items``."""
    where = f"messages[{index}]"
    if not isinstance(entry, dict) or "payload" not in entry:
        if isinstance(entry, dict) and not entry.keys() & {"base64", "bytes"}:
            _refuse_object(entry, where)
        return values.payload(entry, where)
    item = values.fields_of(entry, _ITEM, where + ".")
    items[index] = item
    payload: bytes = item["payload"]
    return payload


def _refuse_object(entry: dict[str, Any], where: str) -> None:
    known = (*_ITEM, "base64", "bytes")
    for key in entry:
        if key not in known:
            raise UnknownField(f"unknown field {where}.{key[:80]!r}", hint=nearest(key[:80], known))
    raise MalformedBody(f"{where} has no payload", hint='{"payload": …}, {"base64": …} or a string')


def _put_list(request: dict[str, Any], name: str, shown: str, column: list[Any]) -> None:
    if request.get(name) is not None:
        error = InvalidSequenceIds if name == "sequence_ids" else MalformedBody
        raise error(f"{shown} is given as a list, and by items of messages too", hint="use one of the two")
    if name == "sequence_ids" and None in column:
        raise InvalidSequenceIds(
            f"messages[{column.index(None)}] has no sequenceId, others have one", hint="give all of them one, or none"
        )
    request[name] = [entry or {} for entry in column] if name == "attributes" else column
