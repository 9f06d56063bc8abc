"""The state per name is bounded, in total and for a single name, and is removed once it is unused."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from broker.api.routes import ROUTES
from broker.http.route import Route
from broker.security import guard as guards
from broker.security import quotas
from broker.security.grants import parse_grants
from broker.security.guard import Guard, Hold
from broker.security.identity import Identity
from broker.security.peer import ConnectionSlot, Peer
from broker.security.peer_names import certificate_identity
from broker.security.quotas import Quotas
from broker.security.rights import MAX_REMEMBERED
from plainsong.protocol.errors import QuotaExceeded, Unauthenticated

PUBLISH: Route = next(route for route in ROUTES if route.name == "publish")
LIMITS = """format = 1
[[grant]]
to = ["*"]
verbs = ["all"]
on = ["*:*"]
[[quota]]
to = ["*"]
connections = 3
parked_polls = 3
requests_per_s = 5
[[quota]]
on = ["*:*"]
parked_polls = 5
publish_bytes_per_s = 1000
"""


def guard_of(text=LIMITS):
    made = Guard(required=True, quotas=Quotas(lambda: 100.0))
    made.replace(grants=parse_grants(text.encode()))
    return made


def somebody(number):
    return Identity(f"n{number}", "oidc", "k", (f"group-{number}",))


def test_the_number_of_names_with_cached_rights_is_bounded():
    made = guard_of()
    for number in range(2 * guards.MAX_NAMES + 5):
        assert made.admission_of(somebody(number)).rights.on_topic("publish", "ns", "t")
        assert len(made._rights) <= guards.MAX_NAMES
        assert len(made._decisions) <= guards.MAX_NAMES


def test_one_name_that_keeps_requesting_new_topics_fills_one_bounded_table():
    made = guard_of()
    rights = made.admission_of(somebody(1)).rights
    for number in range(MAX_REMEMBERED + MAX_REMEMBERED // 2):
        rights.any_on_topic("ns", f"t{number}")
    assert len(made._decisions) == MAX_REMEMBERED // 2
    assert len(made._rights) == 1


def test_the_number_of_names_with_cached_quotas_is_bounded():
    made = guard_of().quotas
    for number in range(2 * quotas.MAX_NAMES + 5):
        assert made.concern(somebody(number))
        assert len(made._of_names) <= quotas.MAX_NAMES


@pytest.mark.parametrize("same", [True, False], ids=["one greedy name", "many names"])
def test_buckets_are_bounded_whatever_names_and_topics_are_requested(same, monkeypatch):
    monkeypatch.setattr(quotas, "MAX_BUCKETS", 1_000)
    made = guard_of().quotas
    for number in range(5_000):
        try:
            made.enter(somebody(1 if same else number), "publish", "ns", f"t{number}", 10)
        except QuotaExceeded:
            assert same
        assert made.buckets <= 1_000


def test_ended_connections_and_polls_are_no_longer_counted():
    made = guard_of().quotas
    slots, parked, refused = [], [], 0
    for number in range(200):
        who = somebody(number % 50)  # each name connects four times, and may have three connections
        slot = ConnectionSlot()
        try:
            made.connect(who, slot)
        except QuotaExceeded:
            refused += 1
        slots.append(slot)
        try:
            parked.append(made.park(who, "ns", f"t{number % 50}"))
        except QuotaExceeded:
            refused += 1
    assert refused == 100
    assert len(made._counts) == 150  # fifty names' connections and polls, and fifty topics' polls
    for slot in slots:
        made.disconnect(slot)
        made.disconnect(slot)
    for ended in parked:
        ended()
        ended()
    assert made._counts == {}


def test_ended_waits_are_no_longer_checked():
    made = guard_of()
    with ExitStack() as stack:
        for number in range(1_000):
            hold = Hold(made, somebody(number), PUBLISH, {"namespace": "ns", "topic": "t"}, lambda error: None)
            stack.enter_context(made.holding(hold))
        assert made.holds == 1_000
    assert made.holds == 0


def test_anonymous_clients_leave_nothing_in_memory():
    made = guard_of()
    for number in range(20_000):
        with pytest.raises(Unauthenticated):
            made.admit_now({"authorization": f"Bearer psg_{number:046}"}, Peer(f"10.0.0.1:{number}"))
        with pytest.raises(Unauthenticated):
            made.admit_now({"authorization": f"Bearer eyJ{number}.e.s"}, Peer(f"10.0.0.1:{number}"))
    kept = (made._rights, made._decisions, made._held, made.quotas._of_names, made.quotas._buckets, made.quotas._counts)
    assert not any(kept)


def test_the_number_of_cached_certificate_names_is_bounded():
    certificate_identity.cache_clear()
    for number in range(3_000):
        assert certificate_identity(b"no certificate %d" % number, "san-dns") is None
    assert certificate_identity.cache_info().currsize == 1_000
