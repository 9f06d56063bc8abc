"""The guard: authenticates and authorizes every request before any of its body is read.

Its tables are replaced as a whole, and its epoch grows with every event that could change a decision: a reloaded file,
an expired credential. Listeners cache an admission while the epoch is unchanged; long waits are checked again when it
changes.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import trio

from broker.security.grants import NO_GRANTS, SYSTEM, GrantTable
from broker.security.identity import ANONYMOUS, NO_IDENTITY, Identity
from broker.security.quotas import Quotas
from broker.security.rights import EVERYTHING, NOTHING, Decisions, Rights, bits_of
from broker.security.tokens import NO_TOKENS, PREFIX, TokenTable, fault_of, hash_of
from plainsong.protocol.errors import Forbidden, InvalidParameter, PlainsongError, Unauthenticated
from storage.clock import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import NoReturn

    from broker.security.identity import On, Verb
    from broker.security.peer import Peer

METRICS_PATH = "/metrics"
_FOR_EVERYBODY = frozenset(("/", "/ping", "/livez", "/readyz", "/console", "/.well-known/security.txt"))
REALM = 'Bearer realm="plainsong"'
#: Longer credentials are refused unread.
MAX_CREDENTIAL_BYTES = 8 << 10
#: Interval between checks for expired credentials: half of the documented delay.
LOOK_S = 1.0
#: Names whose rights are cached; the cache is cleared when it is full.
MAX_NAMES = 10_000
#: With ``ifNotExists`` these change nothing about an existing topic, so any verb on it is enough. In all other cases
#: the handler refuses a name without the route's verb.
_DECLARES = frozenset({"create_topic"})
#: The topic of the audit. Only the daemon writes it.
AUDIT_TOPIC = "audit"
_AUDIT_WRITES = frozenset(
    (
        "create_topic",
        "undelete_topic",
        "publish",
        "store",
        "rollback",
        "stream",
        "set_properties",
        "delete_topic",
        "open_producer",
        "open_producer_by_name",
        "delete_producer",
        "set_aside",
    )
)
_DESCRIPTION = re.compile(r"[^\x20-\x21\x23-\x5b\x5d-\x7e]")
_QUERY_TOKEN = re.compile(r"(?:^|&)(?:access_)?token=")
_QUOTABLE = re.compile(r"[A-Za-z0-9_-]{1,255}")


@dataclass(frozen=True, slots=True)
class Admission:
    """An admitted client and its rights. Valid while the guard's epoch is ``epoch``."""

    who: Identity
    rights: Rights
    epoch: int


#: For every request while authentication is off, and for requests that need no name.
OPEN_ADMISSION = Admission(ANONYMOUS, EVERYTHING, 0)
NO_ADMISSION = Admission(NO_IDENTITY, NOTHING, -1)


class Provider(Protocol):
    """Verifies the tokens of an OpenID provider."""

    def known(self, token: str, peer: Peer) -> Identity | None:
        """Return the identity of a token that was verified before and is still valid; None: it has to be verified.

        Raises:
          Unauthenticated: it is not valid on this connection.
        """
        ...

    async def verify(self, token: str, peer: Peer) -> Identity:
        """Return the identity of a token. Raises Unauthenticated, AuthenticationUnavailable."""
        ...

    @property
    def is_stale(self) -> bool:
        """True if the keys are too old: no token of the provider is accepted."""
        ...

    def problem_of(self, who: Identity) -> PlainsongError | None:
        """Return the error that an admitted client would get now; None if it would get none."""
        ...


class PeerNames(Protocol):
    """Names that the connection itself proves: of client certificates and of Unix peers."""

    def __call__(self, peer: Peer) -> Identity | None: ...


class GuardedRoute(Protocol):
    """The parts of a route that the guard reads; ``broker.http.route`` declares routes."""

    @property
    def name(self) -> str: ...
    @property
    def verbs(self) -> tuple[Verb, ...]: ...
    @property
    def on(self) -> On: ...


class Counters(Protocol):
    """Counts the guard's decisions."""

    def authenticated(self, via: str, result: str) -> None: ...
    def forbidden(self, verb: str) -> None: ...


class NoCounters:
    def authenticated(self, via: str, result: str) -> None: ...
    def forbidden(self, verb: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that the guard refused, for the audit."""

    error: PlainsongError
    who: Identity
    peer: Peer | None
    target: str
    request_id: str = ""


class Guard:
    """Authenticates clients and checks their rights.

    Args:
      required: ``security.authentication``; False: every request is allowed, as ``anonymous``.
      open_metrics: ``metrics.open``: ``GET /metrics`` requires no authentication.
    """

    def __init__(
        self,
        *,
        required: bool = False,
        open_metrics: bool = False,
        peer_names: PeerNames | None = None,
        counters: Counters | None = None,
        quotas: Quotas | None = None,
        now_ms: Callable[[], int] = now_ms,
    ) -> None:
        self.required = required
        self._open_metrics = open_metrics
        self.epoch = 0
        self.tokens: TokenTable = NO_TOKENS
        self.grants: GrantTable = NO_GRANTS
        self.provider: Provider | None = None
        #: Called with every refusal, to record it in the audit.
        self.on_refused: Callable[[RefusedRequest], None] = lambda refusal: None
        self._peer_names: PeerNames = peer_names or (lambda peer: None)
        #: Counts the decisions made here; in a daemon with front ends, also theirs.
        self.counters: Counters = counters or NoCounters()
        self._now_ms = now_ms
        self._rights: dict[tuple[str, tuple[str, ...], bool], Rights] = {}
        self._decisions: Decisions = {}
        #: The next expiry among credentials admitted since the epoch changed, and those of waiting requests.
        self._next_end_ms: int | None = None
        self._was_stale = False
        self.quotas = quotas or Quotas(time.monotonic)
        self._held: set[Hold] = set()
        self._moved = trio.Event()
        #: Writes the line of ``log.access`` for a request that is refused here: route, path, status, request id.
        self.on_answered: Callable[[str, str, int, str], None] = lambda route, path, status, request_id: None
        #: Counts answers that did not come from a handler.
        self.requested: Callable[[str, int, float], None] = lambda route, status, seconds: None

    # --- tables -----------------------------------------------------------------------------------

    def replace(self, *, tokens: TokenTable | None = None, grants: GrantTable | None = None) -> None:
        """Put new tables in force for all requests from now on, and check waiting ones again."""
        if tokens is not None:
            self.tokens = tokens
        if grants is not None:
            self.grants = grants
            self.quotas.replace(grants)
        self.expire()

    def expire(self) -> None:
        """Invalidate every cached decision: a credential may have expired, or a table changed."""
        self.epoch += 1
        self._rights.clear()
        self._decisions.clear()
        self._next_end_ms = None
        moved, self._moved = self._moved, trio.Event()
        moved.set()
        for hold in tuple(self._held):
            hold.look_again()
            if hold.problem is None:
                self._ends_at(hold.who)

    async def watch_ends(self) -> NoReturn:
        """Check every second for expired credentials, until cancelled."""
        while True:
            await trio.sleep(LOOK_S)
            self.expire_ended()

    def expire_ended(self) -> None:
        """Invalidate cached decisions if an admitted credential has expired, or the provider's keys are now too old."""
        is_stale = self.provider is not None and self.provider.is_stale
        was_stale, self._was_stale = self._was_stale, is_stale
        if (is_stale and not was_stale) or (self._next_end_ms is not None and self._next_end_ms <= self._now_ms()):
            self.expire()

    async def moved_from(self, epoch: int) -> None:
        """Wait until the epoch differs from this one."""
        while self.epoch == epoch:
            await self._moved.wait()

    # --- authentication ---------------------------------------------------------------------------

    def admit_now(self, headers: Mapping[str, str], peer: Peer) -> Admission | None:
        """Authenticate a request without waiting; None: call ``admit``.

        Raises:
          Unauthenticated: it has no credential, or an invalid one.
        """
        if not self.required:
            return OPEN_ADMISSION
        authorization = headers.get("authorization")
        if authorization is None:
            who = self._peer_names(peer)
            if who is None:
                self.counters.authenticated("none", "missing")
                raise _no_credential()
            if who.expires_ms is not None and who.expires_ms <= self._now_ms():
                raise self._refused(who.via, "the certificate has expired", result="expired")
            return self._admitted(who)
        token = self._bearer(authorization)
        if token.startswith(PREFIX):
            return self._admitted(self._of_token(token))
        if self.provider is None:
            raise self._refused("oidc", "the token was not issued by this daemon")
        known = self.provider.known(token, peer)
        return None if known is None else self._admitted(known)

    async def admit(self, headers: Mapping[str, str], peer: Peer) -> Admission:
        """Authenticate a request. Raises Unauthenticated, AuthenticationUnavailable."""
        admission = self.admit_now(headers, peer)
        if admission is not None:
            return admission
        assert self.provider is not None
        try:
            who = await self.provider.verify(self._bearer(headers["authorization"]), peer)
        except PlainsongError:
            self.counters.authenticated("oidc", "refused")
            raise
        return self._admitted(who)

    async def identify(self, headers: Mapping[str, str], query: str, peer: Peer, request_id: str) -> Admission:
        """Authenticate a request whose URL must not have a token. Raises PlainsongError, already recorded."""
        try:
            if self.required:
                refuse_query_token(query)
            return await self.admit(headers, peer)
        except PlainsongError as error:
            self.refused(RefusedRequest(error, NO_IDENTITY, peer, "service", request_id))
            raise

    def admission_of(self, who: Identity) -> Admission:
        """Return the admission of a client that another instance, or another process of this daemon, authenticated."""
        if not self.required:
            return OPEN_ADMISSION
        if not who.name or who is ANONYMOUS or who.name == ANONYMOUS.name:
            raise _no_credential()
        return self._admitted(who, count=False)

    def _bearer(self, authorization: str) -> str:
        scheme, _, token = authorization.partition(" ")
        token = token.strip(" ")
        if scheme.lower() != "bearer" or not token or len(token) > MAX_CREDENTIAL_BYTES:
            raise self._refused("token", "the Authorization header is not Bearer with a token")
        return token

    def _of_token(self, token: str) -> Identity:
        fault = fault_of(token)
        if fault is not None:
            raise self._refused("token", f"the token is malformed: {fault}")
        entry = self.tokens.by_hash.get(hash_of(token))
        if entry is None:
            raise self._refused("token", "unknown token")
        state = entry.state(self._now_ms())
        if state != "active":
            raise self._refused("token", f"the token is {state}", result=state)
        return Identity(entry.name, "token", entry.id, expires_ms=entry.expires_ms)

    def _admitted(self, who: Identity, *, count: bool = True) -> Admission:
        if count:
            self.counters.authenticated(who.via, "ok")
        self._ends_at(who)
        return Admission(who, self.rights_of(who), self.epoch)

    def _ends_at(self, who: Identity) -> None:
        ends_ms = who.expires_ms
        if ends_ms is not None and (self._next_end_ms is None or ends_ms < self._next_end_ms):
            self._next_end_ms = ends_ms

    def _refused(self, via: str, why: str, *, result: str = "refused") -> Unauthenticated:
        self.counters.authenticated(via, result)
        return invalid_token(why)

    def rights_of(self, who: Identity) -> Rights:
        """Return a client's rights; without a name it has none, not even those granted to every name."""
        if not self.required:
            return EVERYTHING
        if not who.name:
            return NOTHING
        is_proven = who.via != "thrift"
        key = who.name, who.groups, is_proven
        found = self._rights.get(key)
        if found is None:
            if len(self._rights) >= MAX_NAMES:
                self._rights.clear()
                self._decisions.clear()
            granted = self.grants.granted(who.name, who.groups, proven=is_proven)
            found = self._rights[key] = Rights(granted, self._decisions)
        return found

    def groups_of(self, name: str) -> tuple[str, ...]:
        """Return a name's groups in the current grants file."""
        return self.grants.groups_of(name)

    # --- authorization ----------------------------------------------------------------------------

    def needs_no_name(self, path: str) -> bool:
        """True if the path requires no authentication. (The routes declare it too; a test compares.)"""
        if path in _FOR_EVERYBODY or path.startswith("/console/"):
            return True
        return self._open_metrics and path == METRICS_PATH

    def authorize(self, admission: Admission, route: GuardedRoute, path: Mapping[str, str]) -> None:
        """Check that a client may call this route on this path, by its verbs alone, before anything is looked up.

        Raises:
          Forbidden: it may not; the same error whether or not the topic exists.
        """
        namespace, topic = path.get("namespace", ""), path.get("topic", "")
        if writes_audit(route.name, path):
            raise Forbidden(
                "only the daemon writes the audit, whatever the grants",
                hint="its properties cannot change either, because a shorter ttl could remove records",
            )
        if not self.required or (self._open_metrics and route.name == "metrics"):
            return
        rights, on = admission.rights, route.on
        match on:
            case "topic":
                allowed = rights.topic_bits(namespace, topic)
                if route.name not in _DECLARES:
                    allowed &= bits_of(route.verbs)
                target = f"{_quotable(namespace)}:{_quotable(topic)}"
            case "namespace":
                allowed = rights.namespace_bits(namespace) & bits_of(route.verbs)
                target = f"{_quotable(namespace)}:*"
            case "within":
                allowed = int(rights.within(namespace))
                target = f"{_quotable(namespace)}:*"
            case "service":
                allowed = rights.service_bits & bits_of(route.verbs)
                target = "service"
            case _:
                return
        if not allowed:
            self.counters.forbidden(route.verbs[0])
            raise forbidden(admission.who, route.verbs[0], target)

    def enter(
        self,
        admission: Admission,
        route: GuardedRoute,
        path: Mapping[str, str],
        peer: Peer,
        request_id: str,
        length: int,
    ) -> None:
        """Make all checks between the credential and the body: the grant, then the quotas.

        Raises:
          Forbidden, QuotaExceeded: already recorded.
        """
        try:
            self.authorize(admission, route, path)
            if self.required:
                self.quotas.connect(admission.who, peer.slot)
                self.quotas.enter(admission.who, route.name, path.get("namespace", ""), path.get("topic", ""), length)
        except PlainsongError as error:
            self.refused(RefusedRequest(error, admission.who, peer, target_of(path), request_id))
            raise

    def is_within(
        self,
        admission: Admission,
        route: GuardedRoute,
        path: Mapping[str, str],
        peer: Peer,
        length: int,
        *,
        takes: bool,
    ) -> bool:
        """True if a request that was authorized is within its quotas; with ``takes`` its cost is charged.

        False: call ``enter``, which may refuse it; nothing was charged, and no refusal was counted.
        """
        namespace, topic = path.get("namespace", ""), path.get("topic", "")
        return self.quotas.allow(admission.who, peer.slot, route.name, namespace, topic, length, takes=takes)

    def refused(self, refusal: RefusedRequest) -> None:
        """Record a request that was refused because of its client."""
        self.on_refused(refusal)

    def answered(self, route: str, path: str, status: int, request_id: str) -> None:
        """Count and log the answer to a request that never reached its route."""
        self.requested(route, status, 0.0)
        self.on_answered(route, path, status, request_id)

    # --- waits ------------------------------------------------------------------------------------

    @contextmanager
    def holding(self, hold: Hold) -> Iterator[None]:
        """Check ``hold`` again after every change, until the end of the block."""
        self.hold(hold)
        try:
            yield
        finally:
            self.release(hold)

    def hold(self, hold: Hold) -> None:
        """Check ``hold`` now, since it was authenticated some time ago, and after every change until it is released."""
        self._held.add(hold)
        hold.look_again()
        self._ends_at(hold.who)

    def release(self, hold: Hold) -> None:
        """Stop checking ``hold``. Idempotent."""
        self._held.discard(hold)

    @property
    def holds(self) -> int:
        """Number of waiting requests and streams that would be checked again."""
        return len(self._held)

    def problem_of(self, who: Identity, route: GuardedRoute, path: Mapping[str, str]) -> PlainsongError | None:
        """Return the error that an admitted client would get now; None if it would get none."""
        now_ms = self._now_ms()
        if who.via == "token":
            entry = self.tokens.by_id.get(who.credential)
            state = "revoked" if entry is None else entry.state(now_ms)
            if entry is None or state != "active":
                return invalid_token(f"the token is {state}")
        elif who.expires_ms is not None and who.expires_ms <= now_ms:
            return invalid_token("the token has expired")
        elif who.via == "oidc" and self.provider is not None:
            problem = self.provider.problem_of(who)
            if problem is not None:
                return problem
        try:
            self.authorize(Admission(who, self.rights_of(who), self.epoch), route, path)
        except PlainsongError as error:
            return error
        return None


@dataclass(slots=True, eq=False)
class Hold:
    """A long wait, which ends with an error when its client is no longer allowed to wait."""

    guard: Guard
    who: Identity
    route: GuardedRoute
    path: Mapping[str, str]
    end: Callable[[PlainsongError], None]
    allow: Callable[[Rights], None] = field(default=lambda rights: None)
    """Called with the client's current rights: the wait may be for many topics."""
    problem: PlainsongError | None = field(default=None)

    def look_again(self) -> None:
        """End the wait, once, if it would be refused now."""
        if self.problem is None:
            self.allow(self.guard.rights_of(self.who))
            self.problem = self.guard.problem_of(self.who, self.route, self.path)
            if self.problem is not None:
                self.end(self.problem)


#: While authentication is off.
OPEN = Guard()


def writes_audit(route: str, path: Mapping[str, str]) -> bool:
    """True if the request would write or change the audit, which is refused also while authentication is off."""
    return path.get("topic") == AUDIT_TOPIC and path.get("namespace") == SYSTEM and route in _AUDIT_WRITES


def target_of(path: Mapping[str, str]) -> str:
    """Return the target of a request, for the audit."""
    if "topic" in path:
        return f"{_quotable(path.get('namespace', ''))}:{_quotable(path['topic'])}"
    if "namespace" in path:
        return f"{_quotable(path['namespace'])}:*"
    return path["transaction"][:20] if "transaction" in path else "service"


# --- errors ----------------------------------------------------------------------------------------


def _no_credential() -> Unauthenticated:
    error = Unauthenticated(
        "authentication is required, and the request has no credential",
        hint="send the header Authorization: Bearer with a token; plainsong token create makes one",
    )
    error.challenge = REALM
    return error


def invalid_token(why: str) -> Unauthenticated:
    """Return the refusal of a credential; ``why`` is a fixed text, never a part of the credential."""
    error = Unauthenticated(why, hint="plainsong token check explains what is wrong with a token")
    error.challenge = f'{REALM}, error="invalid_token", error_description="{_DESCRIPTION.sub("", why)}"'
    return error


def forbidden(who: Identity, verb: str, target: str) -> Forbidden:
    """Return the refusal of a client without the verb. ``target`` must be validated, not raw text of the client."""
    error = Forbidden(f"{who.name} lacks {verb} on {target}", hint="an operator can grant it")
    error.challenge = f'{REALM}, error="insufficient_scope", scope="{verb} {target}"'
    return error


def refuse_query_token(query: str) -> None:
    """Raises InvalidParameter for a token in a URL, which would end up in logs. Never repeats the token."""
    if query and _QUERY_TOKEN.search(query):
        raise InvalidParameter("a token does not belong in a URL", hint="send it in the header Authorization")


def _quotable(name: str) -> str:
    """Return a name that is safe to repeat in a header; ``?`` if it could not be one."""
    return name if _QUOTABLE.fullmatch(name) else "?"
