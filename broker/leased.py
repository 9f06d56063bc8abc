"""A primary whose lease is over: it neither answers nor is ready, since a standby may have taken over by itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from broker.api.operations.replication import NOT_RENEWED, not_leased
from broker.http.handlers import RequestCancelled
from broker.http.messages import Answer, BodyPieces, PassedStream
from broker.http.route import Endpoint
from broker.thrift import failure
from plainsong.protocol.errors import OutcomeUnknown
from plainsong.protocol.tephra.rpc import RefusedCall, decode_call, encode_failure
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actors.lease import LeaseKeeper
    from broker.http.budgets import Reservation
    from broker.http.messages import Answered, Begin, BodyStream, Conversation, Handler, Request
    from broker.http.route import Route
    from broker.security.identity import Identity
    from broker.thrift import Methods

#: Routes about this daemon and its directory, which it answers without a lease, and those that read a backup whose moment
#: was within the lease. All others are about the store, which another primary may have changed.
ABOUT_THE_DAEMON = frozenset(
    (
        *("ping", "livez", "readyz", "metrics", "version", "whoami", "openapi", "security_txt", "explain_error"),
        *("root", "console", "console_slash", "console_file"),
        *("get_attention", "get_replication", "take_over", "switch_primary", "get_cluster"),
        *("drain_instance", "undrain_instance", "pin_topic", "unpin_topic"),
        *("start_scrub", "get_scrub", "list_backup_objects", "get_backup_object", "end_backup"),
    )
)


def while_leased(endpoints: Sequence[Endpoint], lease: LeaseKeeper) -> tuple[Endpoint, ...]:
    """Refuse requests about topics and transactions, polls too, while another process may have taken over by itself.

    The lease decides when a request arrives, and again when it is answered: a poll may have waited for longer than the
    lease, and what the answer says may no longer be so.
    """

    def leased(route: Route[object], handler: Handler) -> Handler:
        give = _give_read if route.reads_only else _give_change

        def handle(request: Request, answered: Answered) -> None:
            if lease.is_current:
                handler(request, partial(give, lease, answered))
            else:
                answered(not_leased())

        return handler if route.name in ABOUT_THE_DAEMON else handle

    return tuple(Endpoint(each.route, leased(each.route, each.handler)) for each in endpoints)


def _give_read(lease: LeaseKeeper, answered: Answered, outcome: Answer | Exception) -> None:
    """Answer a request that changes nothing, if the lease is not over."""
    if isinstance(outcome, Answer) and not isinstance(outcome.body, bytes | BodyPieces):
        outcome.body = _LeasedBody(outcome.body, lease)  # its reader closes it, also if its first piece is refused
    elif not (lease.is_current or isinstance(outcome, RequestCancelled)):
        outcome = not_leased()
    answered(outcome)


def _give_change(lease: LeaseKeeper, answered: Answered, outcome: Answer | Exception) -> None:
    """Answer a request that may have changed something, if that may be acknowledged."""
    if lease.holds or isinstance(outcome, Exception):
        answered(outcome)
    else:
        answered(OutcomeUnknown(NOT_RENEWED, hint="ask the primary, which may have changed"))


class _LeasedBody(PassedStream):
    """A body that is produced while it is sent, and breaks off, as after an error, once the lease is over."""

    def __init__(self, body: BodyStream, lease: LeaseKeeper) -> None:
        super().__init__(body)
        self._lease = lease

    async def __anext__(self) -> bytes:
        piece = await anext(self._pieces)
        if not self._lease.is_current:
            raise not_leased()
        return piece


def begins_while_leased(begin: Begin, lease: LeaseKeeper) -> Begin:
    """Refuse streams of publishes in the same way."""

    def begun(namespace: str, topic: str, request_id: str, room: Reservation, who: Identity) -> Conversation:
        if not lease.is_current:
            raise not_leased()
        return begin(namespace, topic, request_id, room, who)

    return begun


#: Tephra's methods that change nothing, and are answered from memory.
_TEPHRA_READS = ("getSnapshot", "invalidTxSize", "status")


class LeasedMethods:
    """Refuses the calls of Tephra's clients in the same way."""

    def __init__(self, methods: Methods, lease: LeaseKeeper) -> None:
        self._methods = methods
        self._lease = lease

    def start(self, message: bytes, answered: Callable[[bytes], object]) -> bool:
        """See ``Methods.start``."""
        return self._lease.is_current and self._methods.start(message, answered)

    async def answer(self, message: bytes, remote: str = "") -> bytes:
        """See ``Methods.answer``."""
        is_made = self._lease.is_current
        if is_made:
            found = await self._methods.answer(message, remote)
            if self._lease.is_current:
                return found
        try:
            call = await in_thread(decode_call, message)
        except RefusedCall as refused:
            return encode_failure(refused.call, refused.number, refused.message)
        # The service has answered a change only if it may acknowledge it.
        return found if is_made and call.method not in _TEPHRA_READS else failure(call, NOT_RENEWED)
