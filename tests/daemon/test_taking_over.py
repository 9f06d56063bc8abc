"""Real daemons, a primary and its standbys, over a real S3 server: killed, frozen, switched, and rejoined."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from plainsong.errors import PlainsongError
from storage.replication.record import Settle, read_record, write_record
from tests.daemon.harness import ROOT, Daemon, DaemonEnded, clean_environ, eventually, run_plainsong
from tests.ports import free_port
from tests.storage.disks import copied_at_once
from tests.storage.replication.s3_proxy import Fault, S3Proxy
from tests.storage.replication.s3_server import BUCKET, TOOLS, s3_server

QUICK = ("replication.interval_ms=20", "replication.timeout_s=5")
BY_HAND = ("replication.lease_s=0",)
#: Long enough for a primary on a busy machine to renew the lease.
LEASE = ("replication.lease_s=10",)
#: A planned switch does not wait for the lease.
LONG_LEASE = ("replication.lease_s=600",)
#: Rounds of the tests that kill or freeze a primary; set STANDBY_ROUNDS=50 for many.
ROUNDS = int(os.environ.get("STANDBY_ROUNDS", "0"))


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture
def place(tmp_path, s3):
    return f"s3://{BUCKET}/{tmp_path.name}", s3


class Site:
    """The daemons of one log, each with its own port."""

    def __init__(self, tmp_path, place, *sets):
        self.tmp_path, self.place, self.sets = tmp_path, place, sets
        self.ports = {}

    def daemon(self, name, *sets):
        port = self.ports.setdefault(name, free_port())
        url, environ = self.place
        settings = (f"replication.to={url}", *QUICK, *self.sets, *sets)
        return Daemon(self.tmp_path / name, *settings, bind=f"127.0.0.1:{port}", environ=environ)

    def standby(self, name):
        return self.daemon(name, "replication.role=standby")

    def client(self, *names, **options):
        return Client([f"http://127.0.0.1:{self.ports[name]}" for name in names], **options)

    def replica(self, verb, *words, code=0):
        done = run_plainsong("replica", verb, *words, environ={**clean_environ(), **self.place[1]})
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def url(self, name):
        return f"http://127.0.0.1:{self.ports[name]}"


@pytest.fixture
def site(tmp_path, place):
    return Site(tmp_path, place, *BY_HAND)


@pytest.fixture
def leased(tmp_path, place):
    return Site(tmp_path, place, *LEASE)


#: The backend that docs/howto/standby.md shows.
BACKEND = """
global
    maxconn 100
defaults
    mode http
    timeout connect 10s
    timeout client 90s
    timeout server 90s
frontend front
    bind 127.0.0.1:{port}
    default_backend plainsong
{backend}
"""


@contextmanager
def haproxy(site, folder):
    """Run HAProxy in front of the daemons ``a`` and ``b`` with the how-to's backend; yield its URL."""
    program = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin:{TOOLS}")
    if program is None:
        pytest.skip("NOT TESTED: haproxy is not installed here")
    page = (ROOT / "docs/howto/standby.md").read_text(encoding="utf-8")
    backend = re.search(r"```\n(backend plainsong\n.*?)```", page, re.DOTALL)[1]
    for number, name in enumerate("ab", 1):
        backend = backend.replace(f" db-{number}:7420", f" 127.0.0.1:{site.ports[name]}")
    port, settings = free_port(), folder / "haproxy.cfg"
    settings.write_text(BACKEND.format(port=port, backend=backend))
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen([program, "-db", "-f", settings], stdout=said, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_haproxy_with_the_check_of_the_how_to_sends_requests_to_the_primary_after_a_take_over_too(site, tmp_path):
    with site.daemon("a") as first, site.standby("b"):
        eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))
        with haproxy(site, tmp_path) as url, Client(url, deadline_s=120) as client:
            eventually("it answers", lambda: serves(url))
            client.create_topic("orders")
            client.publish("orders", [b"1"])
            eventually("everything counts", lambda: all_counts(site.url("a")))
            first.kill()
            site.replica("takeover", "--url", site.url("b"))
            eventually("it answers again", lambda: serves(url))
            client.publish("orders", [b"2"])
            assert values(client) == [b"1", b"2"]


def state(url):
    try:
        with urllib.request.urlopen(f"{url}/v1/replication") as answer:
            return json.loads(answer.read())
    except OSError:
        return {"role": "away"}


def role(url):
    return state(url)["role"]


def serves(url):
    """True if a daemon is a primary that is ready."""
    try:
        with urllib.request.urlopen(f"{url}/readyz"):
            return True
    except OSError:
        return False


def all_counts(url):
    found = state(url)
    return found["role"] == "primary" and found["countedCommit"] == found["lastCommit"]


def follows(standby, primary):
    """True if a standby has everything that its primary has."""
    found, wanted = state(standby), state(primary)
    return found.get("countedCommit") is not None and found["countedCommit"] == wanted["lastCommit"]


def is_automatic(primary, standbys=1):
    """True if a primary keeps the terms of its lease for its standbys."""
    found = state(primary)
    return len(found.get("standbys", ())) == standbys and found["automatic"]


def values(client, topic="orders"):
    return [message.value for message in client.read(topic)]


def test_a_standby_refuses_every_request_and_names_the_primary(site):
    with site.daemon("a") as first, site.standby("b"):
        assert first.serving["addresses"] == [site.url("a")]
        eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))
        eventually("it knows the primary", lambda: state(site.url("b"))["urls"] == [site.url("a")])
        with urllib.request.urlopen(f"{site.url('b')}/livez") as answer:
            assert answer.status == 200
        with urllib.request.urlopen(f"{site.url('b')}/metrics") as answer:
            assert b"plainsong_replication_is_standby 1.0" in answer.read()
        for path in ("/readyz", "/v1/namespaces/demo/topics", "/v1/topics", "/ping"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(site.url("b") + path)
            problem = json.loads(refused.value.read())
            assert (refused.value.code, problem["code"], problem["outcome"]) == (503, "standby", "not-applied")
            assert site.url("a") in problem["detail"]
            assert refused.value.headers["Plainsong-Primary"] == site.url("a")
        with site.client("b", "a") as client:
            client.create_topic("orders")
            client.publish("orders", [b"found the primary"])
            assert values(client) == [b"found the primary"]


def test_a_take_over_by_hand_of_a_killed_primary_keeps_what_counted_in_order_and_gives_no_id_twice(site):
    random, sure = Random(5), []
    ids, names = set(), ["a", "b"]
    with ExitStack() as daemons:
        first = daemons.enter_context(site.daemon("a"))
        with site.client("a") as client:
            client.create_topic("orders")
        for turn in range(ROUNDS or 2):
            now, then = names[turn % 2], names[(turn + 1) % 2]
            if turn:
                shutil.rmtree(site.tmp_path / then)
            second = daemons.enter_context(site.standby(then))
            eventually("the standby follows", lambda now=now, then=then: follows(site.url(then), site.url(now)))
            with site.client(now) as client:
                for number in range(random.randrange(5, 40)):
                    receipt = client.publish("orders", [b"%d-%d" % (turn, number)])
                    ids.add(bytes(receipt.first_id))
                    sure.append(b"%d-%d" % (turn, number))
                eventually("everything counts", lambda now=now: all_counts(site.url(now)))
                client.publish("orders", [b"perhaps %d" % turn])
            first.kill()
            site.replica("takeover", "--url", site.url(then))
            eventually("the standby serves", lambda then=then: serves(site.url(then)))
            first = second
            with site.client(then) as client:
                found = values(client)
                assert [each for each in found if not each.startswith(b"perhaps")] == sure
                receipt = client.publish("orders", [b"perhaps after %d" % turn])
                assert bytes(receipt.first_id) > max(ids)
        assert state(site.url(then))["baseCommit"] is not None
    checked = json.loads(site.replica("verify", site.place[0], "--json"))
    assert (checked["ok"], checked["gapsAfter"]) == (True, [])


def test_after_an_unclean_take_over_open_transactions_are_invalid_and_sessions_are_fenced(site):
    with site.daemon("a") as first, site.standby("b"):
        with site.client("a") as client:
            client.create_topic("orders")
            first_of_all = client.transactions.begin()
            client.publish("orders", [b"committed"], transaction=first_of_all)
            client.transactions.commit(first_of_all)
            client.publish("orders", [b"open"], transaction=client.transactions.begin(timeout_s=600))
            producer = client.producer("orders", "till")
            producer.publish([b"numbered"])
            eventually("everything counts", lambda: all_counts(site.url("a")))
            eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))
            first.kill()
        site.replica("takeover", "--url", site.url("b"))
        eventually("the standby serves", lambda: serves(site.url("b")))
        with site.client("b") as client:
            assert values(client) == [b"committed", b"numbered"]
            with client.producer("orders", "till") as again:
                assert again.last_sequence_id == 0
                assert again.epoch > producer.epoch
                again.publish([b"continued"])
            assert values(client) == [b"committed", b"numbered", b"continued"]


def test_in_sync_nothing_acknowledged_is_lost_with_the_primary_and_sessions_and_transactions_continue(tmp_path, place):
    site = Site(tmp_path, place, *BY_HAND, "replication.mode=sync")
    with site.daemon("a") as first, site.standby("b"):
        eventually("everything counts", lambda: all_counts(site.url("a")))
        with site.client("a", "b", deadline_s=120) as client:
            client.create_topic("orders")
            producer = client.producer("orders", "till")
            producer.publish([b"numbered"])
            transaction = client.transactions.begin(timeout_s=600)
            client.publish("orders", [b"open"], transaction=transaction)
            client.publish("orders", [b"last"])
            first.kill()
            eventually("the standby has a base", lambda: state(site.url("b"))["countedCommit"] is not None)
            assert state(site.url("b"))["mode"] == "sync"
            site.replica("takeover", "--url", site.url("b"))
            eventually("the standby serves", lambda: serves(site.url("b")))
            client.transactions.commit(transaction)
            producer.publish([b"in the same session"])
            assert values(client) == [b"numbered", b"open", b"last", b"in the same session"]
    with site.daemon("b"), site.client("b", deadline_s=120) as client:
        client.publish("orders", [b"after another start"])
        assert values(client)[-2:] == [b"in the same session", b"after another start"]
    checked = json.loads(site.replica("verify", site.place[0], "--json"))
    assert (checked["ok"], checked["gapsAfter"]) == (True, [])


def test_a_deposed_primary_ends_says_who_took_over_and_rejoins_as_a_standby(site):
    with site.daemon("a") as first, site.standby("b"):
        with site.client("a") as client:
            client.create_topic("orders")
            client.publish("orders", [b"1"])
        eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))
        site.replica("takeover", "--url", site.url("b"))
        with site.client("a", retry=False) as client:

            def ends():
                try:
                    client.publish("orders", [b"lost"])
                except PlainsongError:
                    return first.ended
                return False

            eventually("the first daemon ends", ends)
        assert first.wait() == Exit.DEPOSED
        assert "has taken over in epoch" in first.errors
        with pytest.raises(DaemonEnded, match="never counted") as refused:
            site.daemon("a").start()
        assert "replica rejoin" in str(refused.value)
        eventually("the standby serves", lambda: serves(site.url("b")))
        site.replica("rejoin", "--data-dir", site.tmp_path / "a", "--set", f"replication.to={site.place[0]}")
        assert list(site.tmp_path.glob("a/deposed-*/FORMAT"))
        with site.daemon("a"):
            assert role(site.url("a")) == "standby"
            with site.client("a", "b") as client:
                client.publish("orders", [b"2"])
                assert values(client)[-1] == b"2"
            eventually("it follows", lambda: follows(site.url("a"), site.url("b")))


def test_a_planned_switch_loses_nothing_and_both_daemons_change_their_roles(tmp_path, place):
    site = Site(tmp_path, place, *LONG_LEASE)
    with site.daemon("a"), site.standby("b"):
        with site.client("a") as client:
            client.create_topic("orders")
            transaction = client.transactions.begin(timeout_s=600)
            client.publish("orders", [b"open"], transaction=transaction)
        eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))
        for turn, (now, then) in enumerate([("a", "b"), ("b", "a")]):
            eventually("the standby is registered", lambda now=now: state(site.url(now))["standbys"])
            with site.client(now) as client:
                client.publish("orders", [b"last of %d" % turn])
            site.replica("switch", "--url", site.url(now))
            eventually("the standby serves", lambda then=then: serves(site.url(then)))
            eventually("the primary follows", lambda now=now: role(site.url(now)) == "standby")
            eventually("it has everything", lambda now=now, then=then: follows(site.url(now), site.url(then)))
        with site.client("b", "a") as client:
            client.transactions.commit(transaction)
            assert values(client) == [b"open", b"last of 0", b"last of 1"]


def test_a_primary_that_cannot_end_the_log_after_a_switch_serves_again_once_the_object_store_responds(tmp_path, place):
    url, environ = place
    with S3Proxy(environ) as proxy:
        # A start that follows a failed switch waits for longer than another one, whose limit is four time-outs.
        sets = ("replication.timeout_s=1", "shutdown.drain_s=1")
        cut_off, site = Site(tmp_path, (url, proxy.environment), *BY_HAND, *sets), Site(tmp_path, place, *BY_HAND)
        with cut_off.daemon("a") as first, site.standby("b"):
            with cut_off.client("a") as client:
                client.create_topic("orders")
                client.publish("orders", [b"1"])
            eventually("the standby follows", lambda: follows(site.url("b"), cut_off.url("a")))
            eventually("the standby is registered", lambda: state(cut_off.url("a"))["standbys"])
            # An idle primary only reads the log, so it notices nothing before the switch.
            proxy.goes_on.clear()
            proxy.fault = lambda method, path: Fault.HANG if method == "PUT" and "/log/" in path else None
            cut_off.replica("switch", "--url", cut_off.url("a"))
            first.wait_for_line("serving again")
            assert not first.ended
            proxy.restore()
            eventually("it serves again", lambda: serves(cut_off.url("a")))
            assert role(site.url("b")) == "standby"
            with cut_off.client("a") as client:
                client.publish("orders", [b"2"])
                assert values(client) == [b"1", b"2"]
            eventually("the standby follows", lambda: follows(site.url("b"), cut_off.url("a")))
            assert not first.ended


@pytest.mark.parametrize("turn", range(ROUNDS or 1))
def test_a_primary_that_was_frozen_longer_than_its_lease_acknowledges_nothing_after_the_seal(leased, turn):
    site, random = leased, Random(turn)
    with site.daemon("a") as first, site.standby("b"):
        with site.client("a") as client:
            client.create_topic("orders")
            eventually("everything counts", lambda: all_counts(site.url("a")))
        eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))
        eventually("the primary has noticed it", lambda: is_automatic(site.url("a")))
        with site.client("a", retry=False) as client:
            for number in range(random.randrange(1, 30)):
                client.publish("orders", [b"%d" % number])
            first.signal(signal.SIGSTOP)
            eventually("the standby serves", lambda: serves(site.url("b")))
            first.signal(signal.SIGCONT)
            with pytest.raises(PlainsongError):
                client.publish("orders", [b"after the seal"])
        assert first.wait() == Exit.DEPOSED
        with site.client("b") as client:
            assert b"after the seal" not in values(client)


def poll_that_waits(url, wait_ms):
    """Poll for messages of the year 2100; return the status, and the code of the problem."""
    place = f"{url}/v1/namespaces/default/topics/orders/poll"
    body = json.dumps({"startFrom": 4_102_444_800_000, "waitMs": wait_ms}).encode()
    request = urllib.request.Request(place, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["code"]


def counted(url, route, status):
    """Return how many requests of a route a daemon has counted with this status."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    labels = f'plainsong_requests_total{{route="{route}",status="{status}"}} '
    return sum(float(line.removeprefix(labels)) for line in lines if line.startswith(labels))


def test_in_sync_a_primary_that_is_cut_off_answers_nothing_about_topics_once_its_lease_is_over(tmp_path, place):
    url, environ = place
    with S3Proxy(environ) as proxy, ThreadPoolExecutor() as waiters:
        cut_off = Site(tmp_path, (url, proxy.environment), *LEASE, "replication.mode=sync")
        site = Site(tmp_path, place, *LEASE, "replication.mode=sync")
        with cut_off.daemon("a") as first, site.standby("b"), cut_off.client("a", retry=False) as old:
            eventually("everything counts", lambda: all_counts(cut_off.url("a")))
            with cut_off.client("a", deadline_s=120) as client:
                client.create_topic("orders")
                client.publish("orders", [b"1"])
            eventually("the standby follows", lambda: follows(site.url("b"), cut_off.url("a")))
            eventually("the primary has noticed it", lambda: is_automatic(cut_off.url("a")))
            proxy.cut_off()
            # It waits for longer than the lease.
            waiting = waiters.submit(poll_that_waits, cut_off.url("a"), 20_000)

            def refuses():
                try:
                    assert values(old) == [b"1"]
                except PlainsongError as error:
                    assert (error.code, error.outcome) == ("replication_unavailable", "not-applied")
                    return True
                return False

            eventually("polls are refused", refuses)
            with site.client("b", deadline_s=120) as client:
                eventually("the standby serves", lambda: serves(site.url("b")))
                client.publish("orders", [b"2"])
            assert refuses()
            assert waiting.result() == (503, "replication_unavailable")
            assert counted(cut_off.url("a"), "poll", 503) > 0
            assert not serves(cut_off.url("a"))
            for path in ("/v1/topics", "/v1/namespaces/default/topics", "/v1/definitions", "/metrics/topics"):
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    urllib.request.urlopen(cut_off.url("a") + path)
            site.ports["a"] = cut_off.ports["a"]
            with haproxy(site, tmp_path) as balanced, Client(balanced) as client:
                eventually("it answers", lambda: serves(balanced))
                assert all(values(client) == [b"1", b"2"] for _ in range(4))
            proxy.restore()
            assert first.wait() == Exit.DEPOSED
            with site.client("b") as client:
                assert values(client) == [b"1", b"2"]


@pytest.mark.parametrize("turn", range(ROUNDS or 1))
def test_after_a_kill_one_of_two_standbys_takes_over_and_clients_with_all_urls_find_it(leased, turn):
    site, random = leased, Random(turn)
    with (
        site.daemon("a") as first,
        site.standby("b"),
        site.standby("c"),
        site.client("a", "b", "c", deadline_s=120) as client,
    ):
        client.create_topic("orders")
        sure = [b"%d" % number for number in range(random.randrange(1, 20))]
        client.publish("orders", sure)
        eventually("everything counts", lambda: all_counts(site.url("a")))
        for name in "bc":
            eventually("the standby follows", lambda name=name: follows(site.url(name), site.url("a")))
        eventually("the primary has noticed both", lambda: is_automatic(site.url("a"), 2))
        first.kill()
        client.publish("orders", [b"after"])
        assert values(client) == [*sure, b"after"]
        winner, other = "bc" if serves(site.url("b")) else "cb"
        eventually("the other follows", lambda: follows(site.url(other), site.url(winner)))
        assert sorted(role(site.url(name)) for name in "bc") == ["primary", "standby"]


def test_a_switch_is_refused_while_no_standby_is_allowed_or_registered(site):
    for setting, why in (("never", "no standby could take over"), ("allowed", "no standby is registered")):
        with site.daemon("a", f"replication.standby={setting}") as daemon, site.client("a") as client:
            eventually("everything counts", lambda: all_counts(site.url("a")))
            done = run_plainsong("replica", "switch", "--url", site.url("a"))
            assert done.returncode == Exit.FAILED
            assert why in done.stderr
            client.create_topic(f"still-{setting}")
            assert serves(site.url("a"))
            daemon.stop()


def test_leaving_on_a_standbys_directory_is_refused_and_the_log_of_its_primary_continues(site):
    with site.daemon("a"), site.client("a") as client:
        client.create_topic("orders")
        with site.standby("b") as standby:
            eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))
            standby.stop()
        options = ("--data-dir", site.tmp_path / "b", "--set", f"replication.to={site.place[0]}")
        done = run_plainsong("replica", "leave", *options, environ={**clean_environ(), **site.place[1]})
        assert done.returncode == Exit.STORE
        assert "leaving would end the log of its primary" in done.stderr
        client.publish("orders", [b"counts"])
        eventually("everything counts", lambda: all_counts(site.url("a")))
        with site.standby("b"):
            eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))


def test_a_standby_without_a_primary_and_an_object_store_is_served_alone_by_the_rules_of_a_restore(site):
    with site.daemon("a") as first, site.standby("b") as standby, site.client("a") as client:
        client.create_topic("orders")
        transaction = client.transactions.begin(timeout_s=600)
        client.publish("orders", [b"open"], transaction=transaction)
        for value in (b"1", b"2"):
            client.publish("orders", [value])
            eventually("everything counts", lambda: all_counts(site.url("a")))
            eventually("the standby follows", lambda: follows(site.url("b"), site.url("a")))
        first.kill()
        standby.stop()
    directory = site.tmp_path / "b"
    options, record = ("--without-seal", "--data-dir", directory), read_record(directory)
    write_record(directory, replace(record, until=1_000_000))
    done = run_plainsong("replica", "leave", *options)
    assert done.returncode == Exit.STORE
    assert "consistent only from commit 1000000" in done.stderr
    assert read_record(directory).standby
    write_record(directory, record)
    site.replica("leave", *options)
    with Daemon(directory) as daemon, Client("http://{}:{}".format(*daemon.address)) as client:
        with pytest.raises(PlainsongError):
            client.transactions.commit(transaction)
        client.publish("orders", [b"3"])
        assert values(client) == [b"1", b"2", b"3"]


def test_leaving_right_after_a_take_over_applies_the_rules_of_a_restore_first(site):
    with site.daemon("a") as first, site.client("a") as client:
        client.create_topic("orders")
        transaction = client.transactions.begin(timeout_s=600)
        client.publish("orders", [b"open"], transaction=transaction)
        eventually("everything counts", lambda: all_counts(site.url("a")))
        first.stop()
    directory = site.tmp_path / "a"
    write_record(directory, replace(read_record(directory), settle=Settle(1, 0)))
    site.replica("leave", "--data-dir", directory, "--set", f"replication.to={site.place[0]}")
    with Daemon(directory) as daemon, Client("http://{}:{}".format(*daemon.address)) as client:
        with pytest.raises(PlainsongError):
            client.transactions.commit(transaction)
        assert values(client) == []


def test_a_take_over_whose_command_has_ended_while_the_object_store_was_away_deposes_no_primary(tmp_path, place):
    url, environ = place
    with S3Proxy(environ) as proxy:
        cut_off, site = (Site(tmp_path, (url, each), *BY_HAND) for each in (proxy.environment, environ))
        with site.daemon("a"), cut_off.standby("b"), site.client("a") as client:
            client.create_topic("orders")
            eventually("the standby follows", lambda: follows(cut_off.url("b"), site.url("a")))
            proxy.cut_off()
            with socket.create_connection(("127.0.0.1", cut_off.ports["b"])) as asking:
                asking.sendall(
                    b"POST /v1/replication/takeover HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
                )
                eventually("the standby notices", lambda: state(cut_off.url("b"))["error"])
            proxy.restore()
            client.publish("orders", [b"1"])
            eventually("everything counts", lambda: all_counts(site.url("a")))
            eventually("the standby follows", lambda: follows(cut_off.url("b"), site.url("a")))
            assert state(cut_off.url("b"))["role"] == "standby"
            client.publish("orders", [b"2"])


def test_a_primary_that_was_cut_off_while_a_copy_of_its_directory_took_over_ends_and_names_what_it_alone_has(
    tmp_path, place
):
    url, environ = place
    with S3Proxy(environ) as proxy:
        cut_off, site = (Site(tmp_path, (url, each), *BY_HAND) for each in (proxy.environment, environ))
        with cut_off.daemon("a") as first:
            with cut_off.client("a") as client:
                client.create_topic("orders")
                client.publish("orders", [b"1"])
                eventually("everything counts", lambda: all_counts(cut_off.url("a")))
                proxy.cut_off()
                copied_at_once(tmp_path / "a", tmp_path / "b")
                (tmp_path / "b" / "plainsong.lock").unlink()
                client.publish("orders", [b"only here"])
            with site.daemon("b"), site.client("b") as client:
                assert values(client) == [b"1"]
                client.publish("orders", [b"2"])
                eventually("everything counts", lambda: all_counts(site.url("b")))
                proxy.restore()
                assert first.wait() == Exit.DEPOSED
                assert "has taken over in epoch 2; up to 1 commit may exist only in this directory" in first.errors
                with pytest.raises(DaemonEnded, match="1 commit of this directory never counted"):
                    site.daemon("a").start()
                assert json.loads(site.replica("status", url, "--json"))["primary"]["epoch"] == 2
                assert values(client) == [b"1", b"2"]


def test_status_names_the_primary_and_its_registered_standbys(site):
    with site.daemon("a"), site.standby("b"):
        eventually("the standby is registered", lambda: state(site.url("a"))["standbys"])
        shown = json.loads(site.replica("status", site.place[0], "--json"))
        assert shown["primary"]["urls"] == [site.url("a")]
        (standby,) = shown["standbys"]
        assert standby["holder"]
        assert shown["automatic"] is False  # lease_s is 0
        text = site.replica("status", site.place[0])
        assert f"primary {shown['primary']['holder']} at {site.url('a')}, epoch 1" in text
        assert f"standby {standby['holder']}, commit {standby['lastCommit']} or later" in text
        assert "standbys take over by hand" in text
