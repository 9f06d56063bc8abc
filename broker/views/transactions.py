"""The transaction service for those who look after it: who is open, what became of one, and the invalid list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.actor import service_moved
from broker.handlers.query import one_of, whole_number
from broker.handlers.transactions import (
    begun_answer,
    decided_answer,
    embedded,
    longs,
    numbers,
    parse_transaction_id,
    refuse_body,
)
from broker.views.route import json_answer
from protocol.codec import json_values as values
from protocol.errors import InvalidParameter
from protocol.transactions.codec import decode_transaction

if TYPE_CHECKING:
    from broker.handlers.transactions import Numbers
    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest
    from protocol.transactions.manager.answers import PruningFigures, State, TransactionStatus

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
