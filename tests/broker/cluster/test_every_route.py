"""Requests to every route with every verb, at a topic's owner, at another instance, and at front ends.

The verbs that each operation needs are listed here as well, so that a route that is declared with a weaker verb fails
the test. The daemons come from ``daemons``, with a real ZooKeeper, links that require a secret, and front ends in
separate processes.
"""

from __future__ import annotations

import re
import secrets
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio

from broker.api.routes import ROUTES
from broker.config.sections import Ensemble
from broker.security.files import write_guarded
from broker.security.identity import VERBS
from broker.security.tokens import TokenEntry, format_tokens, hash_of, id_of, new_token
from tests.broker.cluster.daemons import TOPICS, daemons
from tests.patience import PATIENCE_S
from tests.security.named import PLACES

LOOK = "inspect poll publish admin operate"
#: For each operation, the verbs, any of which suffices, and the object on which it is needed.
CONTRACT = {
    "list_topics": ("publish poll inspect transact operate admin", "within"),
    "create_topic": ("admin", "topic"),
    "get_topic": (LOOK, "topic"),
    "delete_topic": ("admin", "topic"),
    "set_properties": ("admin", "topic"),
    "undelete_topic": ("admin", "topic"),
    "set_aside": ("admin", "topic"),
    "get_chain": (LOOK, "topic"),
    "list_chain": ("poll", "topic"),
    "publish": ("publish", "topic"),
    "store": ("publish", "topic"),
    "rollback": ("publish operate", "topic"),
    "poll": ("poll", "topic"),
    "follow": ("poll", "topic"),
    "get_messages": ("poll inspect", "topic"),
    "get_message": ("poll inspect", "topic"),
    "get_stats": (LOOK, "topic"),
    "get_lag": (LOOK, "topic"),
    "get_history": (LOOK, "topic"),
    "offsets": ("poll inspect", "topic"),
    "stream": ("publish", "topic"),
    "list_readers": (LOOK, "topic"),
    "get_reader": (LOOK, "topic"),
    "put_reader": ("poll", "topic"),
    "delete_reader": ("admin", "topic"),
    "poll_many": ("poll", "topics"),
    "list_producers": (LOOK, "topic"),
    "open_producer": ("publish", "topic"),
    "open_producer_by_name": ("publish", "topic"),
    "get_producer": (LOOK, "topic"),
    "delete_producer": ("admin", "topic"),
    "maintain": ("operate", "topic"),
    "list_all_topics": ("", "name"),
    "get_attention": ("", "name"),
    "get_events": ("", "name"),
    "list_namespaces": ("", "name"),
    "get_namespace": ("inspect", "namespace"),
    "set_namespace": ("admin", "namespace"),
    "begin": ("transact", "service"),
    "list_transactions": ("transact inspect", "service"),
    "get_pruning": ("transact inspect", "service"),
    "truncate": ("operate", "service"),
    "get_transaction": ("transact inspect", "service"),
    "prepare": ("transact operate", "service"),
    "commit": ("transact operate", "service"),
    "abort": ("transact operate", "service"),
    "invalidate": ("transact operate", "service"),
    "checkpoint": ("transact operate", "service"),
    "get_cluster": ("inspect", "service"),
    "drain_instance": ("operate", "service"),
    "undrain_instance": ("operate", "service"),
    "pin_topic": ("operate", "service"),
    "unpin_topic": ("operate", "service"),
    "begin_backup": ("operate", "service"),
    "list_backup_objects": ("operate", "service"),
    "get_backup_object": ("operate", "service"),
    "end_backup": ("operate", "service"),
    "get_definitions": ("inspect", "service"),
    "put_definitions": ("", "name"),
    "get_replication": ("inspect", "service"),
    "take_over": ("operate", "service"),
    "switch_primary": ("operate", "service"),
    "start_scrub": ("operate", "service"),
    "get_scrub": ("inspect", "service"),
    "ping": ("", "nobody"),
    "livez": ("", "nobody"),
    "readyz": ("", "nobody"),
    "root": ("", "nobody"),
    "console": ("", "nobody"),
    "console_file": ("", "nobody"),
    "security_txt": ("", "nobody"),
    "console_slash": ("", "nobody"),
    "metrics": ("inspect", "service"),
    "topic_metrics": ("inspect", "service"),
    "version": ("inspect", "service"),
    "explain_error": ("", "name"),
    "whoami": ("", "name"),
    "openapi": ("", "name"),
    "asyncapi": ("", "name"),
}
#: Names, and each name's verbs with their objects.
GRANTED = {
    **{verb: (verb, "ns:* service") for verb in VERBS},
    "everything-on-topics": ("all", "ns:*"),
    "everything-on-one-topic": ("all", "ns:one-topic"),
    "everything-on-the-service": ("all", "service"),
    "everything-elsewhere": ("all", "other:*"),
    "nothing": ("", ""),
}
NO_IDENTITY = "nobody"
#: Bodies whose requests cannot succeed.
BODIES = {"begin": "{}"}
#: Headers that may differ between equal answers.
ALTERS = ("date", "x-request-id", "connection")


def may(name, route):
    """True if the contract allows a name to use a route."""
    verbs, on = CONTRACT[route]
    if on in ("nobody", "topics"):
        return True
    if name == NO_IDENTITY:
        return False
    if on == "name":
        return True
    held, places = GRANTED[name]
    has_verb = bool(held) and (held == "all" or held in verbs.split())
    if on == "service":
        return has_verb and "service" in places.split()
    if on == "topic":
        return has_verb and "ns:*" in places.split()
    if on == "within":
        return has_verb and places.startswith("ns:")
    return has_verb and "ns:*" in places.split()


def test_every_route_needs_the_rights_in_the_contract():
    assert {route.name: (set(route.verbs), route.on) for route in ROUTES} == {
        route.name: (set(CONTRACT[route.name][0].split()), CONTRACT[route.name][1]) for route in ROUTES
    }


@pytest.fixture
def ensemble(zookeeper):
    return Ensemble(zookeeper.address, "/of-every-route")


@asynccontextmanager
async def named_cluster(ensemble, monkeypatch, folder):
    """Run instances ``a`` and ``b``, the second with front ends; each owns an existing topic and a nonexistent one."""
    tokens = {name: new_token(secrets.choice) for name in (*GRANTED, "walker")}
    hashes = {name: hash_of(token) for name, token in tokens.items()}
    entries = [TokenEntry(id_of(hashed), name, hashed, 0, None) for name, hashed in hashes.items()]
    write_guarded(folder / "tokens.json", format_tokens(entries))
    grants = ["format = 1", _grant("walker", "all", "*:* service")]
    grants += [_grant(name, verbs, on) for name, (verbs, on) in GRANTED.items() if verbs]
    write_guarded(folder / "grants.toml", "\n".join(grants).encode())
    write_guarded(folder / "secret", b"0123456789abcdef" * 4)
    settings = {
        "security.authentication": "required",
        "security.tokens_file": str(folder / "tokens.json"),
        "security.grants_file": str(folder / "grants.toml"),
        "cluster.secret_file": str(folder / "secret"),
        "transactions.service": "embedded",
    }
    async with daemons(ensemble, monkeypatch, **settings) as each:
        for name, more in (("a", {}), ("b", {"http.processes": 2})):
            daemon = await each.start(name, **more)
            daemon.http.headers["Authorization"] = f"Bearer {tokens['walker']}"
        await each.together()
        for name in "ab":
            for kind in ("exists", "absent"):
                await each["a"].call("PUT", f"/v1/cluster/pins/ns/{kind}-{name}", json={"instance": name})
        for name in "ab":
            with trio.fail_after(PATIENCE_S):
                while {await each[at].owner(f"exists-{name}") for at in "ab"} != {name}:
                    pass  # the other instance sees a pin a moment later
            await each[name].call("PUT", f"{TOPICS}/exists-{name}", json={})
        monkeypatch.setattr("broker.cluster.owners.PATIENCE_S", 2.0)  # the walk also requests topics without an owner
        yield each, tokens


def _grant(name, verbs, on):
    listed = ", ".join(f'"{each}"' for each in on.split())
    return f'[[grant]]\nto = ["{name}"]\nverbs = ["{verbs}"]\non = [{listed}]'


def _path(route, topic):
    return re.sub(r"\{(\w+)\}", lambda place: PLACES.get(place[1], topic), route.path)


class Walk:
    """Sends requests as one name to one instance, and records every wrong answer."""

    def __init__(self, http, at, name, wrong):
        self._http, self._at, self._name, self._wrong = http, at, name, wrong
        self._other = "b" if at == "a" else "a"
        self.asked = 0

    async def every_route(self):
        for route in ROUTES:
            if not may(self._name, route.name):
                await self._refused(route)
            elif route.on == "topics":
                await self._asks_for_many(route)
            else:
                for owner in "ab" if "{topic}" in route.path else "a":
                    # Sent to a topic that does not exist, so that the request changes nothing.
                    answer = await self._ask(route, f"absent-{owner}")
                    if answer.status_code in (401, 403) or answer.status_code == 500:
                        self._note(route, answer, "let in")

    async def _refused(self, route):
        expected = 401 if self._name == NO_IDENTITY else 403
        topics = [f"exists-{self._other}", f"absent-{self._at}"]
        if self._name == "nothing":
            topics += [f"exists-{self._at}", f"absent-{self._other}"]
        said = set()
        for topic in topics if "{topic}" in route.path and "pins" not in route.path else topics[-1:]:
            answer = await self._ask(route, topic)
            if answer.status_code != expected:
                self._note(route, answer, f"refused with {expected}")
            # Sorted, because the listeners order headers differently.
            kept = sorted(each for each in answer.headers.multi_items() if each[0] not in ALTERS)
            said.add(f"{kept} {answer.text}".replace(topic, "T"))
            challenge = answer.headers.get("www-authenticate", "")
            wants = 'Bearer realm="plainsong"' if expected == 401 else 'error="insufficient_scope", scope="'
            if wants not in challenge:
                self._note(route, answer, "challenged")
        if len(said) > 1:
            self._wrong.append((self._at, self._name, route.name, "the same whatever exists", said))

    async def _asks_for_many(self, route):
        """Check that each topic has its own answer, and that without a grant it does not depend on the topic."""
        topics = {f"{kind}-{owner}": {} for kind in ("exists", "absent") for owner in "ab"}
        answer = await self._http.post("/v1/namespaces/ns/poll", json={"topics": topics})
        self.asked += 1
        if self._name == NO_IDENTITY:
            if answer.status_code != 401:
                self._note(route, answer, "refused with 401")
            return
        held, on = GRANTED[self._name]
        for topic, found in answer.json()["topics"].items():
            may_poll = held in ("poll", "all") and ("ns:*" in on.split() or f"ns:{topic}" in on.split())
            code = found.get("error", {}).get("code")
            wanted = "forbidden" if not may_poll else "topic_not_found" if topic.startswith("absent") else None
            if code != wanted:
                self._wrong.append((self._at, self._name, topic, wanted, found))

    async def _ask(self, route, topic):
        self.asked += 1
        content = None if route.method == "GET" else BODIES.get(route.name, "[]")
        request = self._http.build_request(
            route.method, _path(route, topic), content=content, headers={"Content-Type": "application/json"}
        )
        answer = await self._http.send(request, stream=True)
        if "event-stream" not in answer.headers.get("content-type", ""):
            await answer.aread()
        await answer.aclose()
        return answer

    def _note(self, route, answer, wanted):
        self._wrong.append((self._at, self._name, route.name, wanted, answer.status_code, answer.text))


async def test_every_name_is_allowed_with_the_verb_and_refused_without_it_at_any_instance(
    ensemble, monkeypatch, tmp_path
):
    async with named_cluster(ensemble, monkeypatch, tmp_path) as (each, tokens):
        wrong, walks = [], []

        async def walk(at, name):
            headers = {} if name == NO_IDENTITY else {"Authorization": f"Bearer {tokens[name]}"}
            options = {"verify": False, "timeout": 2 * PATIENCE_S, "headers": headers}
            async with httpx.AsyncClient(base_url=each[at].address, **options) as http:
                walks.append(Walk(http, at, name, wrong))
                await walks[-1].every_route()

        for at in "ab":
            async with trio.open_nursery() as nursery:
                for name in (*GRANTED, NO_IDENTITY):
                    nursery.start_soon(partial(walk, at, name))
        assert wrong == [], "\n".join(map(str, wrong))
        assert len(walks) == 2 * (len(GRANTED) + 1)
        assert all(each.asked > len(ROUTES) for each in walks)
