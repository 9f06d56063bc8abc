"""The route table: every route that is not hot, once. The application serves it, the description describes it."""

from __future__ import annotations

from broker.views import (
    cluster,
    health,
    maintenance,
    many,
    messages,
    namespaces,
    offsets,
    producers,
    readers,
    stats,
    topics,
    transactions,
    upgrading,
)
from broker.views.description import describe_api
from broker.views.route import SMALL_BODY_BYTES, Route

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
    Route("stream", "GET", TOPIC + "/stream", upgrading.stream),
    Route("maintain", "POST", TOPIC + "/maintenance", maintenance.maintain),
    Route("list_readers", "GET", READERS, readers.list_all),
    Route("get_reader", "GET", READER, readers.show),
    Route("put_reader", "PUT", READER, readers.put, SMALL_BODY_BYTES),
    Route("delete_reader", "DELETE", READER, readers.remove),
    Route("list_producers", "GET", PRODUCERS, producers.list_page),
    Route("open_producer", "POST", PRODUCERS, producers.open_new, SMALL_BODY_BYTES),
    Route("open_producer_by_name", "PUT", PRODUCER, producers.open_named, SMALL_BODY_BYTES),
    Route("get_producer", "GET", PRODUCER, producers.show),
    Route("delete_producer", "DELETE", PRODUCER, producers.remove),
    Route("list_namespaces", "GET", "/v1/namespaces", namespaces.list_names),
    Route("get_namespace", "GET", NAMESPACE + "/properties", namespaces.show),
    Route("set_namespace", "PUT", NAMESPACE + "/properties", namespaces.put, SMALL_BODY_BYTES),
    Route("poll_many", "POST", NAMESPACE + "/poll", many.poll_many, many.MAX_BODY_BYTES),
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
