"""The transaction service's hot routes: begin, prepare, commit and abort, with what all its routes have in common."""

from __future__ import annotations

import json
from binascii import b2a_base64
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.actor import service_moved
from broker.handlers.publish import off_loop
from broker.handlers.query import one_of, parse_query
from broker.http.exchange import HttpAnswer
from protocol.codec import JSON
from protocol.codec import json_values as values
from protocol.codec.json_values import fields_of, parse_object
from protocol.errors import BodyTooLarge, InvalidParameter, TransactionsUnavailable
from protocol.transactions.codec import encode_transaction
from protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.transactions import TransactionService
    from broker.http.exchange import HotRequest
    from broker.service import Service
    from protocol.codec.json_values import Kind
    from protocol.transactions.manager.answers import Begun, Decision

#: The largest body of a route that only says what to do.
SMALL_BODY_BYTES = 64 << 10
#: Pointers have 63 bits.
MAX_ID_DIGITS = 19
_TYPES = {"short": TransactionType.SHORT, "long": TransactionType.LONG}


def _type(value: Any, name: str) -> TransactionType:
    found = _TYPES.get(value) if isinstance(value, str) else None
    return values.refuse(name, value, "short or long") if found is None else found


_BEGIN: Mapping[str, tuple[str, Kind]] = {
    "type": ("type", values.nullable(_type)),
    "timeoutSeconds": ("timeout_s", values.nullable(values.int32, "int")),
    "clientId": ("client_id", values.nullable(values.text)),
}
_PREPARE: Mapping[str, tuple[str, Kind]] = {"changes": ("changes", values.list_of(values.binary))}


async def begin(service: Service, request: HotRequest) -> HttpAnswer:
    """A new transaction; an empty body asks for a short one. Raises as ``TransactionService.begin``."""
    transactions, as_number = embedded(service), numbers(request.query)
    given = fields_of(_small(request.body), _BEGIN) if request.body.strip() else {}
    given = {name: value for name, value in given.items() if value is not None}
    return begun_answer(await transactions.begin(**given), as_number)


async def prepare(service: Service, request: HotRequest) -> HttpAnswer:
    """What the transaction changed; conflicts are found here first. Raises as ``TransactionService.prepare``."""
    transactions, as_number = embedded(service), numbers(request.query)
    transaction_id = parse_transaction_id(request.transaction)
    given = await off_loop(len(request.body), JSON, partial(_changes, request.body))
    await transactions.prepare(transaction_id, given)
    return _json({"id": as_number(transaction_id), "state": "in_progress"})


def _changes(body: bytes) -> list[bytes]:
    given = fields_of(parse_object(body), _PREPARE) if body.strip() else {}
    changes: list[bytes] = given.get("changes", [])
    return changes


async def commit(service: Service, request: HotRequest) -> HttpAnswer:
    """Make all of it visible; asked again it says so again. Raises as ``TransactionService.commit``."""
    transactions, as_number = embedded(service), numbers(request.query)
    refuse_body(request.body)
    return decided_answer(await transactions.commit(parse_transaction_id(request.transaction)), as_number)


async def abort(service: Service, request: HotRequest) -> HttpAnswer:
    """Roll back all of it; the state says what it came to. Raises as ``TransactionService.abort``."""
    transactions, as_number = embedded(service), numbers(request.query)
    refuse_body(request.body)
    return decided_answer(await transactions.abort(parse_transaction_id(request.transaction)), as_number)


# --- what all routes of the service have in common -------------------------------------------------


def embedded(service: Service) -> TransactionService:
    """The daemon's own service.

    Raises:
      NoOwner: it is another instance's now. TransactionsUnavailable: there is none; the text says who decides.
    """
    if service.embedded is not None:
        return service.embedded
    if service.decider.anywhere is not None:
        raise service_moved()
    if service.config.transactions.service == "tephra":
        where = service.config.transactions.tephra
        raise TransactionsUnavailable("a Tephra decides here", hint=f"begin and end transactions at {where}")
    raise TransactionsUnavailable(
        "this daemon has no transaction service", hint='set transactions.service to "embedded"'
    )


class Numbers:
    """How write pointers are written in an answer."""

    __slots__ = ("as_strings",)

    def __init__(self, as_strings: bool) -> None:
        self.as_strings = as_strings

    def __call__(self, pointer: int) -> int | str:
        """The pointer as a JSON value."""
        return str(pointer) if self.as_strings else pointer


_AS_NUMBERS, _AS_STRINGS = Numbers(False), Numbers(True)


def numbers(query: str) -> Numbers:
    """What ``?longs=`` asks for; no other parameter is known. Raises InvalidParameter."""
    return longs(parse_query(query, ("longs",))) if query else _AS_NUMBERS


def longs(parameters: dict[str, str]) -> Numbers:
    """What the parameter ``longs`` asks for. Raises InvalidParameter."""
    return _AS_STRINGS if one_of(parameters, "longs", ("number", "string"), "number") == "string" else _AS_NUMBERS


def parse_transaction_id(text: str) -> int:
    """The id in a path. Raises InvalidParameter."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS and 0 < int(text) < 1 << 63:
        return int(text)
    raise InvalidParameter(
        f"{text[:80]!r} is no transaction id", hint="ids are numbers above 0, as begin answered them"
    )


def refuse_body(body: bytes) -> None:
    """Raises for fields, of which these routes know none: ignoring one could break a promise its sender believes in."""
    if body.strip():
        fields_of(_small(body), {})


def _small(body: bytes) -> dict[str, Any]:
    """The object in a body that only says what to do. Raises BodyTooLarge, MalformedBody."""
    if len(body) > SMALL_BODY_BYTES:
        raise BodyTooLarge(f"a body here may have {SMALL_BODY_BYTES} bytes", hint="this route takes no messages")
    return parse_object(body)


def begun_answer(begun: Begun, as_number: Numbers) -> HttpAnswer:
    """A transaction with what its client needs."""
    transaction = begun.transaction
    return _json(
        {
            "id": as_number(transaction.transaction_id),
            "writePointer": as_number(transaction.write_pointer),
            "readPointer": as_number(transaction.read_pointer),
            "snapshot": b2a_base64(encode_transaction(transaction), newline=False).decode(),
            "expires": begun.expires_ms,
            "service": str(begun.service),
        }
    )


def _json(value: dict[str, Any]) -> HttpAnswer:
    return HttpAnswer(200, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), JSON.content_type)


def decided_answer(decision: Decision, as_number: Numbers) -> HttpAnswer:
    """What a transaction is now."""
    return _json({"id": as_number(decision.transaction_id), "state": decision.state})
