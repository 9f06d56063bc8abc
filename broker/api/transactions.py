"""The routes of the transaction service: begin, prepare, commit, abort, and what operators ask and change."""

from __future__ import annotations

import json
from binascii import b2a_base64
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.transactions import service_moved
from broker.api.dry_run import preview
from broker.api.route import SMALL_BODY_BYTES, json_answer, off_loop
from broker.http.messages import Answer, flag, one_of, parse_query, whole_number
from broker.security.guard import forbidden
from broker.security.identity import ANONYMOUS, Verb
from plainsong.protocol.codec import JSON
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.codec.json_values import fields_of, parse_object
from plainsong.protocol.errors import (
    BodyTooLarge,
    InvalidParameter,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionsUnavailable,
)
from plainsong.protocol.tephra.state import decode_transaction, encode_transaction
from plainsong.protocol.topic.asks import ListPointers
from plainsong.protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from actors.decisions import AskTopic
    from actors.pointers import PointerIndex
    from actors.transactions import TransactionService
    from broker.authority import Authority
    from broker.config.sections import TransactionsConfig
    from broker.http.messages import Request
    from broker.security.quotas import Quotas
    from plainsong.protocol.codec.json_values import Kind
    from plainsong.protocol.topic.asks import PointerView
    from plainsong.protocol.transactions.asks import Begun, Decision, PruningFigures, State, TransactionStatus

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


@dataclass(frozen=True, slots=True)
class TransactionRoutes:
    """The routes of the transaction service."""

    authority: Authority
    config: TransactionsConfig
    ask_topic: AskTopic
    pointers: PointerIndex
    quotas: Quotas | None = None
    """Of names; None: there are none."""

    async def begin(self, request: Request) -> Answer:
        """A new transaction; an empty body asks for a short one. Raises as ``TransactionService.begin``."""
        transactions, as_number = self.embedded(), numbers(request.query)
        given = fields_of(_small(request.body), _BEGIN) if request.body.strip() else {}
        given = {name: value for name, value in given.items() if value is not None}
        owner = None if request.who == ANONYMOUS else request.who.name
        if owner is not None and self.quotas is not None:
            self.quotas.check_open(request.who, transactions.open_of)
        return begun_answer(await transactions.begin(**given, owner=owner), as_number)

    async def prepare(self, request: Request) -> Answer:
        """What the transaction changed; conflicts are found here first. Raises as ``TransactionService.prepare``."""
        transactions, as_number = self.embedded(), numbers(request.query)
        transaction_id = self._own(request)
        given = await off_loop(len(request.body), JSON, partial(_changes, request.body))
        await transactions.prepare(transaction_id, given)
        return _json({"id": as_number(transaction_id), "state": "in_progress"})

    async def commit(self, request: Request) -> Answer:
        """Make all of it visible; asked again it says so again. Raises as ``TransactionService.commit``."""
        transactions, as_number = self.embedded(), numbers(request.query)
        refuse_body(request.body)
        return decided_answer(await transactions.commit(self._own(request)), as_number)

    async def abort(self, request: Request) -> Answer:
        """Roll back all of it; the state says what it came to. Raises as ``TransactionService.abort``."""
        transactions, (as_number, dry_run) = self.embedded(), _numbers_and_dry_run(request)
        refuse_body(request.body)
        transaction_id = self._own(request)
        if dry_run:
            return await self._preview(transaction_id, "transaction.abort", "aborted")
        return decided_answer(await transactions.abort(transaction_id), as_number)

    async def list_all(self, request: Request) -> Answer:
        """Transactions, oldest first: those in progress and invalid, or those of one state."""
        parameters = request.parameters("state", "limit", "longs")
        state: State | None = None
        if "state" in parameters:
            one_of(parameters, "state", _STATES, "")
            state = next(known for known in _STATES if known == parameters["state"])
        found = await self.embedded().listed(state, _limit(parameters))
        as_number = longs(parameters)
        return json_answer([_shown(_seen(status, request), as_number) for status in found])

    async def show(self, request: Request) -> Answer:
        """What is known of one transaction, also when it has been decided; of others the state is ``unknown``."""
        as_number = numbers(request.query)
        transaction_id = parse_transaction_id(request.path["transaction"])
        status = await self.embedded().look(transaction_id)
        return json_answer(
            {
                **_shown(_seen(status, request), as_number),
                "keptUntilMs": status.kept_until_ms,
                "service": str(status.service),
            }
        )

    async def invalidate(self, request: Request) -> Answer:
        """Hide it for ever, without waiting for any topic. Raises TransactionNotFound, TransactionNotInProgress."""
        as_number, dry_run = _numbers_and_dry_run(request)
        refuse_body(request.body)
        transaction_id = self._own(request)
        if dry_run:
            return await self._preview(transaction_id, "transaction.invalidate", "invalid")
        decision = await self.embedded().invalidate(transaction_id)
        return decided_answer(decision, as_number)

    async def checkpoint(self, request: Request) -> Answer:
        """A new write pointer for the same transaction. Raises TransactionNotFound, TransactionNotInProgress."""
        as_number = numbers(request.query)
        transaction_id = self._own(request)
        snapshot = request.fields(_CHECKPOINT).get("snapshot")
        transaction = None if snapshot is None else decode_transaction(snapshot)
        if transaction is not None and transaction.transaction_id != transaction_id:
            raise InvalidParameter("the snapshot is another transaction's", hint="send the one that begin answered")
        return begun_answer(await self.embedded().checkpoint(transaction_id, transaction), as_number)

    async def truncate(self, request: Request) -> Answer:
        """Take transactions off the invalid list, by id or by age, after rolling back what is left of them."""
        dry_run = flag(request.parameters("dryRun"), "dryRun")
        given = request.fields(_TRUNCATE)
        if len(given) != 1:
            raise InvalidParameter(
                "give ids or beforeMs, one of them", hint='for example {"ids": [1700000000000000000]}'
            )
        transactions = self.embedded()
        if dry_run:
            return await self._preview_truncate(transactions, given)
        if "ids" in given:
            return json_answer({"removed": await transactions.truncate(given["ids"])})
        return json_answer({"removed": await transactions.truncate_before(given["before_ms"])})

    async def _preview(self, transaction_id: int, action: str, becomes: State) -> Answer:
        """What rolling it back, or hiding it, would take from readers, and let them have.

        Raises:
          TransactionNotFound, TransactionNotInProgress: as the change itself.
        """
        status = await self.embedded().look(transaction_id)
        if status.state == "unknown":
            raise TransactionNotFound(f"transaction {status.transaction_id} is not known")
        if status.state not in ("in_progress", becomes):
            raise TransactionNotInProgress(f"transaction {status.transaction_id} is {status.state}")
        topics: list[dict[str, object]] = []
        hidden = 0
        for name in status.topics if status.state == "in_progress" else ():
            undecided = await self.ask_topic(name, ListPointers())
            mine = [each for each in undecided if each.pointer in status.pointers]
            topics.append({"topic": str(name), "messages": sum(each.messages for each in mine)})
            hidden += _released(undecided, mine)
        releases = {
            "heldPolls": sum(map(self.pointers.waiting, status.pointers)),
            "hiddenMessages": hidden,
        }
        before = {"state": status.state}
        effect = {"topics": topics, "releases": releases}
        return preview(action, str(status.transaction_id), before, {"state": becomes}, effect=effect)

    async def _preview_truncate(self, transactions: TransactionService, given: dict[str, Any]) -> Answer:
        invalid = set(transactions.invalids())
        if "ids" in given:
            gone = len(invalid.intersection(given["ids"]))
        else:
            gone = len(await transactions.invalid_before(given["before_ms"]))
        before, after = {"invalid": len(invalid)}, {"invalid": len(invalid) - gone}
        return preview("transaction.truncate", "service", before, after, effect={"removed": gone})

    async def pruning(self, request: Request) -> Answer:
        """What an operator needs for pruning the invalid list by hand, and why nothing is pruned by itself."""
        parameters = request.parameters("limit", "longs")
        limit, as_number = _limit(parameters), longs(parameters)
        invalids = self.authority.invalids
        if invalids is None:
            if self.authority.has_list:
                raise service_moved()
            invalids = self.embedded()
        figures = invalids.pruning()
        kept_because = figures.kept_because
        if self.config.thrift and self.config.prune:
            kept_because = "transactions.thrift is set: other stores may rely on the list"
        if not request.rights.on_service("inspect"):
            seen = {name: at for name, at in figures.oldest_by_topic.items() if request.rights.any_on_topic(*name)}
            figures = replace(figures, oldest_by_topic=seen)
        return json_answer({**_figures(figures, limit, as_number), "keptBecause": kept_because})

    def _own(self, request: Request) -> int:
        """The transaction in the path, which the name began that asks, or may end for others.

        Raises:
          InvalidParameter: it is no id. Forbidden: it is another's.
          TransactionsUnavailable, NoOwner: it is not known whose it is.
        """
        transaction_id = parse_transaction_id(request.path["transaction"])
        refuse_others(self.embedded(), request, transaction_id, "operate", "service")
        return transaction_id

    def embedded(self) -> TransactionService:
        """The daemon's own service.

        Raises:
          NoOwner: it is another instance's now. TransactionsUnavailable: there is none; the text says who decides.
        """
        if self.authority.embedded is not None:
            return self.authority.embedded
        if self.authority.routed is not None:
            raise service_moved()
        if self.config.service == "tephra":
            where = self.config.tephra
            raise TransactionsUnavailable("a Tephra decides here", hint=f"begin and end transactions at {where}")
        raise TransactionsUnavailable(
            "this daemon has no transaction service", hint='set transactions.service to "embedded"'
        )


def refuse_others(service: TransactionService, request: Request, pointer: int, verb: Verb, target: str) -> None:
    """Raises Forbidden when a pointer's transaction is another's, unless the name may ``operate`` on the service.

    One that nobody here remembers is nobody's: what is asked about it is answered as ever.
    """
    if request.who != ANONYMOUS and not request.rights.on_service("operate"):
        owner = service.owner_of(pointer)
        if owner not in ("", request.who.name):
            raise forbidden(request.who, verb, target)


def _seen(status: TransactionStatus, request: Request) -> TransactionStatus:
    """What the name may see of a transaction: all of its own, and of others' no client, and no topic of others."""
    if request.rights.on_service("inspect") or status.owner == request.who.name:
        return status
    topics = tuple(name for name in status.topics if request.rights.any_on_topic(*name))
    return replace(status, client_id=None, topics=topics)


def _changes(body: bytes) -> list[bytes]:
    given = fields_of(parse_object(body), _PREPARE) if body.strip() else {}
    changes: list[bytes] = given.get("changes", [])
    return changes


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


def begun_answer(begun: Begun, as_number: Numbers) -> Answer:
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


def _json(value: dict[str, Any]) -> Answer:
    return Answer(200, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), JSON.content_type)


def decided_answer(decision: Decision, as_number: Numbers) -> Answer:
    """What a transaction is now."""
    return _json({"id": as_number(decision.transaction_id), "state": decision.state})


def _limit(parameters: dict[str, str]) -> int:
    limit = whole_number(parameters, "limit")
    if limit is None:
        return DEFAULT_LIMIT
    if not 0 < limit <= MAX_LIMIT:
        raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
    return limit


def _numbers_and_dry_run(request: Request) -> tuple[Numbers, bool]:
    parameters = request.parameters("longs", "dryRun")
    return longs(parameters), flag(parameters, "dryRun")


def _released(undecided: Sequence[PointerView], mine: Sequence[PointerView]) -> int:
    """Messages of others that committed readers could have once these pointers are decided."""
    holders = [each for each in undecided if each.hidden and not each.rolled_back]
    hidden = max((each.hidden for each in holders), default=0)
    others = max((each.hidden for each in holders if each not in mine), default=0)
    return max(0, hidden - others - sum(each.messages for each in mine))


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
