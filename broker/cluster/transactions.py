"""The transaction service of another instance, over links: for replicas, topics and Tephra's clients.

The transaction service of another instance, over links: what mirrors and topics ask, and who answers it.

tx.sync      [term, changes, wait_ms]         the state, as ``Synced.packed``, in the body
tx.enlist    [pointer, namespace, topic]      whether the service has issued the pointer
tx.thrift    a message of Tephra's clients    the message that answers it, both in the body
ns.changed   namespace                        once the row of its properties has been read again
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from actors.replica import PATIENCE_S, PAUSES_S
from actors.transactions import SERVICE_NAME, service_moved
from broker.link.flow import LinkBroken, Reply
from broker.thrift import TephraMethods, failure
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, ShuttingDown, TransactionsUnavailable
from plainsong.protocol.names import topic_name
from plainsong.protocol.tephra.rpc import RefusedCall, decode_call, encode_failure
from plainsong.protocol.transactions.replica import ReplicaUpdate, ReplicaVersion

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from actors.ownership import Instance
    from actors.transactions import TransactionService
    from broker.cluster.owners import Owners
    from broker.link.server import Call, CallHandler
    from broker.service import Service
    from plainsong.protocol.names import TopicName

#: How long an answer may take that waits for nothing but the service.
ANSWER_S = 5.0
#: How long instances may take to read what another one has changed.
TELL_S = 2.0
log = logging.getLogger(__name__)


class LinkedPeer:
    """Implements ``actors.replica.Peer``: the service at the instance that owns it now."""

    def __init__(self, owners: Callable[[], Owners]) -> None:
        """``owners``: the way to other instances, once it is there."""
        self._owners = owners

    async def sync(self, known: ReplicaVersion, wait_ms: int = 0) -> ReplicaUpdate:
        """See ``Peer.sync``."""
        reply = await self._asked("tx.sync", [*known, wait_ms], wait_ms / 1000 + ANSWER_S)
        return ReplicaUpdate.unpack(await _body(reply))

    async def enlist(self, pointer: int, name: TopicName) -> bool:
        """See ``Peer.enlist``."""
        return bool((await self._asked("tx.enlist", [pointer, *name], ANSWER_S)).value)

    async def thrift(self, message: bytes) -> bytes:
        """The answer to a message of Tephra's clients. Raises as all calls, and OutcomeUnknown."""
        return await _body(await self._call("tx.thrift", None, message))

    async def _asked(self, kind: str, value: Any, within_s: float) -> Reply:
        """What may be asked again: nothing is in doubt when its answer is lost."""
        try:
            return await self._call(kind, value, deadline_s=trio.current_time() + within_s)
        except OutcomeUnknown as error:
            raise TransactionsUnavailable(error.detail, hint="ask again") from error

    async def _call(self, kind: str, value: Any, body: bytes = b"", deadline_s: float | None = None) -> Reply:
        """The answer; with a deadline, as long as the service has the owner that was asked."""
        owners = self._owners()
        owner = owners.elsewhere(SERVICE_NAME)
        if owner is None:
            raise service_moved()
        try:
            link = await owners.links.to(owner.address)
            answering = link.call(kind, value, body, deadline_s=deadline_s)
            return await (answering if deadline_s is None else owners.while_owner((SERVICE_NAME,), owner, answering))
        except LinkBroken as error:
            raise TransactionsUnavailable(
                f"{owner.name}, which owns the transaction service, cannot be reached", hint="ask again"
            ) from error
        except ShuttingDown as error:
            raise NoOwner(error.detail) from error


async def announce_namespace(owners: Owners, namespace: str) -> None:
    """Have every other instance read a namespace's row again; who does not within ``TELL_S`` does it later by itself."""

    async def tell(instance: Instance) -> None:
        try:
            with trio.fail_after(TELL_S):
                link = await owners.links.to(instance.address)
                await link.call("ns.changed", namespace, deadline_s=trio.current_time() + TELL_S)
        except (LinkBroken, PlainsongError, trio.TooSlowError) as error:
            why = error.detail if isinstance(error, PlainsongError) else str(error) or "it did not answer in time"
            log.warning(
                "instance not told of a namespace",
                extra={"instance": instance.name, "namespace": namespace, "why": why},
            )

    async with trio.open_nursery() as nursery:
        for instance in owners.ownership.instances:
            if instance.name != owners.ownership.me.name:
                nursery.start_soon(tell, instance)


async def _body(reply: Reply) -> bytes:
    if isinstance(reply.body, bytes):
        return reply.body
    return b"".join([part async for part in reply.body])


class TransactionCalls:
    """What this instance answers others while it owns the service. Everything raises NoOwner when it does not."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def kinds(self) -> dict[str, CallHandler]:
        """What answers what."""
        return {
            "tx.sync": self._sync,
            "tx.enlist": self._enlist,
            "tx.thrift": self._thrift,
            "ns.changed": self._namespace_changed,
        }

    def _home(self) -> TransactionService:
        home = self._service.embedded
        if home is None:
            raise service_moved()
        return home

    async def _sync(self, call: Call) -> Reply:
        term, changes, wait_ms = map(int, call.value)
        synced = await self._home().sync(ReplicaVersion(term, changes), wait_ms)
        return Reply(None, synced.packed())

    async def _enlist(self, call: Call) -> Reply:
        pointer, namespace, topic = call.value
        return Reply(await self._home().enlist(int(pointer), topic_name(namespace, topic)))

    async def _thrift(self, call: Call) -> Reply:
        return Reply(None, await TephraMethods(self._home()).answer(call.body))

    async def _namespace_changed(self, call: Call) -> Reply:
        await self._service.namespaces.read_again(str(call.value))
        return Reply()


# --- thrift ----------------------------------------------------------------------------------------
#
# The door of Tephra's clients among several instances: whoever is asked answers, or has the service's owner answer.


class RoutedTephraMethods:
    """Answers messages as ``TephraMethods`` does, wherever the service is."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._peer = LinkedPeer(self._owners)

    def _owners(self) -> Owners:
        if self._service.cluster is None:
            raise NoOwner("nobody owns the transaction service just now")
        return self._service.cluster.owners

    async def answer(self, message: bytes) -> bytes:
        """The message that answers a message. Raises MalformedThrift: it is no call."""
        try:
            call = decode_call(message)
        except RefusedCall as refused:
            return encode_failure(refused.call, refused.number, refused.message)
        patience_s = trio.current_time() + PATIENCE_S
        failures = 0
        while True:
            home = self._service.embedded
            if home is not None:
                return await TephraMethods(home).answer(message)
            try:
                return await self._peer.thrift(message)
            except NoOwner as error:
                if trio.current_time() >= patience_s:
                    return failure(call, error.detail)
            except PlainsongError as error:
                return failure(call, error.detail)
            await trio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            failures += 1
