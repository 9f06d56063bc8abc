"""The transaction service of another instance, over links: for replicas, topics and Tephra's clients.

tx.sync      [term, changes, wait_ms]         the state, as ``ReplicaUpdate.packed``, in the body
tx.enlist    [pointer, namespace, topic]      all pointers of the transaction
tx.owner     pointer                          the transaction's owner; "" if that is not known
tx.as_of     a moment in milliseconds         the decisions up to then, as ``Moment.packed``, in the body
tx.thrift    a message of Tephra's clients    the answer message; both in the body
ns.changed   namespace                        answered once the row of its properties has been read again
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from actors.transaction_actor import service_moved
from broker.link.flow import LinkBroken, Reply
from broker.link.http_codec import collect
from broker.link.server import in_task
from broker.link.version_0_1 import enlisted
from broker.thrift import TephraMethods, failure
from plainsong.protocol.errors import (
    BadRequest,
    InvalidParameter,
    OutcomeUnknown,
    PlainsongError,
    TransactionsUnavailable,
)
from plainsong.protocol.names import topic_name
from plainsong.protocol.tephra.rpc import RefusedCall, decode_call, encode_failure
from plainsong.protocol.transactions.asks import Enlist
from plainsong.protocol.transactions.replica import ReplicaUpdate, ReplicaVersion
from plainsong.protocol.transactions.view import Moment
from storage.base import SERVICE_NAME

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

    from actors.namespaces import Namespaces
    from actors.ownership import Instance
    from actors.transactions import TransactionService
    from broker.authority import Authority
    from broker.cluster.owners import Owners
    from broker.link.client import Link
    from broker.link.server import Call, CallHandler, PendingReply
    from plainsong.protocol.names import TopicName

#: The time-out of calls that wait only for the service.
ANSWER_S = 5.0
#: The time for other instances to read a change.
NOTIFY_S = 2.0
log = logging.getLogger(__name__)


class LinkedPeer:
    """Implements ``actors.replica.Peer``: calls the service at its current owner.

    All calls are safe to repeat if their answer was lost.
    """

    def __init__(self, owners: Callable[[], Owners]) -> None:
        """
        Args:
          owners: returns the owners, which are created after this object; used for each call.
        """
        self._owners = owners

    async def sync(self, known: ReplicaVersion, wait_ms: int = 0) -> ReplicaUpdate:
        reply = await self._call("tx.sync", [*known, wait_ms], wait_ms / 1000 + ANSWER_S)
        return ReplicaUpdate.unpack(await collect(reply.body))

    async def enlist(self, pointer: int, name: TopicName) -> tuple[int, ...]:
        return enlisted(pointer, (await self._call("tx.enlist", [pointer, *name], ANSWER_S)).value)

    async def as_of(self, at_ms: int) -> Moment:
        try:
            reply = await self._call("tx.as_of", at_ms, ANSWER_S)
        except BadRequest as error:
            if isinstance(error, InvalidParameter):
                raise  # the moment is in the future
            why = "the instance that owns the transaction service runs a version that cannot read as of a moment"
            raise TransactionsUnavailable(why, hint="upgrade it") from error
        return Moment.unpack(await collect(reply.body))

    async def owner_of(self, pointer: int) -> str | None:
        """See ``TransactionService.owner_of``."""
        owner: str | None = (await self._call("tx.owner", pointer, ANSWER_S)).value
        return owner

    async def _call(self, kind: str, value: Any, within_s: float) -> Reply:
        owners = self._owners()
        owner = owners.remote_owner(SERVICE_NAME)
        if owner is None:
            raise service_moved()
        deadline_s = trio.current_time() + within_s

        def call(link: Link) -> Awaitable[Reply]:
            return link.call(kind, value, deadline_s=deadline_s)

        try:
            return await owners.call_owner((SERVICE_NAME,), owner, call, repeatable=True)
        except LinkBroken as error:
            raise TransactionsUnavailable(
                f"{owner.name}, which owns the transaction service, cannot be reached", hint="ask again"
            ) from error
        except OutcomeUnknown as error:
            raise TransactionsUnavailable(error.detail, hint="ask again") from error


async def announce_namespace(owners: Owners, namespace: str) -> None:
    """Have all other instances read a namespace's row again; one that does not answer within ``NOTIFY_S`` reads it later."""

    async def notify(instance: Instance) -> None:
        try:
            with trio.fail_after(NOTIFY_S):
                link = await owners.links.to(instance.address)
                await link.call("ns.changed", namespace, deadline_s=trio.current_time() + NOTIFY_S)
        except (LinkBroken, PlainsongError, trio.TooSlowError) as error:
            why = error.detail if isinstance(error, PlainsongError) else str(error) or "it did not answer in time"
            log.warning(
                "instance not notified of a namespace",
                extra={"instance": instance.name, "namespace": namespace, "why": why},
            )

    async with trio.open_nursery() as nursery:
        for instance in owners.ownership.instances:
            if instance.name != owners.ownership.me.name:
                nursery.start_soon(notify, instance)


class TransactionCalls:
    """Answers the calls of other instances; calls to the service raise NoOwner unless this instance owns it."""

    def __init__(self, authority: Authority, namespaces: Namespaces) -> None:
        self._authority = authority
        self._namespaces = namespaces

    def kinds(self) -> dict[str, CallHandler]:
        """Return the handlers of this module's calls, by kind."""
        return {
            "tx.sync": in_task(self._sync),
            "tx.enlist": self._enlist,
            "tx.owner": self._owner,
            "tx.as_of": in_task(self._as_of),
            "tx.thrift": in_task(self._thrift),
            "ns.changed": in_task(self._namespace_changed),
        }

    def _home(self) -> TransactionService:
        home = self._authority.embedded
        if home is None:
            raise service_moved()
        return home

    async def _sync(self, call: Call) -> Reply:
        term, changes, wait_ms = map(int, call.value)
        synced = await self._home().sync(ReplicaVersion(term, changes), wait_ms)
        return Reply(None, synced.packed())

    def _enlist(self, call: Call, reply: PendingReply) -> None:
        home, (pointer, namespace, topic) = self._home(), call.value
        pointer, name = int(pointer), topic_name(namespace, topic)

        def settled(found: tuple[int, ...] | Exception) -> None:
            reply(found if isinstance(found, Exception) else Reply(list(found)))

        async def once_loaded() -> Reply:
            return Reply(list(await home.enlist(pointer, name)))

        if home.has_loaded:
            home.put(Enlist(pointer, name), settled)
        else:
            reply.run(once_loaded)

    def _owner(self, call: Call, reply: PendingReply) -> None:
        reply(Reply(self._home().owner_of(int(call.value))))

    async def _as_of(self, call: Call) -> Reply:
        return Reply(None, (await self._home().as_of(int(call.value))).packed())

    async def _thrift(self, call: Call) -> Reply:
        return Reply(None, await TephraMethods(self._home()).answer(call.body))

    async def _namespace_changed(self, call: Call) -> Reply:
        await self._namespaces.read_again(str(call.value))
        return Reply()


# --- Tephra's clients ------------------------------------------------------------------------------


class RoutedTephraMethods:
    """Answers messages like ``TephraMethods``, at the instance that owns the service."""

    def __init__(self, authority: Authority, owners: Owners | None) -> None:
        self._authority = authority
        self._owners = owners

    def start(self, message: bytes, answered: Callable[[bytes], object]) -> bool:
        """Leave every call to ``answer``: the owner has to be found first."""
        del message, answered
        return False

    async def answer(self, message: bytes, remote: str = "") -> bytes:
        """Return the answer to a message. Raises MalformedThrift: it is not a call."""
        del remote
        try:
            call = decode_call(message)
        except RefusedCall as refused:
            return encode_failure(refused.call, refused.number, refused.message)

        async def local(waited_ms: int) -> bytes:
            del waited_ms
            home = self._authority.embedded
            if home is None:
                raise service_moved()
            return await TephraMethods(home).answer(message)

        async def at_owner(link: Link, owner: Instance, waited_ms: int) -> bytes:
            del owner, waited_ms
            return await collect((await link.call("tx.thrift", None, message)).body)

        try:
            if self._owners is None:
                return await local(0)
            return await self._owners.run_at_owner(SERVICE_NAME, local, at_owner, repeatable=False)
        except PlainsongError as error:
            return failure(call, error.detail)
