"""ZooKeeper for the event loop: sessions, small nodes and watches; and the nodes of a cluster.

    away ──► connected ──► away …        the library reconnects on its own, in its own threads
                 │
                 └── another session     the previous one expired: its ephemeral nodes and its watches are gone

A library client that has been disconnected for longer than a session can live is replaced. It might never reconnect: a
server refuses a client that has seen more than the server has, for example after the server lost its data.

Every call has a deadline, and is made only while connected. Every event, of the connection or of a node, calls
``on_event``; its owner then reads all nodes again.
"""

from __future__ import annotations

import json
import logging
import ssl
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import trio
from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NodeExistsError,
    NoNodeError,
    SessionExpiredError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.retry import KazooRetry
from kazoo.security import make_digest_acl

from broker.security.files import FileUnusable, read_named
from plainsong.protocol.cluster import SLICES, Member, NameTaken, Placement, UnreadablePlacement
from plainsong.protocol.errors import ClusterUnavailable
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from broker.config.sections import ClusterConfig

log = logging.getLogger(__name__)
#: The library logs every attempt to connect; this module logs what operators need.
_quiet = logging.getLogger(f"{__name__}.library")
_quiet.setLevel(logging.CRITICAL)
#: The time-out of a call; reading one of our nodes takes a millisecond.
CALL_TIMEOUT_S = 5.0
#: The time-out of closing a session; the ensemble then expires it.
STOP_TIMEOUT_S = 2.0
#: The library's client is replaced after this many session time-outs without an answer.
RENEW_SESSIONS = 2
#: The library's errors for a missing answer; all other errors are answers.
_NOT_ANSWERED = (ConnectionClosedError, ConnectionLoss, SessionExpiredError)


class Disconnected(Exception):
    """There is no connection, or no answer in time; a change may or may not have happened."""


#: The largest size of an auth file.
MAX_AUTH_BYTES = 4096


class Exists(Exception):
    """The node already exists."""


class Changed(Exception):
    """The node has a different version from the expected one, or no longer exists."""


class Node(NamedTuple):
    """A node as read."""

    value: bytes
    version: int
    session: int
    """The session that owns an ephemeral node; 0 for any other."""
    created: int = 0
    """The ZooKeeper transaction that created it: smaller for older nodes."""


def access_of(cluster: ClusterConfig) -> dict[str, Any]:
    """Return the client's arguments for authentication and TLS. Raises FileUnusable."""
    access: dict[str, Any] = {}
    if cluster.zookeeper_auth_file:
        name, secret = _digest(cluster.zookeeper_auth_file)
        # Only clients with the password can access nodes created from now on.
        access |= {
            "auth_data": [("digest", f"{name}:{secret}")],
            "default_acl": [make_digest_acl(name, secret, all=True)],
        }
    if cluster.zookeeper_tls:
        access |= {"use_ssl": True, "verify_certs": True, "ca": cluster.zookeeper_ca}
        access |= {"certfile": cluster.zookeeper_certificate or None, "keyfile": cluster.zookeeper_key or None}
    return access


def _digest(path: str) -> tuple[str, str]:
    setting = "cluster.zookeeper_auth_file"
    data = read_named(setting, path, MAX_AUTH_BYTES, "digest USER:PASSWORD, chmod 600")
    scheme, _, given = data.decode("utf-8", "replace").strip().partition(" ")
    name, colon, secret = given.partition(":")
    if scheme != "digest" or not (colon and name and secret) or not given.isprintable():
        raise FileUnusable(setting, f"{path} is not one line of digest USER:PASSWORD")
    return name, secret


class ZooKeeper:
    """A client of one ensemble; use it with ``async with``."""

    def __init__(
        self,
        hosts: str,
        *,
        session_timeout_s: float,
        on_event: Callable[[], None],
        access: Mapping[str, Any] | None = None,
    ) -> None:
        """``on_event``: called on the event loop; earlier reads may be out of date. ``access``: see ``access_of``."""
        self._access = dict(access or {})
        self._on_event = on_event
        self._hosts = hosts
        self._session_timeout_s = session_timeout_s
        self._client = self._new_client()
        self._token: trio.lowlevel.TrioToken | None = None
        self._unanswered_since_s: float | None = None
        self.connected = False
        #: The current session; 0 before the first.
        self.session = 0

    def __repr__(self) -> str:
        return f"<ZooKeeper {'connected' if self.connected else 'away'} session={self.session:#x}>"

    async def __aenter__(self) -> Self:
        self._token = trio.lowlevel.current_trio_token()
        await in_thread(self._client.start_async)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the session, so that its ephemeral nodes disappear immediately."""
        with trio.move_on_after(STOP_TIMEOUT_S, shield=True):
            await in_thread(_stop, self._client, abandon_on_cancel=True, max_wait_s=inf)

    def _new_client(self) -> KazooClient:
        client = KazooClient(
            hosts=self._hosts,
            timeout=self._session_timeout_s,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=1.0, max_jitter=0.2),
            logger=_quiet,
            handler=_TlsHandler() if self._access.get("use_ssl") else None,
            **self._access,
        )
        client.add_listener(partial(self._state_in_thread, client))
        return client

    async def renew(self) -> None:
        """Replace the library's client if its session is over; call it while calls fail."""
        since_s, now_s = self._unanswered_since_s, trio.current_time()
        if since_s is None or now_s - since_s < RENEW_SESSIONS * self._session_timeout_s:
            return
        before, self._client = self._client, self._new_client()
        self.connected, self._unanswered_since_s = False, now_s
        log.info("zookeeper is asked for another session", extra={"session": f"{self.session:#x}"})
        with trio.move_on_after(STOP_TIMEOUT_S):
            await in_thread(_stop, before, abandon_on_cancel=True, max_wait_s=inf)
        await in_thread(self._client.start_async, max_wait_s=inf)

    # --- calls ------------------------------------------------------------------------------------

    async def get(self, path: str) -> Node | None:
        """Read and watch a node; None if it does not exist, which is watched, too. Raises Disconnected."""
        while True:
            try:
                value, stat = await self._call(lambda: self._client.get_async(path, watch=self._event_in_thread))
                return Node(value, stat.version, stat.ephemeralOwner, stat.czxid)
            except NoNodeError:
                pass
            if await self._call(lambda: self._client.exists_async(path, watch=self._event_in_thread)) is None:
                return None

    async def children(self, path: str) -> list[str]:
        """Read and watch the names of a node's children; empty if it does not exist. Raises Disconnected."""
        try:
            names: list[str] = await self._call(
                lambda: self._client.get_children_async(path, watch=self._event_in_thread)
            )
        except NoNodeError:
            await self._call(lambda: self._client.exists_async(path, watch=self._event_in_thread))
            return []
        return sorted(names)

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False) -> None:
        """Create a node, and its missing parents. Raises Exists, Disconnected."""
        try:
            await self._call(
                lambda: self._client.create_async(path, value, ephemeral=ephemeral, makepath=True),
            )
        except NodeExistsError:
            raise Exists(path) from None

    async def set(self, path: str, value: bytes, version: int) -> None:
        """Replace the value of a node that has not changed since ``version``. Raises Changed, Disconnected."""
        try:
            await self._call(lambda: self._client.set_async(path, value, version=version))
        except (BadVersionError, NoNodeError):
            raise Changed(path) from None

    async def delete(self, path: str, version: int = -1) -> None:
        """Delete a node if it exists and has not changed since ``version``. Raises Changed, Disconnected."""
        try:
            await self._call(lambda: self._client.delete_async(path, version=version))
        except NoNodeError:
            pass
        except BadVersionError:
            raise Changed(path) from None

    async def _call(self, begin: Callable[[], Any]) -> Any:
        if self._unanswered_since_s is None:
            self._unanswered_since_s = trio.current_time()
        if not self.connected:
            await trio.lowlevel.checkpoint()
            raise Disconnected("ZooKeeper is not connected")
        answered = trio.Event()
        result = begin()
        result.rawlink(lambda _: self._run(answered.set))
        with trio.move_on_after(CALL_TIMEOUT_S):
            await answered.wait()
        if not answered.is_set():
            raise Disconnected(f"ZooKeeper has not answered for {CALL_TIMEOUT_S:g} s")
        if not isinstance(result.exception, _NOT_ANSWERED):
            self._unanswered_since_s = None
        try:
            return result.get(block=False)
        except (NoNodeError, NodeExistsError, BadVersionError):
            raise
        except KazooException as error:
            raise Disconnected(f"ZooKeeper: {str(error) or type(error).__name__}") from error

    # --- called in threads of the library ---------------------------------------------------------

    def _state_in_thread(self, client: KazooClient, state: str) -> None:
        session = client.client_id
        self._run(self._on_state, client, state == KazooState.CONNECTED, 0 if session is None else session[0])

    def _event_in_thread(self, event: object) -> None:
        del event
        self._run(self._on_event)

    def _run(self, call: Callable[..., object], *args: object) -> None:
        assert self._token is not None
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(call, *args)

    def _on_state(self, client: KazooClient, connected: bool, session: int) -> None:
        if client is not self._client:
            return  # a replaced client
        self.connected = connected
        if connected:
            self.session = session
        self._on_event()


class _TlsHandler(SequentialThreadingHandler):  # type: ignore[misc]  # the library has no types
    """Makes the library read all decrypted data of a TLS record.

    A watch's event and the answer that follows may share a record, if a proxy packs them together. The library (2.11)
    reads one of them and then waits for the socket, which has no more data: the answer would be read only after the
    next ping.
    """

    def select(
        self, reads: Sequence[Any], writes: Sequence[Any], errors: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the ready sockets, including those with decrypted data."""
        decrypted = [each for each in reads if isinstance(each, ssl.SSLSocket) and each.pending()]
        ready, writable, failed = super().select(reads, writes, errors, 0 if decrypted else timeout)
        return [*ready, *(each for each in decrypted if each not in ready)], writable, failed


def _stop(client: KazooClient) -> None:
    client.state_listeners.clear()  # stopping is not an event
    with suppress(Exception):  # the ensemble may be unavailable
        client.stop()
        client.close()


# --- nodes -----------------------------------------------------------------------------------------
#
# <path>/instances/<name>   ephemeral: {"address": "host:port", "weight": 100, "leaving": false, "slices": 64, "proof": ""}
# <path>/placement          the operators' pins and drains, changed by compare-and-set


#: Attempts at a change that collides with those of other instances.
ATTEMPTS = 20


class Nodes:
    """The nodes below one path; every call may raise Disconnected."""

    def __init__(self, zookeeper: ZooKeeper, path: str) -> None:
        self._zookeeper = zookeeper
        self._instances = f"{path}/instances"
        self._placement = f"{path}/placement"
        #: Our sessions, which may have expired: a node of one of them is our own, and is deleted.
        self._sessions: deque[int] = deque(maxlen=16)

    async def members(self) -> list[Member]:
        """Return all instances, sorted by name; their nodes are read concurrently."""
        names = await self._zookeeper.children(self._instances)
        found: dict[str, Member] = {}
        failed: list[Disconnected] = []

        async def read(name: str) -> None:
            try:
                node = await self._zookeeper.get(f"{self._instances}/{name}")
            except Disconnected as error:
                failed.append(error)
                return
            member = None if node is None else decode_member(name, node.value)
            if node is not None and member is not None:
                found[name] = replace(member, since=node.created)

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(read, name)
        if failed:
            raise failed[0]
        return [found[name] for name in names if name in found]

    async def placement(self) -> Placement:
        """Return the pins and drains; none if they cannot be decoded."""
        node = await self._zookeeper.get(self._placement)
        return Placement() if node is None else _decoded(node.value)

    async def change_placement(self, edit: Callable[[Placement], Placement]) -> Placement:
        """Edit the placement; return its current value. Raises ClusterUnavailable, and any error of ``edit``."""
        for _ in range(ATTEMPTS):
            node = await self._zookeeper.get(self._placement)
            before = Placement() if node is None else _decoded(node.value)
            after = edit(before)
            if after == before:
                return after
            write = (
                partial(self._zookeeper.create, self._placement, after.encode())
                if node is None
                else partial(self._zookeeper.set, self._placement, after.encode(), node.version)
            )
            try:
                await write()
            except (Changed, Exists):
                continue
            return after
        raise ClusterUnavailable("other instances keep changing the placement", hint="nothing happened; retry")

    async def remove(self, name: str) -> None:
        """Delete our node of this name, if it belongs to one of our sessions."""
        path = f"{self._instances}/{name}"
        node = await self._zookeeper.get(path)
        if node is not None and node.session in self._sessions:
            with suppress(Changed):
                await self._zookeeper.delete(path, node.version)

    async def keep(self, me: Member, *, first: bool) -> None:
        """Create our node in this session, or update it.

        Args:
          first: True if this process has had no node yet; one with our address was then left by an ended process.
        Raises:
          NameTaken: the node belongs to another instance.
        """
        path, value = f"{self._instances}/{me.name}", encode_member(me)
        for _ in range(ATTEMPTS):
            session = self._zookeeper.session
            if session not in self._sessions:
                self._sessions.append(session)
            node = await self._zookeeper.get(path)
            try:
                if node is None:
                    await self._zookeeper.create(path, value, ephemeral=True)
                elif node.session == session:
                    if node.value != value:
                        await self._zookeeper.set(path, value, node.version)
                    return
                else:
                    other = decode_member(me.name, node.value)
                    address = "an unknown address" if other is None else other.address
                    if node.session not in self._sessions and not (first and address == me.address):
                        raise NameTaken(me.name, address)
                    await self._zookeeper.delete(path, node.version)
            except (Changed, Exists):
                pass
        raise Disconnected("the node of this instance keeps changing")


def encode_member(member: Member) -> bytes:
    fields: dict[str, object] = {
        "address": member.address,
        "weight": member.weight,
        "leaving": member.leaving,
        "slices": member.slices,
    }
    if member.proof is not None:
        fields["proof"] = member.proof
    return json.dumps(fields).encode()


def decode_member(name: str, value: bytes) -> Member | None:
    """Decode an instance's node; None, with a log line, if it is malformed."""
    try:
        fields = json.loads(value)
        address, weight, leaving = fields["address"], fields["weight"], bool(fields["leaving"])
        # Versions without slices take part in all of them or in none.
        slices = fields.get("slices", 0 if leaving else SLICES)
        proof = fields.get("proof")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        address, weight, leaving, slices, proof = None, 0, False, 0, None
    if isinstance(address, str) and isinstance(weight, int) and weight >= 1 and slices in range(SLICES + 1):
        return Member(name, address, weight, leaving, int(slices), proof if isinstance(proof, str) else None)
    log.warning("node of an instance unreadable", extra={"instance": name, "value": repr(value[:80])})
    return None


def _decoded(value: bytes) -> Placement:
    try:
        return Placement.decode(value)
    except UnreadablePlacement as error:
        log.warning("placement unreadable: no pins, no drains", extra={"why": str(error)})
        return Placement()
