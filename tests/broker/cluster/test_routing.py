"""Which route goes where, said once for each of them."""

from __future__ import annotations

import pytest

from broker.api.route import NAMESPACES, TRANSACTIONS, only_looks, owned_name, owned_name_of_hot, place_of
from broker.api.routes import ROUTES
from broker.http.messages import HOT_PATHS, TOPIC_VERBS, HotRequest
from plainsong.protocol.names import TopicName

HERE = {
    *("list_topics", "list_namespaces", "get_namespace", "stream"),
    *("ping", "livez", "readyz", "metrics", "version", "openapi"),
}
OF_THE_SERVICE = {"list_transactions", "get_pruning", "truncate", "get_transaction", "invalidate", "checkpoint"}


def expected(route):
    if route.name in HERE or route.path.startswith("/v1/cluster"):
        return "here"
    if route.name in OF_THE_SERVICE:
        return "transactions"
    return {"set_namespace": "namespaces", "poll_many": "topics"}.get(route.name, "topic")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_has_its_place(route):
    assert place_of(route) == expected(route)
    assert ("{topic}" in route.path) >= (place_of(route) == "topic")


def test_the_owner_of_a_topic_answers_for_it_before_it_exists():
    create = next(route for route in ROUTES if route.name == "create_topic")
    assert owned_name(place_of(create), {"namespace": "ns", "topic": "t"}) == TopicName("ns", "t")


def test_a_name_that_cannot_be_is_refused_by_whoever_got_it():
    assert owned_name("topic", {"namespace": "ns", "topic": "no topic"}) is None
    assert owned_name_of_hot(HotRequest("publish", "", "transactions", "", {}, b"", "id")) is None


@pytest.mark.parametrize("verb", HOT_PATHS)
def test_hot_routes_go_to_the_owner_of_the_topic_or_of_the_transactions(verb):
    request = HotRequest(verb, "ns", "t", "", {}, b"", "id")
    assert owned_name_of_hot(request) == (TopicName("ns", "t") if verb in TOPIC_VERBS else TRANSACTIONS)


def test_services_have_names_that_no_topic_can_have():
    assert owned_name("transactions", {}) == TRANSACTIONS
    assert owned_name("namespaces", {"namespace": "ns"}) == NAMESPACES
    assert TRANSACTIONS.namespace == NAMESPACES.namespace == ""


def test_only_what_merely_looks_is_asked_again_after_a_doubt():
    looking = {route.name for route in ROUTES if only_looks(route)}
    assert {"get_topic", "get_messages", "offsets", "poll_many", "get_stats"} <= looking
    assert not looking & {"create_topic", "delete_topic", "put_reader", "open_producer", "maintain", "truncate"}
