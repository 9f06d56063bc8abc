"""The route table: every route once, bound to its handler, each answer counted and logged.

The route table: every route that is not hot, once. The application serves it, the description describes it.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from broker.api import (
    cluster,
    health,
    messages,
    poll_many,
    producers,
    readers,
    stream,
    topic_stats,
    topics,
    transactions,
)
from broker.api import topic_stats as offsets
from broker.api import topic_stats as stats
from broker.api import topics as namespaces
from broker.api.openapi import describe_api
from broker.api.poll import poll
from broker.api.publish import publish, rollback, store
from broker.api.route import SMALL_BODY_BYTES, Route
from broker.api.transactions import abort, begin, commit, prepare
from broker.http.messages import only_plain, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from broker.http.messages import HotHandler, HotHandlers, HotRequest, HttpAnswer, Verb
    from broker.service import Service

NAMESPACE = "/v1/namespaces/{namespace}"
TOPICS = NAMESPACE + "/topics"
TOPIC = TOPICS + "/{topic}"
READERS = TOPIC + "/readers"
READER = READERS + "/{reader}"
PRODUCERS = TOPIC + "/producers"
PRODUCER = PRODUCERS + "/{producer}"
TRANSACTIONS = "/v1/transactions"
TRANSACTION = TRANSACTIONS + "/{transaction}"
CLUSTER = "/v1/cluster"
DRAIN = CLUSTER + "/instances/{instance}/drain"
PIN = CLUSTER + "/pins/{namespace}/{topic}"
ROUTES: tuple[Route, ...] = (
    Route("list_topics", "GET", TOPICS, topics.list_names),
    Route("create_topic", "PUT", TOPIC, topics.create, SMALL_BODY_BYTES),
    Route("get_topic", "GET", TOPIC, topics.show),
    Route("delete_topic", "DELETE", TOPIC, topics.remove),
    Route("set_properties", "PUT", TOPIC + "/properties", topics.set_properties, SMALL_BODY_BYTES),
    Route("undelete_topic", "POST", TOPIC + "/undelete", topics.undelete),
    Route("get_messages", "GET", TOPIC + "/messages", messages.messages),
    Route("get_stats", "GET", TOPIC + "/stats", stats.stats),
    Route("offsets", "POST", TOPIC + "/offsets", offsets.offsets, SMALL_BODY_BYTES),
    Route("stream", "GET", TOPIC + "/stream", stream.stream),
    Route("maintain", "POST", TOPIC + "/maintenance", topic_stats.maintain),
    Route("list_readers", "GET", READERS, readers.list_all),
    Route("get_reader", "GET", READER, readers.show),
    Route("put_reader", "PUT", READER, readers.put, SMALL_BODY_BYTES),
    Route("delete_reader", "DELETE", READER, readers.remove),
    Route("list_producers", "GET", PRODUCERS, producers.list_page),
    Route("open_producer", "POST", PRODUCERS, producers.open_new, SMALL_BODY_BYTES),
    Route("open_producer_by_name", "PUT", PRODUCER, producers.open_named, SMALL_BODY_BYTES),
    Route("get_producer", "GET", PRODUCER, producers.show),
    Route("delete_producer", "DELETE", PRODUCER, producers.remove),
    Route("list_namespaces", "GET", "/v1/namespaces", namespaces.list_namespaces),
    Route("get_namespace", "GET", NAMESPACE + "/properties", namespaces.show_namespace),
    Route("set_namespace", "PUT", NAMESPACE + "/properties", namespaces.put_namespace, SMALL_BODY_BYTES),
    Route("poll_many", "POST", NAMESPACE + "/poll", poll_many.poll_many, poll_many.MAX_BODY_BYTES),
    Route("list_transactions", "GET", TRANSACTIONS, transactions.list_all),
    Route("get_pruning", "GET", TRANSACTIONS + "/pruning", transactions.pruning),
    Route("truncate", "POST", TRANSACTIONS + "/truncate", transactions.truncate, transactions.MAX_TRUNCATE_BYTES),
    Route("get_transaction", "GET", TRANSACTION, transactions.show),
    Route("invalidate", "POST", TRANSACTION + "/invalidate", transactions.invalidate, SMALL_BODY_BYTES),
    Route(
        "checkpoint", "POST", TRANSACTION + "/checkpoint", transactions.checkpoint, transactions.MAX_SNAPSHOT_BODY_BYTES
    ),
    Route("get_cluster", "GET", CLUSTER, cluster.show),
    Route("drain_instance", "PUT", DRAIN, cluster.drain),
    Route("undrain_instance", "DELETE", DRAIN, cluster.undrain),
    Route("pin_topic", "PUT", PIN, cluster.pin, SMALL_BODY_BYTES),
    Route("unpin_topic", "DELETE", PIN, cluster.unpin),
    Route("ping", "GET", "/ping", health.ping),
    Route("livez", "GET", "/livez", health.livez),
    Route("readyz", "GET", "/readyz", health.readyz),
    Route("metrics", "GET", "/metrics", health.metrics),
    Route("version", "GET", "/version", health.version),
    Route("openapi", "GET", "/openapi.json", describe_api),
)


# --- measured --------------------------------------------------------------------------------------
#
# Counting a hot route's answers, whatever they are, and logging them when asked to.


if TYPE_CHECKING:
    Headers = Sequence[tuple[str, str]]


def measured(verb: Verb, service: Service, handler: HotHandler) -> HotHandler:
    """``handler``, with each answer's status and time counted under ``verb``."""
    requested, access = service.metrics.requested, service.access

    def account(request: HotRequest, status: int, seconds: float, headers: Headers = ()) -> None:
        requested(verb, status, seconds)
        access.answered(verb, _target(request), status, seconds, headers)

    async def counted(request: HotRequest) -> HttpAnswer:
        begun_s = perf_counter()
        access.begin(request.request_id)
        try:
            answer = await handler(request)
        except Exception as error:
            plain = only_plain(error)
            account(request, 500 if plain is None else status_of(plain), perf_counter() - begun_s)
            raise
        account(request, answer.status, perf_counter() - begun_s, answer.headers)
        return answer

    return counted


def _target(request: HotRequest) -> str:
    return f"{request.namespace}:{request.topic}" if request.topic else request.transaction


# --- table -----------------------------------------------------------------------------------------
#
# The hot routes' handlers by verb: as they answer here, and as the doors call them.


def local_handlers(service: Service) -> HotHandlers:
    """The functions that answer the hot routes, at the owner of what they are about."""
    handlers: dict[Verb, Callable[[Service, HotRequest], Awaitable[HttpAnswer]]] = {
        "publish": publish,
        "poll": poll,
        "store": store,
        "rollback": rollback,
        "begin": begin,
        "prepare": prepare,
        "commit": commit,
        "abort": abort,
    }
    return {verb: partial(handler, service) for verb, handler in handlers.items()}


def hot_handlers(service: Service) -> HotHandlers:
    """The functions behind both doors: they answer wherever the owner is, and are counted here."""
    handlers, cluster = local_handlers(service), service.cluster
    if cluster is not None:
        handlers = {verb: cluster.forwarding.hot(handler) for verb, handler in handlers.items()}
    return {verb: measured(verb, service, handler) for verb, handler in handlers.items()}
