"""The routes of a cluster, described."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.openapi.errors import ANY, BODY
from broker.openapi.operation import Operation
from broker.openapi.schemas import BOOLEAN, COUNT, MILLISECONDS, POSITIVE, STRING, array, nullable, record, ref

if TYPE_CHECKING:
    from broker.openapi.schemas import Schema

CLUSTER = "/v1/cluster"
DRAIN = CLUSTER + "/instances/{instance}/drain"
PIN = CLUSTER + "/pins/{namespace}/{topic}"

_CHANGES = (*ANY, "invalid_name", "conflict", "cluster_unavailable")

CLUSTER_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "get_cluster",
        "GET",
        CLUSTER,
        "cluster",
        "The instances and what is pinned, as the one that is asked sees it.",
        (*ANY, "invalid_name"),
        ("topic",),
        answer=ref("Cluster"),
    ),
    Operation(
        "drain_instance",
        "PUT",
        DRAIN,
        "cluster",
        "Give all topics of an instance to the others.",
        (*_CHANGES, "not_found"),
        answer=ref("Drained"),
    ),
    Operation(
        "undrain_instance",
        "DELETE",
        DRAIN,
        "cluster",
        "Let an instance have its share of the topics again.",
        _CHANGES,
        answer=ref("Drained"),
    ),
    Operation(
        "pin_topic",
        "PUT",
        PIN,
        "cluster",
        "Keep a topic at an instance, as long as that is there.",
        (*_CHANGES, *BODY, "unknown_field"),
        body=record("instance", instance=STRING),
        answer=ref("Pinned"),
    ),
    Operation(
        "unpin_topic",
        "DELETE",
        PIN,
        "cluster",
        "Let a topic be where its name says.",
        _CHANGES,
        answer=ref("Pinned"),
    ),
)

CLUSTER_SCHEMAS: dict[str, Schema] = {
    "Cluster": record(
        "instance address zookeeper instances pins transactions topic",
        instance=STRING,
        address=STRING,
        zookeeper=nullable(record("connected since", connected=BOOLEAN, since=MILLISECONDS)),
        instances=array(ref("Instance")),
        pins={"type": "object", "additionalProperties": STRING},
        transactions=nullable(STRING),
        topic=nullable(record("name owner pinned", name=STRING, owner=nullable(STRING), pinned=nullable(STRING))),
    ),
    "Instance": record(
        "name address weight leaving drained slices topicsOpen",
        name=STRING,
        address=STRING,
        weight=POSITIVE,
        leaving=BOOLEAN,
        drained=BOOLEAN,
        slices=COUNT,
        topicsOpen=nullable(COUNT),
    ),
    "Drained": record("instance drained", instance=STRING, drained=BOOLEAN),
    "Pinned": record("topic instance", topic=STRING, instance=nullable(STRING)),
}
