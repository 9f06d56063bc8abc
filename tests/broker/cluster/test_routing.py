"""The destination of each route."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import pytest

from broker.api.routes import ROUTES
from broker.cluster.forward import Forwarding
from broker.http.handlers import RequestTasks
from broker.http.heads import HotRoutes
from broker.http.route import Endpoint, owned_name
from plainsong.protocol.names import TopicName
from storage.base import NAMESPACES_NAME, SERVICE_NAME

ANYWHERE = {
    *("list_topics", "list_namespaces", "get_namespace", "stream", "list_all_topics", "get_attention", "get_events"),
    *("get_definitions", "put_definitions", "start_scrub", "get_scrub", "get_replication", "explain_error"),
    *("take_over", "switch_primary"),
    *("begin_backup", "list_backup_objects", "get_backup_object", "end_backup"),
    *(
        "ping",
        "livez",
        "readyz",
        "metrics",
        "topic_metrics",
        "version",
        "openapi",
        "asyncapi",
        "whoami",
        "root",
        "console",
        "console_file",
        "console_slash",
    ),
    "security_txt",
}


def expected(route):
    if route.name in ANYWHERE or route.path.startswith("/v1/cluster"):
        return None
    if route.path.startswith("/v1/transactions"):
        return "invalid_list" if route.name == "get_pruning" else "transactions"
    return {"set_namespace": "namespaces", "poll_many": "topics"}.get(route.name, "topic")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_has_its_owner(route):
    assert route.owner == expected(route)
    assert ("{topic}" in route.path) >= (route.owner == "topic")


def test_the_owner_of_a_topic_answers_for_it_before_it_exists():
    create = next(route for route in ROUTES if route.name == "create_topic")
    assert owned_name(create.owner, {"namespace": "ns", "topic": "t"}) == TopicName("ns", "t")


def test_an_invalid_name_is_refused_by_any_instance():
    assert owned_name("topic", {"namespace": "ns", "topic": "no topic"}) is None
    assert owned_name("topic", {"namespace": "", "topic": "transactions"}) is None


def test_services_have_names_that_no_topic_can_have():
    assert owned_name("transactions", {}) == owned_name("invalid_list", {}) == SERVICE_NAME
    assert owned_name("namespaces", {"namespace": "ns"}) == NAMESPACES_NAME
    assert SERVICE_NAME.namespace == NAMESPACES_NAME.namespace == ""


def test_only_reads_are_repeated_after_an_unknown_outcome():
    reading = {route.name for route in ROUTES if route.reads_only}
    assert {"get_topic", "get_messages", "offsets", "poll", "poll_many", "get_stats"} <= reading
    assert not reading & {"create_topic", "delete_topic", "put_reader", "open_producer", "maintain", "truncate"}
    assert {route.name for route in ROUTES if route.method == "GET"} <= reading


def nothing(request, answered):
    """A handler that does nothing."""


@pytest.mark.parametrize(
    ("decides", "forwarded"),
    [("embedded", {"transactions", "invalid_list"}), ("tephra", {"invalid_list"}), ("off", set())],
)
def test_transactions_are_forwarded_where_an_instance_decides_them(decides, forwarded):
    endpoints, tasks = [Endpoint(route, nothing) for route in ROUTES], RequestTasks(None)
    given = Forwarding(None, SimpleNamespace(poll=nothing), tasks, decides=decides, max_wait_ms=0).endpoints(endpoints)
    elsewhere = {route.owner for route, handler in given if handler is not nothing}
    assert elsewhere == {"topic", "topics", "namespaces"} | forwarded


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_the_lane_finds_its_routes_and_no_others(route):
    lane = HotRoutes([Endpoint(each, nothing) for each in ROUTES])
    places = re.findall(r"{(\w+)}", route.path)
    find = partial(lane.find, route.method)
    found = find(re.sub(r"{(\w+)}", r"x-\1", route.path))
    if not route.is_direct:
        assert found is None
        return
    assert found == (Endpoint(route, nothing), {place: f"x-{place}" for place in places})
    assert f"{route.method} {route.path}".encode().startswith(lane.prefixes)
    for place in places:
        assert find(route.path.replace(f"{{{place}}}", "")) is None
    assert find(route.path + "/") is None
    assert find("/x" + route.path) is None
