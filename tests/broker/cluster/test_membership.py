"""Instances and a real ZooKeeper: membership, ownership, and the end of sessions and servers."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import pytest
import trio
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import OPEN_ACL_UNSAFE, make_digest_acl

from actors.observe import SystemClock
from broker.cluster.handover import Rebalance
from broker.config.config import config_of
from broker.config.sections import Ensemble
from broker.membership import membership as membership_module
from broker.membership.membership import Membership
from broker.membership.zookeeper import access_of
from broker.security.files import FileUnusable
from plainsong.protocol.cluster import SLICES, NameTaken
from plainsong.protocol.errors import ClusterUnavailable
from plainsong.protocol.names import TopicName
from tests.freezing import freeze
from tests.patience import PATIENCE_S
from tests.zookeeper_server import ZooKeeperServer

TOPICS = [TopicName("ns", f"t{number}") for number in range(300)]
#: Longer than any test, so that no session is lost if the machine stalls.
SESSION_S = 5 * PATIENCE_S
#: For sessions that must expire, and for clients that must be replaced.
BRIEF_S = 1.0
#: For sessions that must reconnect: kazoo's client may hang while it does, and is replaced after two session time-outs.
EXPIRING_S = 10.0

paths = count()


@pytest.fixture
def ensemble(zookeeper):
    """The settings of an ensemble, with an unused path."""
    return Ensemble(zookeeper.address, f"/of-a-test/{next(paths)}")


@pytest.fixture
def own_server(tmp_path):
    """A ZooKeeper that a test may kill."""
    with ZooKeeperServer(tmp_path / "zookeeper") as server:
        yield server


def member(ensemble, name, *, weight=100, session_s=SESSION_S, access=None, proof=None):
    return Membership(
        ensemble,
        name,
        weight=weight,
        session_timeout_s=session_s,
        clock=SystemClock(),
        access=access,
        proof=proof,
    )


@asynccontextmanager
async def running(ensemble, name, *, address=None, enter=True, **options):
    """Run an instance that has joined and has no open topic to wait for."""
    me = member(ensemble, name, **options)
    async with trio.open_nursery() as nursery:
        await nursery.start(me.run)
        nursery.start_soon(Rebalance(me, NothingOpen()).run)
        if enter:
            await me.enter(address or f"{name}:7420")
        yield me
        nursery.cancel_scope.cancel()


class NothingOpen:
    """Implements ``HandoverSteps`` without open topics, so that each step ends at once."""

    def open_topics(self):
        return ()

    async def given_away(self):
        await trio.lowlevel.checkpoint()

    async def taken_over(self, slices):
        del slices
        await trio.lowlevel.checkpoint()


async def until_shared(*memberships):
    """Wait until every instance is in every view and has its share."""

    def shared(membership):
        found = membership.assignment.members
        return len(found) == len(memberships) and all(each.slices == SLICES for each in found)

    await until(lambda: all(map(shared, memberships)), *memberships)


async def until(true, *memberships):
    """Wait until ``true()`` is true; check after every change of the memberships."""
    with trio.fail_after(PATIENCE_S):
        while not true():
            waited = trio.Event()
            async with trio.open_nursery() as nursery:
                for each in memberships:
                    nursery.start_soon(_any, each, waited)
                with trio.move_on_after(0.2):
                    await waited.wait()
                nursery.cancel_scope.cancel()


async def _any(membership, waited):
    await membership._event.wait()
    waited.set()


def owned(membership):
    return {topic for topic in TOPICS if membership.is_mine(topic)}


async def test_a_single_instance_owns_everything_once_it_has_joined(ensemble):
    async with running(ensemble, "a", enter=False) as a:
        assert not owned(a)
        await a.enter("a:7420")
        assert owned(a) == set(TOPICS)
        assert a.me.address == "a:7420"
        assert a.connected
        assert a.owner(TopicName("", "transactions")) == a.me


async def test_each_topic_has_one_of_three_owners_and_all_agree(ensemble):
    async with running(ensemble, "a") as a, running(ensemble, "b") as b, running(ensemble, "c", weight=200) as c:
        all_ = (a, b, c)
        await until_shared(*all_)
        assert not owned(a) & owned(b)
        assert owned(a) | owned(b) | owned(c) == set(TOPICS)
        assert len(owned(c)) > len(owned(a)) > 30
        for topic in TOPICS:
            assert len({each.owner(topic) for each in all_}) == 1


async def test_topics_of_a_leaving_instance_move_to_the_others_and_its_own_view_changes_at_once(ensemble):
    async with running(ensemble, "a") as a, running(ensemble, "b") as b:
        await until_shared(a, b)
        told = []
        a.on_change(lambda: told.append(len(owned(a))))
        await a.leave()
        assert told[0] == 0
        assert not owned(a)
        assert {a.owner(topic).name for topic in TOPICS} == {"b"}
        await until(lambda: owned(b) == set(TOPICS), a, b)
        assert [each.name for each in b.instances] == ["b"]
        assert [each.leaving for each in b.assignment.members] == [True, False]


async def test_a_read_in_progress_does_not_undo_a_leave(ensemble):
    async with running(ensemble, "a") as a, running(ensemble, "b") as b:
        await until_shared(a, b)
        read, looking, on = a._nodes.placement, trio.Event(), trio.Event()

        async def held():
            looking.set()
            await on.wait()
            return await read()

        a._nodes.placement = held
        a._on_event()
        await looking.wait()
        seen = []
        a.on_change(lambda: seen.append(len(owned(a))))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.leave)
            await until(lambda: seen, a)
            on.set()
        assert set(seen) == {0}
        assert not owned(a)


async def test_an_instance_that_ends_disappears_immediately_not_at_the_end_of_its_session(ensemble):
    async with running(ensemble, "b") as b:
        async with running(ensemble, "a"):
            await until(lambda: len(b.instances) == 2, b)
        with trio.fail_after(PATIENCE_S):  # shorter than the session
            await until(lambda: owned(b) == set(TOPICS), b)


async def test_pins_and_drains_hold_everywhere_and_apply_here_when_the_call_returns(ensemble):
    async with running(ensemble, "a") as a, running(ensemble, "b") as b:
        await until_shared(a, b)
        topic = next(iter(owned(a)))
        await a.change_placement(lambda placement: placement.pinned(topic, "b"))
        assert not a.is_mine(topic)
        await until(lambda: b.is_mine(topic), b)
        await b.change_placement(lambda placement: placement.with_drained("a", drained=True))
        await until(lambda: owned(b) == set(TOPICS), a, b)
        assert not owned(a)
        await b.change_placement(lambda placement: placement.with_drained("a", drained=False).unpinned(topic))
        await until(lambda: a.is_mine(topic), a)


async def test_concurrent_changes_of_placement_all_take_effect(ensemble):
    async with running(ensemble, "a") as a, running(ensemble, "b") as b:
        async with trio.open_nursery() as nursery:
            for number, topic in enumerate(TOPICS[:8]):
                me, to = (a, "b") if number % 2 else (b, "a")
                nursery.start_soon(
                    me.change_placement, partial(lambda to, topic, old: old.pinned(topic, to), to, topic)
                )
        await until(lambda: len(a.assignment.placement.pins) == len(b.assignment.placement.pins) == 8, a, b)


@pytest.mark.parametrize("proof", ["other", ""])
async def test_an_instance_with_another_secret_or_none_is_kept_out_until_the_others_are_gone(ensemble, proof, caplog):
    async with running(ensemble, "stranger", proof=proof, enter=False) as odd:
        async with running(ensemble, "a", proof="ours") as a, running(ensemble, "b", proof="ours") as b:
            await until_shared(a, b)
            with trio.fail_after(PATIENCE_S):  # it returns without having been admitted
                await odd.enter("stranger:7420")
            assert odd.kept_out_by in ("a:7420", "b:7420")
            assert "nothing is owned" in caplog.text
            await b._reread()
            for each in (a, b):
                assert [known.name for known in each.instances] == ["a", "b"]
            assert owned(a) | owned(b) == set(TOPICS)
            assert not owned(odd)
            assert odd.owner(TOPICS[0]) is None
            assert await b._zookeeper.get(f"{ensemble.path}/instances/stranger") is None
        await until(lambda: owned(odd) == set(TOPICS), odd)
        assert odd.kept_out_by is None


async def test_of_two_instances_with_different_secrets_that_join_at_the_same_time_the_first_remains(ensemble):
    async with running(ensemble, "a", proof="ours") as a, running(ensemble, "b", proof="other", enter=False) as b:
        found = Membership._find_strangers
        b._find_strangers = lambda members: found(b, members) if b.entered else None  # before b's own node exists
        await b.enter("b:7420")
        await until(lambda: b.kept_out_by == "a:7420", b)
        assert not b.entered
        assert not owned(b)
        await a._reread()
        assert owned(a) == set(TOPICS)
        assert await a._zookeeper.get(f"{ensemble.path}/instances/b") is None


async def test_an_instance_of_a_version_without_proofs_takes_part(ensemble):
    async with running(ensemble, "a", proof="ours") as a, running(ensemble, "b", proof=None) as b:
        await until_shared(a, b)


async def test_another_instance_of_the_same_name_is_refused(ensemble):
    async with running(ensemble, "a", address="one:7420") as a:
        other = member(ensemble, "a", session_s=5.0)  # it retries for one session
        async with trio.open_nursery() as nursery:
            await nursery.start(other.run)
            with pytest.raises(NameTaken) as taken:
                await other.enter("two:7420")
            assert taken.value.address == "one:7420"
            assert not owned(other)
            nursery.cancel_scope.cancel()
        assert owned(a) == set(TOPICS)


async def test_an_instance_that_restarts_after_a_crash_rejoins_before_its_old_session_ends(ensemble):
    died = KazooClient(hosts=ensemble.hosts, timeout=SESSION_S)
    died.start()
    node = b'{"address": "a:7420", "weight": 100, "leaving": false}'
    died.create(f"{ensemble.path}/instances/a", node, ephemeral=True, makepath=True)
    try:
        with trio.fail_after(PATIENCE_S):  # shorter than the session
            async with running(ensemble, "a") as a:
                assert owned(a) == set(TOPICS)
    finally:
        died.stop()
        died.close()


async def test_an_expired_session_is_replaced_and_the_new_one_has_our_node(ensemble):
    async with running(ensemble, "a", session_s=EXPIRING_S) as a, running(ensemble, "b") as b:
        await until(lambda: len(b.instances) == 2, b)
        first = a._zookeeper.session
        told = []
        a.on_change(lambda: told.append(a._zookeeper.session))
        await expire(a)
        await until(lambda: a._zookeeper.session not in (0, first) and a.connected, a)
        with trio.fail_after(PATIENCE_S):  # the views may still be those of the first session
            while not await has_node(b, ensemble, a):  # noqa: ASYNC110 - its appearance has no event
                await trio.sleep(0.02)
        await until(lambda: len(a.instances) == len(b.instances) == 2 and owned(a) | owned(b) == set(TOPICS), a, b)
        # It was reported as lost, although the view may be the same as before.
        await until(lambda: a._zookeeper.session in told, a)


async def has_node(reader, ensemble, membership):
    """True if the node with the membership's name belongs to its present session."""
    node = await reader._zookeeper.get(f"{ensemble.path}/instances/{membership.me.name}")
    return node is not None and node.session == membership._zookeeper.session


async def expire(membership):
    """End the instance's session from another client, which takes the session over and closes it."""
    client = membership._zookeeper._client
    thief = KazooClient(hosts=",".join(f"{h}:{p}" for h, p in client.hosts), client_id=client.client_id)
    await trio.to_thread.run_sync(thief.start)
    await trio.to_thread.run_sync(thief.stop)
    thief.close()


async def test_an_instance_whose_name_was_taken_after_its_session_expired_owns_nothing_until_the_name_is_free(
    ensemble, caplog
):
    async with running(ensemble, "a", address="one:7420") as a:
        path = f"{ensemble.path}/instances/a"
        node = await a._zookeeper.get(path)
        await a._reading.acquire()  # delays the notice
        await a._zookeeper.delete(path, node.version)
        async with running(ensemble, "a", address="two:7420") as other:
            a._reading.release()
            await until(lambda: a.taken_by == "two:7420", a)
            assert not owned(a)
            assert owned(other) == set(TOPICS)
        await until(lambda: owned(a) == set(TOPICS), a)
    assert caplog.text.count("another instance has this name") == 1


async def test_owners_continue_while_zookeeper_is_unavailable_except_for_topics_that_others_claimed(own_server):
    ensemble = Ensemble(own_server.address, "/plainsong")
    async with running(ensemble, "a", session_s=EXPIRING_S) as a:
        told = []
        a.on_change(lambda: told.append(True))
        own_server.kill()
        await until(lambda: not a.connected, a)
        assert owned(a) == set(TOPICS)
        a.deposed(TOPICS[0])
        assert not a.is_mine(TOPICS[0])
        assert a.owner(TOPICS[0]) is None
        await trio.sleep(1.5)  # long enough to show that the view is not reread unprompted
        assert owned(a) == set(TOPICS[1:])
        with pytest.raises(ClusterUnavailable):
            await a.change_placement(lambda placement: placement.with_drained("a", drained=True))
        since_ms = a.since_ms
        await trio.to_thread.run_sync(own_server.start)
        await until(lambda: a.connected and owned(a) == set(TOPICS), a)
        assert a.since_ms > since_ms


async def test_an_unresponsive_zookeeper_delays_nothing(own_server, monkeypatch):
    ensemble = Ensemble(own_server.address, "/plainsong")
    async with running(ensemble, "a", session_s=2 * BRIEF_S) as a:
        own_server.freeze()
        with monkeypatch.context() as patch, trio.fail_after(PATIENCE_S):
            patch.setattr("broker.membership.zookeeper.CALL_TIMEOUT_S", 0.3)
            with pytest.raises(ClusterUnavailable):
                await a.change_placement(lambda placement: placement.with_drained("b", drained=True))
        assert owned(a) == set(TOPICS)
        await until(lambda: not a.connected, a)
        assert owned(a) == set(TOPICS)
        own_server.thaw()
        await until(lambda: a.connected and owned(a) == set(TOPICS), a)
        own_server.freeze()
        begun_s = trio.current_time()
        await a.leave()
        assert not owned(a)
        assert trio.current_time() - begun_s < PATIENCE_S
    own_server.thaw()


async def test_instances_rejoin_when_zookeeper_has_lost_all_data(own_server):
    ensemble = Ensemble(own_server.address, "/plainsong")
    # A client is replaced after two session time-outs without an answer.
    async with running(ensemble, "a", session_s=BRIEF_S) as a, running(ensemble, "b", session_s=BRIEF_S) as b:
        await until_shared(a, b)
        sessions = {a._zookeeper.session, b._zookeeper.session}
        own_server.kill()
        shutil.rmtree(own_server.directory / "data")
        await trio.to_thread.run_sync(own_server.start)
        # The server refuses a client that has seen a later state than the server's own, and accepts only a new client.
        await until(lambda: {a._zookeeper.session, b._zookeeper.session}.isdisjoint(sessions), a, b)
        await until(lambda: a.connected and b.connected, a, b)
        await until_shared(a, b)
        assert owned(a) | owned(b) == set(TOPICS)
        assert not owned(a) & owned(b)


async def test_a_library_thread_that_ended_is_replaced_with_its_client(ensemble):
    async with running(ensemble, "a", session_s=BRIEF_S) as a:
        before = a._zookeeper._client
        await trio.to_thread.run_sync(before.stop)
        await until(lambda: not a.connected, a)
        await until(lambda: a.connected and a._zookeeper._client is not before, a)
        assert owned(a) == set(TOPICS)


async def test_an_instance_that_starts_before_zookeeper_owns_nothing_and_joins_when_it_is_up(own_server, monkeypatch):
    monkeypatch.setattr(membership_module, "PATIENCE_S", 0.2)
    own_server.kill()
    async with running(Ensemble(own_server.address, "/plainsong"), "a", session_s=BRIEF_S) as a:
        assert not owned(a)
        await trio.to_thread.run_sync(own_server.start)
        await until(lambda: owned(a) == set(TOPICS), a)


async def test_the_number_of_remembered_lost_topics_is_bounded(ensemble, monkeypatch):
    monkeypatch.setattr(membership_module, "MAX_LOST", 10)
    a = member(ensemble, "a")
    for topic in TOPICS:
        a.deposed(topic)
    assert len(a._lost) == 10


async def test_foreign_nodes_are_skipped_and_reported(ensemble, caplog):
    async with running(ensemble, "a") as a:
        foreign = f"{ensemble.path}/instances/foreign"
        await a._zookeeper.create(foreign, b"not ours")
        await a._zookeeper.create(f"{ensemble.path}/placement", b"[]")
        await until(lambda: "placement unreadable" in caplog.text, a)
        assert owned(a) == set(TOPICS)
        assert "node of an instance unreadable" in caplog.text


async def test_unreadable_nodes_are_reported_once_and_owners_continue(ensemble, caplog):
    async with running(ensemble, "a") as a:
        operator = KazooClient(hosts=ensemble.hosts)
        await trio.to_thread.run_sync(operator.start)
        path = f"{ensemble.path}/instances"
        operator.set_acls(path, [make_digest_acl("somebody", "else", all=True)])
        for _ in range(3):
            await a._reread()
        assert owned(a) == set(TOPICS)
        assert caplog.text.count("zookeeper cannot be used") == 1
        operator.add_auth("digest", "somebody:else")
        operator.set_acls(path, OPEN_ACL_UNSAFE)
        await trio.to_thread.run_sync(operator.stop)
        operator.close()


async def test_log_lines_of_the_library_are_not_in_the_log(ensemble, caplog):
    caplog.set_level(logging.DEBUG)
    async with running(ensemble, "a"):
        pass
    ours = {f"broker.membership.{each}" for each in ("membership", "zookeeper")}
    assert {record.name for record in caplog.records} <= ours


FROZEN = """
import sys, trio
from actors.observe import SystemClock
from broker.membership.membership import Membership
from broker.config.sections import Ensemble
from plainsong.protocol.names import TopicName
async def main():
    a = Membership(Ensemble(sys.argv[1], sys.argv[2]), "frozen", weight=100, session_timeout_s=1.0, clock=SystemClock())
    mine = TopicName("ns", "t0")
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        await a.enter("frozen:7420")
        await a.take_slices(64)
        session = a._zookeeper.session
        print("entered", flush=True)
        while a._zookeeper.session == session or not a.connected or len(a.instances) < 2:
            await trio.sleep(0.02)
        print("again", a._zookeeper.session != session, flush=True)
        nursery.cancel_scope.cancel()
trio.run(main)
"""


async def test_a_frozen_instance_loses_its_node_and_notices_when_it_wakes(ensemble):
    async with running(ensemble, "b") as b:
        frozen = subprocess.Popen(
            [sys.executable, "-c", FROZEN, ensemble.hosts, ensemble.path],
            stdout=subprocess.PIPE,
            text=True,
            cwd=os.getcwd(),
        )
        try:
            assert await trio.to_thread.run_sync(frozen.stdout.readline) == "entered\n"
            await until(lambda: len(b.instances) == 2 and owned(b) != set(TOPICS), b)
            freeze(frozen.pid)
            begun_s = trio.current_time()
            await until(lambda: owned(b) == set(TOPICS), b)
            assert trio.current_time() - begun_s < PATIENCE_S
            frozen.send_signal(signal.SIGCONT)
            assert await trio.to_thread.run_sync(frozen.stdout.readline) == "again True\n"
        finally:
            frozen.kill()
            frozen.wait()
            frozen.stdout.close()


# --- access ----------------------------------------------------------------------------------------


async def test_nodes_of_a_deployment_with_a_password_are_closed_to_others(ensemble, tmp_path):
    file = tmp_path / "auth"
    file.write_text("digest plainsong:pass:word\n")
    file.chmod(0o600)
    access = access_of(config_of({"cluster.zookeeper_auth_file": str(file)}).cluster)
    async with running(ensemble, "a", access=access) as a, running(ensemble, "b", access=access) as b:
        await until(lambda: len(a.instances) == len(b.instances) == 2, a, b)
        stranger = KazooClient(ensemble.hosts)
        await trio.to_thread.run_sync(stranger.start)
        try:
            for attempt in (stranger.get, stranger.delete, partial(stranger.set, value=b"mine")):
                with pytest.raises(NoAuthError):
                    await trio.to_thread.run_sync(attempt, f"{ensemble.path}/instances/a")
        finally:
            await trio.to_thread.run_sync(stranger.stop)
            await trio.to_thread.run_sync(stranger.close)


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("", 384, "digest USER"),
        ("plainsong:x", 384, "digest USER"),
        ("digest x", 384, "digest USER"),
        ("digest a:b", 388, "all users"),
        ("digest a:b", 402, "written"),
    ],
)
def test_a_password_file_that_others_can_read_is_refused(tmp_path, text, mode, why):
    file = tmp_path / "auth"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(FileUnusable, match=why) as caught:
        access_of(config_of({"cluster.zookeeper_auth_file": str(file)}).cluster)
    assert "a:b" not in str(caught.value)


def test_tls_to_zookeeper_verifies_the_server():
    values = {
        "zookeeper_tls": True,
        "zookeeper_ca": "ca.pem",
        "zookeeper_certificate": "c.pem",
        "zookeeper_key": "k.pem",
    }
    access = access_of(config_of({f"cluster.{name}": value for name, value in values.items()}).cluster)
    assert access == {
        "use_ssl": True,
        "verify_certs": True,
        "ca": "ca.pem",
        "certfile": "c.pem",
        "keyfile": "k.pem",
    }
    assert access_of(config_of({}).cluster) == {}
