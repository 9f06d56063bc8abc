"""The routes of the transaction service: begin, prepare, commit, abort, and the routes for operators."""

from __future__ import annotations

from binascii import b2a_base64
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import trio

from actors.mailbox import Prepared
from actors.transaction_actor import service_moved
from broker.api.answers import LOOP_BYTES, json_answer, off_loop
from broker.api.change import change_answer
from broker.http.budgets import SMALL_BODY_BYTES
from broker.http.handlers import rendered
from broker.http.messages import Answer, flag, one_of, parse_query, wants_representation, whole_number
from broker.security.guard import forbidden
from broker.security.identity import ANONYMOUS
from plainsong.protocol.codec import JSON
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.codec.json_values import fields_of, parse_object
from plainsong.protocol.errors import (
    BodyTooLarge,
    InvalidParameter,
    PlainsongError,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionsUnavailable,
)
from plainsong.protocol.tephra.state import decode_transaction, encode_transaction
from plainsong.protocol.topic.asks import ListPointers
from plainsong.protocol.transactions.asks import Abort, Begin, Checkpoint, Commit, Prepare
from plainsong.protocol.transactions.transaction import STATES, TransactionType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from actors.decisions import AskTopic
    from actors.pointers import PointerIndex
    from actors.transactions import TransactionService
    from broker.authority import Authority
    from broker.config.sections import TransactionsConfig
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answered, Request
    from broker.security.quotas import Quotas
    from plainsong.protocol.answers.transactions import (
        BegunTransaction,
        DecidedTransaction,
        PruningFields,
        TransactionOutcome,
        TransactionRow,
    )
    from plainsong.protocol.codec.json_values import Kind
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import PointerView
    from plainsong.protocol.transactions.asks import Begun, Decision, PruningFigures, State, TransactionStatus

#: Pointers have 63 bits.
MAX_ID_DIGITS = 19
_TYPES = {"short": TransactionType.SHORT, "long": TransactionType.LONG}
_SHOWN_TYPES: Mapping[TransactionType, Literal["short", "long"]] = {
    TransactionType.SHORT: "short",
    TransactionType.LONG: "long",
}


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
#: Room for the snapshot of a transaction with very many concurrent ones.
MAX_SNAPSHOT_BODY_BYTES = 16 << 20
DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
_TRUNCATE = {
    "ids": ("ids", values.list_of(values.pointer)),
    "beforeMs": ("before_ms", values.int64),
}
#: Time limit for topics to report the effect of ending a transaction, and how many are asked at once.
COUNT_TIMEOUT_S = 2.0
_TOPICS_AT_ONCE = 16
_CHECKPOINT = {"snapshot": ("snapshot", values.nullable(values.binary))}


@dataclass(frozen=True, slots=True)
class TransactionRoutes:
    """The routes of the transaction service."""

    authority: Authority
    config: TransactionsConfig
    ask_topic: AskTopic
    pointers: PointerIndex
    tasks: RequestTasks
    quotas: Quotas | None = None
    """Quotas of names; None if there are none."""

    def begin(self, request: Request, answered: Answered) -> None:
        """Begin a transaction, a short one by default. Answers with the errors of ``asks.Begin``."""
        transactions, as_number = self.embedded(), numbers(request.query)
        given = fields_of(_small(request.body), _BEGIN) if request.body.strip() else {}
        given = {name: value for name, value in given.items() if value is not None}
        owner = None if request.who == ANONYMOUS else request.who.name
        if owner is not None and self.quotas is not None:
            self.quotas.check_begin(request.who, transactions.open_of)
        render = partial(begun_answer, as_number=as_number)
        self._put(transactions, Begin(**given, owner=owner), request, render, answered)

    def prepare(self, request: Request, answered: Answered) -> None:
        """Record the changes and check for conflicts. Answers with the errors of ``asks.Prepare``."""
        transactions, as_number = self.embedded(), numbers(request.query)
        transaction_id = own_transaction(transactions, request)
        if len(request.body) > LOOP_BYTES:
            self.tasks.run(self._read_and_prepare, request, answered)
            return
        changes = _changes(request.body)
        ask = Prepare(transaction_id, changes, sum(map(len, changes)))
        self._put(transactions, ask, request, lambda _: _decided(transaction_id, "in_progress", as_number), answered)

    async def _read_and_prepare(self, request: Request) -> Answer:
        """Decode a large body in a thread, then prepare."""
        changes = await off_loop(len(request.body), JSON, partial(_changes, request.body))
        transactions, as_number = self.embedded(), numbers(request.query)
        transaction_id = own_transaction(transactions, request)
        await transactions.ask(Prepare(transaction_id, changes, sum(map(len, changes))))
        return _decided(transaction_id, "in_progress", as_number)

    def commit(self, request: Request, answered: Answered) -> None:
        """Commit; idempotent. Answers with the errors of ``asks.Commit``."""
        self._decide(Commit, request, answered)

    def abort(self, request: Request, answered: Answered) -> None:
        """Abort; the answer's state is the outcome. Answers with the errors of ``TransactionService.abort``."""
        if "dryRun" in request.query or wants_representation(request.headers.get("prefer", "")):
            self.tasks.run(self._abort_and_say, request, answered)
            return
        self._decide(Abort, request, answered)

    def _decide(self, ask: type[Commit] | type[Abort], request: Request, answered: Answered) -> None:
        transactions, as_number = self.embedded(), numbers(request.query)
        refuse_body(request.body)
        render = partial(decided_answer, as_number=as_number)
        self._put(transactions, ask(own_transaction(transactions, request)), request, render, answered)

    async def _abort_and_say(self, request: Request) -> Answer:
        return await self._end(request, "transaction.abort", "aborted", self.embedded().abort)

    def _put(
        self,
        transactions: TransactionService,
        ask: Ask[Any],
        request: Request,
        render: Callable[[Any], Answer],
        answered: Answered,
    ) -> None:
        """Ask the service; ``render`` makes the answer of its result. Raises the same as ``Mailbox.put``."""
        answer = Prepared(partial(rendered, request, render), answered)
        if transactions.has_loaded:
            transactions.put(ask, answer.settled, answer.prepare)
        else:
            self.tasks.settle(partial(transactions.ask, ask), answer.settled)

    async def list_all(self, request: Request) -> Answer:
        """List transactions, oldest first: in progress and invalid, or those of one state."""
        parameters = request.parameters("state", "limit", "after", "longs")
        after = 0 if "after" not in parameters else parse_transaction_id(parameters["after"])
        state: State | None = None
        if "state" in parameters:
            one_of(parameters, "state", STATES, "")
            state = next(known for known in STATES if known == parameters["state"])
        found = await self.embedded().listed(state, _limit(parameters), after, partial(_sees, request))
        as_number = longs(parameters)
        return json_answer([_shown(_seen(status, request), as_number) for status in found])

    async def show(self, request: Request) -> Answer:
        """Show a transaction, even a decided one. Once it is no longer remembered, its state is ``unknown``."""
        as_number = numbers(request.query)
        transaction_id = parse_transaction_id(request.path["transaction"])
        status = await self.embedded().look(transaction_id, partial(_sees, request))
        shown: TransactionOutcome = {
            **_shown(_seen(status, request), as_number),
            "keptUntilMs": status.kept_until_ms,
            "service": str(status.service),
        }
        return json_answer(shown)

    async def invalidate(self, request: Request) -> Answer:
        """Hide it forever, without waiting for topics to act. Raises TransactionNotFound, TransactionNotInProgress."""
        return await self._end(request, "transaction.invalidate", "invalid", self.embedded().invalidate)

    def checkpoint(self, request: Request, answered: Answered) -> None:
        """Add a write pointer to the transaction. Answers with TransactionNotFound, TransactionNotInProgress."""
        as_number, transactions = numbers(request.query), self.embedded()
        transaction_id = own_transaction(transactions, request)
        snapshot = request.fields(_CHECKPOINT).get("snapshot")
        transaction = None if snapshot is None else decode_transaction(snapshot)
        if transaction is not None and transaction.transaction_id != transaction_id:
            raise InvalidParameter(
                "the snapshot belongs to another transaction", hint="send the snapshot that begin returned"
            )
        ask = Checkpoint(transaction_id, transaction)
        self._put(transactions, ask, request, partial(begun_answer, as_number=as_number), answered)

    async def truncate(self, request: Request) -> Answer:
        """Remove transactions from the invalid list, by id or by age, after rolling back their remaining messages."""
        dry_run = flag(request.parameters("dryRun"), "dryRun")
        given = request.fields(_TRUNCATE)
        if len(given) != 1:
            raise InvalidParameter("give either ids or beforeMs", hint='for example {"ids": [1700000000000000000]}')
        transactions = self.embedded()
        invalid = set(transactions.invalids())
        if "ids" in given:
            wanted = sorted({each for pointer in given["ids"] for each in transactions.pointers_of(pointer)})
        else:
            wanted = list(await transactions.invalid_before(given["before_ms"]))
        gone = len(invalid.intersection(wanted)) if dry_run else await transactions.truncate(wanted)
        before, after = {"invalid": len(invalid)}, {"invalid": len(invalid) - gone}
        return change_answer(
            "transaction.truncate",
            "service",
            before,
            after,
            dry_run=dry_run,
            effect={"removed": gone},
            more=None if dry_run else {"removed": gone},
        )

    async def _end(
        self, request: Request, action: str, becomes: State, decide: Callable[[int], Awaitable[Decision]]
    ) -> Answer:
        """End a transaction; with ``dryRun`` only report which messages it would remove and which it would release.

        With ``Prefer: return=representation`` the change itself reports them too. That is not the default, since
        programs abort their own transactions all the time, and counting asks every topic involved.
        """
        parameters = request.parameters("longs", "dryRun")
        as_number, dry_run = longs(parameters), flag(parameters, "dryRun")
        refuse_body(request.body)
        transaction_id = own_transaction(self.embedded(), request)
        if not dry_run and not wants_representation(request.headers.get("prefer", "")):
            return decided_answer(await decide(transaction_id), as_number)
        status = await self.embedded().look(transaction_id)
        if dry_run:
            becomes = _becomes(status, becomes)
        effect, warnings = await self._effect(status)
        ended = None if dry_run else await decide(transaction_id)
        return change_answer(
            action,
            str(status.transaction_id),
            {"state": status.state},
            {"state": becomes if ended is None else ended.state},
            dry_run=dry_run,
            effect=effect,
            warnings=warnings,
            more=None if ended is None else {"id": as_number(ended.transaction_id), "state": ended.state},
        )

    async def _effect(self, status: TransactionStatus) -> tuple[dict[str, Any], list[str]]:
        """Return what the end of a transaction removes and releases, and warnings for topics that were not counted."""
        found: dict[TopicName, tuple[int, int]] = {}
        limit = trio.CapacityLimiter(_TOPICS_AT_ONCE)

        async def count(name: TopicName) -> None:
            async with limit:
                try:
                    undecided = await self.ask_topic(name, ListPointers())
                except PlainsongError:
                    return  # deleted, or unavailable
            mine = [each for each in undecided if each.pointer in status.pointers]
            found[name] = sum(each.messages for each in mine), _released(undecided, mine)

        names = status.topics if status.state == "in_progress" else ()
        with trio.move_on_after(COUNT_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(count, name)
        effect = {
            "topics": [{"topic": str(each), "messages": found[each][0] if each in found else None} for each in names],
            "releases": {
                "heldPolls": sum(map(self.pointers.waiting, status.pointers)),
                "hiddenMessages": sum(hidden for _, hidden in found.values()),
            },
        }
        return effect, [f"{each} does not answer: its messages are not counted" for each in names if each not in found]

    async def pruning(self, request: Request) -> Answer:
        """Return the figures for pruning the invalid list by hand, and why it is not pruned automatically."""
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
        return json_answer(_figures(figures, limit, as_number, kept_because))

    def embedded(self) -> TransactionService:
        """Return the daemon's own service.

        Raises:
          NoOwner: another instance runs it.
          TransactionsUnavailable: the daemon has none; the error names the service that decides transactions.
        """
        embedded = self.authority.embedded
        if embedded is not None:
            return embedded
        if self.authority.routed is not None:
            raise service_moved()
        if self.config.service == "tephra":
            where = self.config.tephra
            raise TransactionsUnavailable("transactions are decided by Tephra", hint=f"begin and end them at {where}")
        raise TransactionsUnavailable(
            "this daemon has no transaction service", hint='set transactions.service to "embedded"'
        )


def own_transaction(service: TransactionService, request: Request) -> int:
    """Return the id of the transaction in the path, if the client began it or may end others' transactions.

    Any of its pointers will do: a held reader reports the pointer that holds it, perhaps a checkpoint's.

    Raises:
      InvalidParameter: it is not an id. Forbidden: the transaction was begun by another name.
      TransactionsUnavailable: its owner cannot be determined.
    """
    transaction_id = service.id_of(parse_transaction_id(request.path["transaction"]))
    if (
        request.who != ANONYMOUS
        and not request.rights.on_service("operate")
        and service.owner_of(transaction_id) not in ("", request.who.name)  # it has none if it is not remembered
    ):
        raise forbidden(request.who, "operate", "service")
    return transaction_id


def _seen(status: TransactionStatus, request: Request) -> TransactionStatus:
    """Remove the client id and the name from another's transaction, unless the requester may inspect the service."""
    if _is_shown(request, status):
        return status
    return replace(status, client_id=None, owner=None)


def _is_shown(request: Request, status: TransactionStatus) -> bool:
    return request.rights.on_service("inspect") or status.owner == request.who.name


def _sees(request: Request, status: TransactionStatus, name: TopicName) -> bool:
    """True if the client may see that a transaction has messages in a topic, and how many they hide."""
    return _is_shown(request, status) or request.rights.any_on_topic(*name)


def _changes(body: bytes) -> list[bytes]:
    given = fields_of(parse_object(body), _PREPARE) if body.strip() else {}
    changes: list[bytes] = given.get("changes", [])
    return changes


#: The format of write pointers in an answer, as JSON values.
Numbers: TypeAlias = type[int] | type[str]


def numbers(query: str) -> Numbers:
    """Parse a query that may have only ``longs``. Raises InvalidParameter."""
    return longs(parse_query(query, ("longs",))) if query else int


def longs(parameters: dict[str, str]) -> Numbers:
    """Return the format that the parameter ``longs`` asks for. Raises InvalidParameter."""
    return str if one_of(parameters, "longs", ("number", "string"), "number") == "string" else int


def parse_transaction_id(text: str) -> int:
    """Parse the id in a path. Raises InvalidParameter."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS and 0 < int(text) < 1 << 63:
        return int(text)
    raise InvalidParameter(
        f"{text[:80]!r} is not a transaction id", hint="use the id that begin returned: a number above 0"
    )


def refuse_body(body: bytes) -> None:
    """Raises for any field in the body: ignoring one could break a guarantee that the client relies on."""
    if body.strip():
        fields_of(_small(body), {})


def _small(body: bytes) -> dict[str, Any]:
    """Parse the object in a short body. Raises BodyTooLarge, MalformedBody."""
    if len(body) > SMALL_BODY_BYTES:
        raise BodyTooLarge(
            f"bodies of this route are limited to {SMALL_BODY_BYTES} bytes", hint="this route accepts no messages"
        )
    return parse_object(body)


def begun_answer(begun: Begun, as_number: Numbers) -> Answer:
    """Return the answer to begin and checkpoint."""
    transaction = begun.transaction
    shown: BegunTransaction = {
        "id": as_number(transaction.transaction_id),
        "writePointer": as_number(transaction.write_pointer),
        "readPointer": as_number(transaction.read_pointer),
        "snapshot": b2a_base64(encode_transaction(transaction), newline=False).decode(),
        "expires": begun.expires_ms,
        "service": str(begun.service),
    }
    return json_answer(shown)


def decided_answer(decision: Decision, as_number: Numbers) -> Answer:
    """Return the answer with a transaction's new state."""
    return _decided(decision.transaction_id, decision.state, as_number)


def _decided(transaction_id: int, state: State, as_number: Numbers) -> Answer:
    shown: DecidedTransaction = {"id": as_number(transaction_id), "state": state}
    return json_answer(shown)


def _limit(parameters: dict[str, str]) -> int:
    limit = whole_number(parameters, "limit")
    if limit is None:
        return DEFAULT_LIMIT
    if not 0 < limit <= MAX_LIMIT:
        raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
    return limit


def _becomes(status: TransactionStatus, wanted: State) -> State:
    """Return the state of a transaction after an abort or an invalidation.

    Raises:
      TransactionNotFound, TransactionNotInProgress: for the same reasons as the change itself.
    """
    if status.state == "unknown":
        raise TransactionNotFound(f"transaction {status.transaction_id} is not known")
    if status.state == "committed" or (status.state == "aborted" and wanted != "aborted"):
        raise TransactionNotInProgress(f"transaction {status.transaction_id} is {status.state}")
    # Long transactions stay on the invalid list, as in Tephra.
    return "invalid" if status.type is TransactionType.LONG and status.state != "aborted" else wanted


def _released(undecided: Sequence[PointerView], mine: Sequence[PointerView]) -> int:
    """Return how many other messages become readable to committed readers once these pointers are decided."""
    holders = [each for each in undecided if each.hidden and not each.rolled_back]
    hidden = max((each.hidden for each in holders), default=0)
    others = max((each.hidden for each in holders if each not in mine), default=0)
    return max(0, hidden - others - sum(each.messages for each in mine))


def _shown(status: TransactionStatus, as_number: Numbers) -> TransactionRow:
    known = status.type is not None
    shown: TransactionRow = {
        "id": as_number(status.transaction_id),
        "writePointer": as_number(status.write_pointer),
        "type": None if status.type is None else _SHOWN_TYPES[status.type],
        "clientId": status.client_id if known else None,
        "state": status.state,
        "startedMs": status.started_ms if known else None,
        "expiresMs": status.expires_ms if known else None,
        "decidedMs": status.decided_ms,
        "topics": [str(name) for name in status.topics],
        "hiddenMessages": status.hidden_messages,
    }
    if status.owner is not None:
        shown["name"] = status.owner
    return shown


def _figures(figures: PruningFigures, limit: int, as_number: Numbers, kept_because: str | None) -> PruningFields:
    oldest = sorted((pointer, str(name)) for name, pointer in figures.oldest_by_topic.items())
    return {
        "invalid": figures.invalid,
        "oldestInvalid": None if figures.oldest_invalid is None else as_number(figures.oldest_invalid),
        "safeBound": None if figures.safe_bound is None else as_number(figures.safe_bound),
        "lastPassMs": figures.last_pass_ms,
        "maxLifetimeMs": figures.max_lifetime_ms,
        "topics": len(oldest),
        "oldestByTopic": [{"topic": name, "oldestPointer": as_number(pointer)} for pointer, name in oldest[:limit]],
        "keptBecause": kept_because,
    }
