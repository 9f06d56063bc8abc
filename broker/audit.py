"""The audit: who changed what, and whose requests were refused, in the topic ``system:audit``, which HTTP cannot write.

A change is recorded after it is made and before it is answered. Refusals are aggregated so that they do not fill the
disk: the first of a kind is recorded within a second, those of the next ten seconds as one record with a count. At most
twenty records per second are written, round robin by name; records of the daemon itself do not wait for them.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import trio

from broker.api.transactions.transactions import parse_transaction_id
from broker.finding import Finding
from broker.http.handlers import answer_of
from broker.http.messages import parse_query, status_of
from broker.http.route import Endpoint
from broker.refusals import Gathering, RefusalKind
from broker.security.grants import SYSTEM
from broker.security.guard import AUDIT_TOPIC, RefusedRequest, target_of
from broker.security.identity import NO_IDENTITY
from broker.security.peer import Peer
from broker.security.tokens import time_text
from broker.thrift import THRIFT
from plainsong.protocol.codec.json_values import compact
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import AuditUnavailable, Conflict, Forbidden, LowSpace, PlainsongError
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.masking import masked
from plainsong.protocol.names import TopicName
from plainsong.protocol.plurals import counted
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import CheckPublish, Create, Describe, ListReaders, Publish, SetProperties
from storage.base import StoreError
from storage.copy_parts import BACKUP_ORIGIN, COPY_KEY, DONE, copy_row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from actors.directory import Directory
    from actors.observe import Clock
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answer, Handler, Request
    from broker.http.route import Route
    from broker.security.identity import Identity
    from plainsong.protocol.effects import Ask
    from storage.base import Store

log = logging.getLogger("plainsong.audit")
AUDIT = TopicName(SYSTEM, AUDIT_TOPIC)
#: The name to claim before writing the row of a restore; no topic has an empty namespace.
_CLAIM_NAME = TopicName("", "restored")
TTL_S = 400 * 86_400
#: Above this size ``attention`` warns.
LARGE_BYTES = 1 << 30
#: Time for which a loss of records is reported.
LOSS_SHOWN_MS = 3_600_000
#: Limit on records of refusals, and of repeated changes.
RECORDS_PER_S = 20
#: The daemon's own records that may wait to be written.
MAX_OWN_RECORDS = 1_000
#: Properties of the topic; restored at each start.
PROPERTIES = TopicProperties(ttl_s=TTL_S, chain="sha256")
#: Time limit for writing a record, or for checking that it can be written, while the client waits.
WRITE_TIMEOUT_S = 5.0
#: Size of a record without the request's body, rounded up.
RECORD_BYTES = 2048
#: The action recorded for each route that changes something.
ACTIONS = {
    "create_topic": "topic.create",
    "set_properties": "topic.properties",
    "delete_topic": "topic.delete",
    "undelete_topic": "topic.undelete",
    "set_aside": "topic.set-aside",
    "set_namespace": "namespace.properties",
    "delete_producer": "producer.delete",
    "delete_reader": "reader.delete",
    "put_reader": "reader.reset",
    "abort": "transaction.abort",
    "invalidate": "transaction.invalidate",
    "truncate": "transaction.truncate",
    "drain_instance": "cluster.drain",
    "undrain_instance": "cluster.undrain",
    "pin_topic": "cluster.pin",
    "unpin_topic": "cluster.unpin",
    "begin_backup": "backup.create",
    "put_definitions": "definitions.import",
    "start_scrub": "scrub.start",
    "switch_primary": "replication.switch",
}
#: Outcome of HTTP → outcome of a record; others are ``unknown``.
_OUTCOMES = {"not-applied": "refused", "applied": "applied"}
#: Routes whose record shows the target's properties before the change.
_WITH_BEFORE = frozenset(("set_properties", "delete_topic"))


class Audit:
    """Writes the records of one instance.

    Args:
      ask: asks a topic's owner.
      required: ``security.audit``: refuse a change that cannot be recorded.
      lost: counts records that could not be written.
      store: its copy row reports a restore from a backup.
    """

    def __init__(
        self,
        ask: Callable[[TopicName, Ask[Any]], Awaitable[Any]],
        clock: Clock,
        *,
        instance: str,
        required: bool,
        lost: Callable[[], None] = lambda: None,
        store: Store | None = None,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._instance = instance
        self._required = required
        self._count_lost = lost
        #: Records lost since the start, and the time of the last loss.
        self.lost_records = 0
        self.lost_ms = 0
        self._store = store
        self._of_names, self._of_networks = Gathering(), Gathering()
        #: The daemon's own records, such as reloads; refusals do not delay them.
        self._own: list[dict[str, Any]] = []
        #: When refusals may be written next.
        self._turn_s = -inf
        self._wake = trio.Event()

    def findings(self) -> list[Finding]:
        """Report, for ``broker.attention``, records lost within the last hour."""
        if not self.lost_records or self._clock.now_ms() > self.lost_ms + LOSS_SHOWN_MS:
            return []
        text = (
            f"{counted(self.lost_records, 'audit record')} could not be written since the start; the log has the reason"
        )
        return [Finding("audit", "warning", str(AUDIT), text, since_ms=self.lost_ms, link="/console/audit")]

    def _lost(self) -> None:
        self.lost_records += 1
        self.lost_ms = self._clock.now_ms()
        self._count_lost()

    async def create(self) -> None:
        """Create the topic, chained, if it does not exist, and restore its properties.

        HTTP cannot change them, but an earlier version allowed it to any client while authentication was off.
        Raises PlainsongError.
        """
        with suppress(Conflict):  # the topic exists with other properties
            await self._ask(AUDIT, Create(PROPERTIES, if_not_exists=True))
            return
        found = (await self._ask(AUDIT, Describe())).metadata
        if found.properties == PROPERTIES:
            return
        await self._ask(AUDIT, SetProperties(PROPERTIES.stored(), if_match=frozenset((found.etag,))))
        log.warning("the properties of the audit's topic were reset", extra={"before": found.properties.stored()})
        record = self._record(
            NO_IDENTITY, None, "", "topic.properties", str(AUDIT), outcome="applied", status=None, code=None
        )
        record["before"], record["after"] = found.properties.stored(), PROPERTIES.stored()
        self._put_own(record)

    async def run(self) -> None:
        """Create the topic, and write waiting records, until cancelled."""
        while True:
            try:
                await self.create()
                break
            except PlainsongError as error:
                log.warning("the audit's topic cannot be created", extra={"why": error.detail})
                await trio.sleep(1.0)
        await self._record_restore()
        while True:
            now_s = trio.current_time()
            waits = self._of_names.waiting or self._of_networks.waiting
            with trio.move_on_at(max(now_s, self._turn_s) if waits else now_s + 1.0):
                await self._wake.wait()
            self._wake = trio.Event()
            own, self._own = self._own, []
            for record in own:
                await self._write(record)
            await self._write_gathered()

    async def _write_gathered(self) -> None:
        """Write records of refusals, at most ``RECORDS_PER_S`` a second."""
        now_s = trio.current_time()
        if now_s < self._turn_s:
            return
        self._of_names.close(now_s)
        self._of_networks.close(now_s)
        for record in self._turn(now_s):
            self._turn_s = now_s + 1.0
            await self._write(record)

    def _turn(self, now_s: float) -> list[dict[str, Any]]:
        """Return the records to write now: names and networks alternate, and so do the senders of each."""
        found: list[dict[str, Any]] = []
        sources = [self._of_names, self._of_networks]
        while sources and len(found) < RECORDS_PER_S:
            for source in list(sources):
                record = source.next(now_s, self._at())
                if record is None:
                    sources.remove(source)
                else:
                    found.append(record)
        return found[:RECORDS_PER_S]

    # --- changes ----------------------------------------------------------------------------------

    def audited(self, endpoint: Endpoint, owner_of: Callable[[int], str | None], tasks: RequestTasks) -> Endpoint:
        """Wrap a route so that its changes are recorded before they are answered."""
        route, handler = endpoint
        action = ACTIONS.get(route.name)
        if action is None:
            return endpoint

        async def reset(request: Request) -> Answer:
            if _is_dry_run(route, request) or "expected" in _fields(request):
                return await answer_of(handler, request)  # a compare-and-set by the reader itself is not a reset
            return await self._reset(handler, request, action)

        if route.name == "put_reader":
            return Endpoint(route, tasks.adapt(reset))

        async def recorded(request: Request) -> Answer:
            if _is_dry_run(route, request):
                return await answer_of(handler, request)
            is_everyday = route.name == "abort" and _ends_own(request, owner_of)
            if not is_everyday:
                await self.refuse_unless_writable(request)
            before = await self._properties(request) if route.name in _WITH_BEFORE else None
            try:
                answer = await answer_of(handler, request)
            except PlainsongError as error:
                if is_everyday and not isinstance(error, Forbidden):
                    raise
                await self._write(
                    self._change(request, action, status_of(error), error.code, _OUTCOMES.get(error.outcome, "unknown"))
                )
                raise
            if is_everyday and answer.status != status_of(Forbidden()):
                return answer
            code, outcome = _said(answer)
            record = self._change(request, action, answer.status, code, outcome)
            if outcome == "applied":
                record["before"], record["after"] = before, _after(route.name, request, answer)
            await self._write(record)
            return answer

        return Endpoint(route, tasks.adapt(recorded))

    async def _reset(self, handler: Handler, request: Request, action: str) -> Answer:
        """Answer and record a request that sets a reader's position regardless of the current one.

        A program that stores its positions this way sends such requests all the time, so those of ten seconds become
        one record.
        """
        await self.refuse_unless_writable(request)
        before = await self._reader(request)
        try:
            answer = await answer_of(handler, request)
        except PlainsongError as error:
            outcome = _OUTCOMES.get(error.outcome, "unknown")
            await self._gathered_change(self._change(request, action, status_of(error), error.code, outcome))
            raise
        code, outcome = _said(answer)
        record = self._change(request, action, answer.status, code, outcome)
        if outcome == "applied":
            record["before"], record["after"] = before, _shown_position(answer)
            if before is None or before == record["after"]:
                return answer  # a new reader, or the same position: no message is read again or skipped
        await self._gathered_change(record)
        return answer

    async def _gathered_change(self, record: dict[str, Any]) -> None:
        kind = RefusalKind(
            record["name"] or record["remote"] or "", record["action"], f"{record['target']} {record['outcome']}"
        )
        gathering = self._of_names if record["name"] else self._of_networks
        if not gathering.repeat(kind, record["after"]):
            await self._write(record)
            gathering.watch(kind, trio.current_time(), record)

    async def _reader(self, request: Request) -> dict[str, Any] | None:
        """Return a reader's position; None if it has none, or the topic does not answer."""
        try:
            found = await self._ask(request.name, ListReaders())
        except PlainsongError:
            return None
        return next(
            ({"position": each.reader.position.hex()} for each in found if each.name == request.path["reader"]), None
        )

    async def refuse_unless_writable(self, request: Request | None = None) -> None:
        """Check that ``system:audit`` accepts the record of a change, if ``security.audit`` requires one.

        Raises:
          AuditUnavailable, LowSpace: it does not; do not make the change.
        """
        if not self._required:
            return
        size = RECORD_BYTES + (0 if request is None else len(request.body))
        why = "system:audit cannot be written, and security.audit requires a record of every change"
        try:
            with trio.fail_after(WRITE_TIMEOUT_S):
                await self._ask(AUDIT, CheckPublish(size))
        except LowSpace as error:
            raise LowSpace(f"{why}: {error.detail}", hint="nothing was changed; free some disk space") from None
        except PlainsongError as error:
            raise AuditUnavailable(why, hint=f"nothing was changed: {error.detail}") from None
        except trio.TooSlowError:
            raise AuditUnavailable(why, hint=f"nothing was changed: no answer within {WRITE_TIMEOUT_S:.0f} s") from None

    async def _properties(self, request: Request) -> dict[str, Any] | None:
        try:
            metadata = (await self._ask(request.name, Describe())).metadata
        except PlainsongError:
            return None
        shown: dict[str, Any] = metadata.properties.shown(metadata.generation)
        return shown

    def _change(self, request: Request, action: str, status: int, code: str | None, outcome: str) -> dict[str, Any]:
        target = target_of(request.path)
        for part in ("reader", "producer"):
            if part in request.path:
                target = f"{target}/{request.path[part]}"[:600]
        if "instance" in request.path:
            target = request.path["instance"][:100]
        return self._record(
            request.who, request.peer, request.request_id, action, target, outcome=outcome, status=status, code=code
        )

    # --- calls of Tephra's clients ------------------------------------------------------------------

    def call_refused(self, remote: str, target: str) -> None:
        """Record that a call was refused because ``thrift`` lacks the verb."""
        self.refused(RefusedRequest(Forbidden(), THRIFT, Peer(remote), target))

    async def call_made(self, remote: str, action: str, target: str, method: str, outcome: str) -> None:
        """Record a call that changes something for others."""
        record = self._record(THRIFT, Peer(remote), "", action, target, outcome=outcome, status=None, code=None)
        record["after"] = {"method": method}
        await self._write(record)

    # --- refusals, and events of the daemon itself ---------------------------------------------------

    def refused(self, refusal: RefusedRequest) -> None:
        """Record the refusal of a request because of its client or its address."""
        who, peer = refusal.who, refusal.peer
        make = partial(self._refusal, refusal)
        gathering = self._of_names if who.name else self._of_networks
        kind = RefusalKind(who.name or _network(peer), "security.refused", refusal.target)
        now_s = trio.current_time()
        if not gathering.refuse(kind, now_s, make):
            self._lost()
        elif now_s >= self._turn_s:
            self._wake.set()

    def _refusal(self, refusal: RefusedRequest, target: str) -> dict[str, Any]:
        error = refusal.error
        return self._record(
            refusal.who,
            refusal.peer,
            refusal.request_id,
            "security.refused",
            target,
            outcome="refused",
            status=status_of(error),
            code=error.code,
        )

    def reloaded(self, what: str, before: str, after: str) -> None:
        """Record that a file of ``security`` has taken effect."""
        record = self._record(NO_IDENTITY, None, "", "security.reload", what, outcome="applied", status=None, code=None)
        record["before"], record["after"] = {"sha256": before}, {"sha256": after}
        self._put_own(record)

    def happened(self, action: str, time_ms: int, after: dict[str, Any]) -> None:
        """Record something that happened to the store while no daemon could write the audit."""
        record = self._record(NO_IDENTITY, None, "", action, "", outcome="applied", status=None, code=None)
        record["after"] = {"happenedAt": time_text(time_ms), **after}
        self._put_own(record)

    async def _record_restore(self) -> None:
        """Record, once, that the store was restored from a backup while no daemon was running."""
        try:
            row = None if self._store is None else await copy_row(self._store)
            if row is None or row.audited or row.state != DONE or not row.origin.startswith(BACKUP_ORIGIN):
                return
            target, _, chosen = row.origin.removeprefix(BACKUP_ORIGIN).partition(" ")
            record = self._record(
                NO_IDENTITY, None, "", "backup.restore", target, outcome="applied", status=None, code=None
            )
            ended = time_text(row.ended_ms)
            record["after"] = {"endedAt": ended, "chosen": chosen or None, "topics": _some(row.topics)}
            assert self._store is not None
            if await self._write(record):
                claim = await self._store.claim(_CLAIM_NAME)
                kept = put_one(Table.METADATA, COPY_KEY, replace(row, audited=True).encode())
                await self._store.write([kept], claim=claim)
        except (StoreError, DamagedRow) as error:
            log.warning("cannot find out whether this store was restored", extra={"why": str(error)[:300]})

    def _put_own(self, record: dict[str, Any]) -> None:
        if len(self._own) >= MAX_OWN_RECORDS:
            self._lost()
            return
        self._own.append(record)
        self._wake.set()

    # --- records ----------------------------------------------------------------------------------

    def _at(self) -> str:
        now_ms = self._clock.now_ms()
        return time_text(now_ms if now_ms % 1000 else now_ms + 1) or ""

    def _record(
        self,
        who: Identity,
        peer: Peer | None,
        request_id: str,
        action: str,
        target: str,
        *,
        outcome: str,
        status: int | None,
        code: str | None,
    ) -> dict[str, Any]:
        return {
            "v": 1,
            "at": self._at(),
            "instance": self._instance,
            "name": who.name or None,
            "via": who.via,
            "credential": who.credential or None,
            "remote": peer.address if peer is not None and peer.address else None,
            "requestId": request_id or None,
            "action": action,
            "target": target,
            "outcome": outcome,
            "status": status,
            "code": code,
            "before": None,
            "after": None,
            "repeated": 1,
        }

    async def _write(self, record: dict[str, Any]) -> bool:
        """Write a record. False: it is counted as lost, although a write that timed out may still succeed."""
        payload = masked(compact(record)).encode("utf-8", "replace")
        try:
            # Also for a client that has disconnected: the change was made.
            with trio.CancelScope(shield=True), trio.fail_after(WRITE_TIMEOUT_S):
                await self._ask(AUDIT, Publish(PublishRequest([payload]), len(payload)))
                return True
        except (PlainsongError, trio.TooSlowError) as error:
            self._lost()
            log.error("an audit record was lost", extra={"action": record["action"], "why": str(error)[:300]})
        return False


def large_audit(directory: Directory) -> list[Finding]:
    """Report, for ``broker.attention``, that the audit's topic is open here and large."""
    state = directory.peek(AUDIT)
    if state is None or state.usage.bytes <= LARGE_BYTES:
        return []
    text = f"The audit log has {state.usage.bytes >> 20} MiB; plainsong audit shows which records are frequent"
    return [Finding("audit", "warning", str(AUDIT), text, link="/console/audit")]


def _is_dry_run(route: Route[Any], request: Request) -> bool:
    """True if the route has dry runs and the request asks for one. The handler refuses an invalid query."""
    if "dryRun" not in route.parameters:
        return False
    try:
        given = parse_query(request.query, route.parameters)
    except PlainsongError:
        return False
    return given.get("dryRun") == "true"


def _ends_own(request: Request, owner_of: Callable[[int], str | None]) -> bool:
    """True if the client ends its own transaction, which needs no record.

    A client without ``operate`` cannot end another's: the owner, possibly another instance, refuses it.
    """
    if not request.rights.on_service("operate"):
        return True
    try:
        return owner_of(parse_transaction_id(request.path["transaction"])) == request.who.name
    except PlainsongError:
        return False


def _said(answer: Answer) -> tuple[str | None, str]:
    """Return the code and the outcome of an answer."""
    if answer.status < 400:
        return None, "applied"
    try:
        problem = json.loads(answer.body) if isinstance(answer.body, bytes) else {}
    except ValueError:
        problem = {}
    outcome = problem.get("outcome", "unknown") if isinstance(problem, dict) else "unknown"
    return problem.get("code"), _OUTCOMES.get(outcome, "unknown")


#: Maximum number of names recorded from a long list.
MAX_LISTED = 1_000


def _some(names: Sequence[str] | None) -> list[str] | None:
    """Return a list as it is recorded: cut at ``MAX_LISTED``."""
    if names is None or len(names) <= MAX_LISTED:
        return None if names is None else list(names)
    return [*names[:MAX_LISTED], f"and {len(names) - MAX_LISTED} more"]


def _fields(request: Request) -> dict[str, Any]:
    """Return the fields of a JSON body; empty if it is not an object."""
    with suppress(PlainsongError):
        given = request.json()
        return given if isinstance(given, dict) else {}
    return {}


def _shown_position(answer: Answer) -> dict[str, Any] | None:
    shown = json.loads(answer.body) if isinstance(answer.body, bytes) else {}
    return {"position": shown.get("position")}


def _after(route: str, request: Request, answer: Answer) -> Any:
    """Return what the request asked for, if its body says that, and for an import the changes it made."""
    if route == "put_definitions" and isinstance(answer.body, bytes):
        lists = json.loads(answer.body)
        return {verdict: _some(lists[verdict]) for verdict in ("created", "changed", "deleted")}
    if route in ("create_topic", "set_properties", "set_namespace", "truncate", "pin_topic") and request.body.strip():
        with suppress(PlainsongError):
            return request.json()
    return None


def _network(peer: Peer | None) -> str:
    """Return the network of an address: /24, or /64 for IPv6."""
    host = "" if peer is None else peer.address.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "" if peer is None else peer.address
    return str(ipaddress.ip_network(f"{address}/{24 if address.version == 4 else 64}", strict=False))
