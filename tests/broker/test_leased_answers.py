"""A primary that may have been replaced gives no answer, however long ago it received the request."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from broker_in_process import TOPICS, in_process

from actors.lease import LeaseKeeper
from broker.api.routes import ROUTES
from broker.http.handlers import RequestCancelled
from broker.http.messages import Answer, BodyPieces, Request
from broker.http.route import Endpoint
from broker.leased import ABOUT_THE_DAEMON, LeasedMethods, while_leased
from broker.replication import answer_while_leased
from plainsong.protocol.errors import OutcomeUnknown, Overloaded, ReplicationUnavailable
from plainsong.protocol.tephra.rpc import ApplicationError, decode_reply, encode_call
from tests.storage.replication.objects import MemoryObjects

PERIOD_S = 10.0
PATH = {"namespace": "ns", "topic": "t"}


class Leased:
    """The lease of a primary with a standby, from 0 s to ``PERIOD_S`` of its own clock."""

    def __init__(self, *, is_needed=True):
        self.now_s = 0.0
        self.keeper = LeaseKeeper(
            MemoryObjects(),
            period_s=PERIOD_S,
            allows_standby=True,
            is_needed=is_needed,
            counted=lambda: 1,
            now_ms=lambda: 0,
            clock=lambda: self.now_s,
        )
        self.keeper.began(1, bytes(16), "first", 0.0)

    def end(self):
        self.now_s = PERIOD_S

    def endpoint(self, name, handler):
        route = next(each for each in ROUTES if each.name == name)
        return while_leased([Endpoint(route, handler)], self.keeper)[0].handler


@pytest.fixture
def leased():
    return Leased()


def ends_before_the_answer(leased, name, outcome):
    """Return what a client gets if the lease ends between the request and its answer."""
    given, found = [], []
    handler = leased.endpoint(name, lambda request, answered: given.append(answered))
    handler(Request(PATH, "", {}), found.append)
    leased.end()
    given[0](outcome)
    return found[0]


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_poll_that_has_waited_until_the_lease_was_over_gets_no_messages(leased, is_over):
    async with in_process() as daemon:
        await daemon.create()
        poll = next(each.handler for each in daemon.service.endpoints if each.route.name == "poll")
        asked = Request(PATH, "", {"content-type": "application/json"}, b'{"waitMs":60000}')
        outcomes, answered = [], trio.Event()

        def note(outcome):
            outcomes.append(outcome)
            answered.set()

        leased.endpoint("poll", poll)(asked, note)
        await trio.testing.wait_all_tasks_blocked()
        assert outcomes == []
        if is_over:
            leased.end()
        await daemon.publish("m")
        await answered.wait()
    if is_over:
        assert isinstance(outcomes[0], ReplicationUnavailable)
        assert outcomes[0].outcome == "not-applied"
    else:
        assert outcomes[0].status == 200


@pytest.mark.parametrize("name", ["poll", "poll_many", "get_topic"])
def test_a_read_is_not_answered_once_the_lease_is_over_also_in_sync(name):
    for leased in (Leased(), Leased(is_needed=False)):
        assert isinstance(ends_before_the_answer(leased, name, Answer(200)), ReplicationUnavailable)


@pytest.mark.parametrize(
    "name", ["list_all_topics", "list_topics", "list_namespaces", "get_definitions", "begin_backup"]
)
def test_lists_definitions_and_backups_are_refused_once_the_lease_is_over(leased, name):
    found = []
    leased.end()
    leased.endpoint(name, lambda request, answered: answered(Answer(200)))(Request({}, "", {}), found.append)
    assert isinstance(found[0], ReplicationUnavailable)


@pytest.mark.parametrize("name", ["livez", "readyz", "metrics", "get_replication", "get_attention", "end_backup"])
def test_a_primary_whose_lease_is_over_still_answers_about_itself(leased, name):
    found = []
    leased.end()
    leased.endpoint(name, lambda request, answered: answered(Answer(200)))(Request({}, "", {}), found.append)
    assert found[0].status == 200


def test_each_route_that_needs_a_lease_names_the_error_of_one_that_is_over():
    assert {each.name for each in ROUTES} >= ABOUT_THE_DAEMON
    leased = [each for each in ROUTES if each.name not in ABOUT_THE_DAEMON]
    assert [each.name for each in leased if ReplicationUnavailable.code not in each.errors] == []


class Copied:
    """A second copy, as far as answers depend on it."""

    def __init__(self, lease):
        self.lease = lease


async def test_a_primary_whose_lease_is_over_is_not_ready(leased):
    async with in_process(copy=Copied(leased.keeper)) as daemon:
        await daemon.call("GET", "/readyz")
        leased.end()
        answer = await daemon.call("GET", "/readyz", status=503)
        assert [each["code"] for each in answer.json()["reasons"]] == ["replication_unavailable"]


@pytest.mark.parametrize("listener", [None, "hot"])
async def test_a_refused_answer_is_counted_and_logged_as_refused(leased, listener):
    async with in_process(copy=Copied(leased.keeper), listener=listener) as daemon:
        await daemon.create()
        leased.end()
        await daemon.call("POST", f"{TOPICS}/t/poll", json={}, status=503)
        await daemon.call("GET", TOPICS, status=503)
        counted = (await daemon.call("GET", "/metrics")).text
        for route in ("poll", "list_topics"):
            assert f'plainsong_requests_total{{route="{route}",status="503"}} 1.0' in counted
            assert f'plainsong_requests_total{{route="{route}",status="200"}}' not in counted


def test_a_cancelled_read_stays_cancelled(leased):
    assert isinstance(ends_before_the_answer(leased, "poll", RequestCancelled()), RequestCancelled)


def test_the_outcome_of_a_change_is_not_known_once_the_lease_is_over(leased):
    assert isinstance(ends_before_the_answer(leased, "publish", Answer(200)), OutcomeUnknown)


def test_in_sync_a_change_that_counts_is_answered_without_a_lease():
    assert ends_before_the_answer(Leased(is_needed=False), "publish", Answer(200)).status == 200


def test_a_refused_change_keeps_its_reason(leased):
    refusal = Overloaded("full")
    assert ends_before_the_answer(leased, "publish", refusal) is refusal


async def test_a_streamed_answer_breaks_off_once_the_lease_is_over(leased):
    closed = []

    async def pieces():
        try:
            for number in range(3):
                await trio.lowlevel.checkpoint()
                yield b"%d" % number
        finally:
            closed.append(True)

    found = []
    leased.endpoint("poll", lambda request, answered: answered(Answer(200, pieces())))(
        Request(PATH, "", {}), found.append
    )
    body = found[0].body
    assert await anext(body) == b"0"
    leased.end()
    with pytest.raises(ReplicationUnavailable):
        await anext(body)
    await body.aclose()
    assert closed


async def test_an_event_stream_that_begins_once_the_lease_is_over_is_refused_and_closed(leased):
    async with in_process() as daemon:
        await daemon.create()
        streams = next(each.handler for each in daemon.service.endpoints if each.route.name == "follow")
        outcomes, answered = [], trio.Event()

        def note(outcome):
            outcomes.append(outcome)
            answered.set()

        leased.endpoint("follow", streams)(Request(PATH, "", {}), note)
        leased.end()
        await answered.wait()
        body = outcomes[0].body
        with pytest.raises(ReplicationUnavailable):
            await anext(body)
        await body.aclose()


def test_a_complete_large_answer_stays_unchanged(leased):
    body, found = BodyPieces([b"1", b"2"]), []
    leased.endpoint("poll", lambda request, answered: answered(Answer(200, body)))(Request(PATH, "", {}), found.append)
    assert found[0].body is body


async def test_an_actor_answers_reads_without_a_lease_since_the_endpoints_check_them(leased):
    async with in_process() as daemon:
        answer_while_leased(leased.keeper, daemon.service.directory.environment.run_queue)
        await daemon.create()
        leased.end()
        await daemon.call("POST", f"{TOPICS}/t/poll", json={"waitMs": 1}, status=200)


async def test_a_repeated_publish_is_not_acknowledged_from_memory_once_the_lease_is_over(leased):
    body = {"messages": ["m"], "producer": "p", "sequenceIds": [0]}
    async with in_process() as daemon:
        answer_while_leased(leased.keeper, daemon.service.directory.environment.run_queue)
        await daemon.create()
        await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
        leased.end()
        await daemon.call("POST", f"{TOPICS}/t/publish", json=body, status=503)
        leased.now_s = 0.0
        again = await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
        assert again.json()["duplicate"]


class Snapshots:
    """Methods of the transaction service that answer once they may."""

    def __init__(self):
        self.asked, self.go_on, self.started = trio.Event(), trio.Event(), []

    def start(self, message, answered):
        self.started.append((message, answered))
        return True

    async def answer(self, message, remote=""):
        self.asked.set()
        await self.go_on.wait()
        return b"an answer"


@pytest.mark.parametrize("ends", ["before the call", "before the answer", "never"])
@pytest.mark.parametrize("method", ["getSnapshot", "resetState"])
async def test_tephras_clients_get_nothing_from_memory_once_the_lease_is_over(leased, nursery, ends, method):
    methods, found = Snapshots(), []
    leased_methods, message = LeasedMethods(methods, leased.keeper), encode_call(method, 1)
    if ends == "before the call":
        leased.end()
    else:
        assert leased_methods.start(message, found.append)

    done = trio.Event()

    async def ask():
        found.append(await leased_methods.answer(message))
        done.set()

    nursery.start_soon(ask)
    if ends == "before the call":
        assert not leased_methods.start(message, found.append)
    else:
        await methods.asked.wait()
    if ends == "before the answer":
        leased.end()
    methods.go_on.set()
    await done.wait()
    assert methods.asked.is_set() == (ends != "before the call")
    if ends == "never" or (ends == "before the answer" and method == "resetState"):
        assert found == [b"an answer"]
    else:
        with pytest.raises(ApplicationError, match="a standby may have taken over"):
            decode_reply(found[0], method, 1)
