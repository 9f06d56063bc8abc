"""The routes of the transaction service: begin, prepare, commit, abort, and what operators ask and change.

The transaction service's hot routes: begin, prepare, commit and abort, with what all its routes have in common.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.transactions import service_moved
from broker.api.route import json_answer, off_loop
from broker.http.messages import HttpAnswer, one_of, parse_query, whole_number
from plainsong.protocol.codec import JSON
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.codec.json_values import fields_of, parse_object
from plainsong.protocol.errors import BodyTooLarge, InvalidParameter, TransactionsUnavailable
from plainsong.protocol.tephra.state import decode_transaction, encode_transaction
from plainsong.protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.transactions import TransactionService
    from broker.http.messages import HotRequest, ViewRequest
    from broker.service import Service
    from plainsong.protocol.codec.json_values import Kind
    from plainsong.protocol.transactions.asks import Begun, Decision, PruningFigures, State, TransactionStatus

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
    if service.decider.routed is not None:
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


# --- transactions ----------------------------------------------------------------------------------
#
# The transaction service for those who look after it: who is open, what became of one, and the invalid list.


#: Room for some ten thousand ids.
MAX_TRUNCATE_BYTES = 256 << 10
#: Room for the snapshot of a transaction that others crowd around.
MAX_SNAPSHOT_BODY_BYTES = 16 << 20
DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
_STATES: tuple[State, ...] = ("in_progress", "invalid", "committed", "aborted")
_TRUNCATE = {
    "ids": ("ids", values.list_of(values.pointer)),
    "beforeMs": ("before_ms", values.int64),
}
_CHECKPOINT = {"snapshot": ("snapshot", values.nullable(values.binary))}


async def list_all(service: Service, request: ViewRequest) -> HttpAnswer:
    """Transactions, oldest first: those in progress and invalid, or those of one state."""
    parameters = request.parameters("state", "limit", "longs")
    state: State | None = None
    if "state" in parameters:
        one_of(parameters, "state", _STATES, "")
        state = next(known for known in _STATES if known == parameters["state"])
    found = await embedded(service).listed(state, _limit(parameters))
    as_number = longs(parameters)
    return json_answer([_shown(status, as_number) for status in found])


def _limit(parameters: dict[str, str]) -> int:
    limit = whole_number(parameters, "limit")
    if limit is None:
        return DEFAULT_LIMIT
    if not 0 < limit <= MAX_LIMIT:
        raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
    return limit


async def show(service: Service, request: ViewRequest) -> HttpAnswer:
    """What is known of one transaction, also when it has been decided; of others the state is ``unknown``."""
    as_number = numbers(request.query)
    transaction_id = parse_transaction_id(request.path["transaction"])
    status = await embedded(service).look(transaction_id)
    return json_answer(
        {**_shown(status, as_number), "keptUntilMs": status.kept_until_ms, "service": str(status.service)}
    )


def _shown(status: TransactionStatus, as_number: Numbers) -> dict[str, Any]:
    known = status.type is not None
    return {
        "id": as_number(status.transaction_id),
        "writePointer": as_number(status.write_pointer),
        "type": None if status.type is None else status.type.name.lower(),
        "clientId": status.client_id if known else None,
        "state": status.state,
        "startedMs": status.started_ms if known else None,
        "expiresMs": status.expires_ms if known else None,
        "decidedMs": status.decided_ms,
        "topics": [str(name) for name in status.topics],
        "hiddenMessages": status.hidden_messages,
    }


async def invalidate(service: Service, request: ViewRequest) -> HttpAnswer:
    """Hide it for ever, without waiting for any topic. Raises TransactionNotFound, TransactionNotInProgress."""
    as_number = numbers(request.query)
    refuse_body(request.body)
    decision = await embedded(service).invalidate(parse_transaction_id(request.path["transaction"]))
    return decided_answer(decision, as_number)


async def checkpoint(service: Service, request: ViewRequest) -> HttpAnswer:
    """A new write pointer for the same transaction. Raises TransactionNotFound, TransactionNotInProgress."""
    as_number = numbers(request.query)
    snapshot = request.fields(_CHECKPOINT).get("snapshot")
    transaction = None if snapshot is None else decode_transaction(snapshot)
    transaction_id = parse_transaction_id(request.path["transaction"])
    if transaction is not None and transaction.transaction_id != transaction_id:
        raise InvalidParameter("the snapshot is another transaction's", hint="send the one that begin answered")
    return begun_answer(await embedded(service).checkpoint(transaction_id, transaction), as_number)


async def truncate(service: Service, request: ViewRequest) -> HttpAnswer:
    """Take transactions off the invalid list, by id or by age, after rolling back what is left of them."""
    request.parameters()
    given = request.fields(_TRUNCATE)
    if len(given) != 1:
        raise InvalidParameter("give ids or beforeMs, one of them", hint='for example {"ids": [1700000000000000000]}')
    transactions = embedded(service)
    if "ids" in given:
        return json_answer({"removed": await transactions.truncate(given["ids"])})
    return json_answer({"removed": await transactions.truncate_before(given["before_ms"])})


async def pruning(service: Service, request: ViewRequest) -> HttpAnswer:
    """What an operator needs for pruning the invalid list by hand, and why nothing is pruned by itself."""
    parameters = request.parameters("limit", "longs")
    limit, as_number = _limit(parameters), longs(parameters)
    invalids = service.decider.invalids
    if invalids is None:
        if service.decider.has_list:
            raise service_moved()
        invalids = embedded(service)
    figures = invalids.pruning()
    kept_because = figures.kept_because
    if service.config.transactions.thrift and service.config.transactions.prune:
        kept_because = "transactions.thrift is set: other stores may rely on the list"
    return json_answer({**_figures(figures, limit, as_number), "keptBecause": kept_because})


def _figures(figures: PruningFigures, limit: int, as_number: Numbers) -> dict[str, Any]:
    oldest = sorted((pointer, str(name)) for name, pointer in figures.oldest_by_topic.items())
    return {
        "invalid": figures.invalid,
        "oldestInvalid": None if figures.oldest_invalid is None else as_number(figures.oldest_invalid),
        "safeBound": None if figures.safe_bound is None else as_number(figures.safe_bound),
        "lastPassMs": figures.last_pass_ms,
        "maxLifetimeMs": figures.max_lifetime_ms,
        "topics": len(oldest),
        "oldestByTopic": [{"topic": name, "oldestPointer": as_number(pointer)} for pointer, name in oldest[:limit]],
    }
