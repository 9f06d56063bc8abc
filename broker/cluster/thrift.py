"""The door of Tephra's clients among several instances: whoever is asked answers, or has the service's owner answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from actors.replica import PATIENCE_S, PAUSES_S
from broker.cluster.transacting import LinkedPeer
from broker.thrift.methods import TephraMethods, failure
from protocol.errors import NoOwner, PlainsongError
from protocol.transactions.tephra_rpc import RefusedCall, decode_call, encode_failure

if TYPE_CHECKING:
    from broker.cluster.owners import Owners
    from broker.service import Service


class ThriftAnywhere:
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
