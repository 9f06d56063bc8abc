"""The owning process's end of the connection for calls that are alone: each is answered before the next one comes.

A small plain publish needs no task of its own here either: the topic's actor writes its answer.
"""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from broker.front.alone import AloneWire
from broker.front.quick import account
from broker.peering.serving import Call, plain
from protocol.errors import MalformedBody, PlainsongError
from protocol.names import TopicName
from protocol.peering.frames import Frame
from protocol.requests import Receipt
from protocol.topic.asks import PublishEach

if TYPE_CHECKING:
    import socket

    from broker.front.quick import Told
    from broker.peering.serving import Dispatch
    from broker.service import Service

log = logging.getLogger(__name__)


class AnsweringAlone:
    """The answering side; ``run`` it once."""

    def __init__(self, connection: socket.socket, service: Service, dispatch: Dispatch, peer: str) -> None:
        self._wire = AloneWire(connection)
        self._service = service
        self._dispatch = dispatch
        self._peer = peer
        #: The call that is under way, 0: none.
        self._number = 0

    async def run(self) -> None:
        """Answers until the other side closes the connection, or breaks its rules."""
        try:
            await self._wire.meet()
            while True:
                await self._take(await self._wire.receive())
        except OSError:
            pass
        except MalformedBody as error:
            log.warning("a link is ended for what it sent", extra={"peer": self._peer, "why": error.detail})
        finally:
            self._wire.close()

    async def _take(self, frame: list[Any]) -> None:
        if frame[0] != Frame.CALL or self._number:
            raise MalformedBody("something else than one call at a time")
        _, self._number, kind, value, body, _ = frame
        if kind == "publish" and not self._service.access.enabled and len(value[2]) == 1:
            self._publish(*value)
            return
        call = Call(kind, value, body)
        try:
            reply = await self._dispatch(call)
        except Exception as error:  # noqa: BLE001 - a bug is told, and logged, as one
            self._say(Frame.FAILED, plain(error, call))
        else:
            self._say(Frame.ANSWER, reply.value, b"")

    def _publish(self, namespace: str, topic: str, messages: list[bytes], size: int, _: str) -> None:
        name = TopicName(namespace, topic)
        settled = partial(self._answer, name, perf_counter())
        try:
            ticket = self._service.directory.put(name, PublishEach(messages, size))
        except PlainsongError as error:
            settled(error)
        else:
            ticket.on_settled(settled)

    def _answer(self, name: TopicName, begun_s: float, told: Told) -> None:
        """What the topic says goes out first; what is to be counted is counted while it travels."""
        one = told[0] if isinstance(told, list) else told
        try:
            if isinstance(one, Receipt):
                self._say(Frame.ANSWER, [one.first_id, one.last_id, one.generation], b"")
            else:
                self._say(Frame.FAILED, one)
        except OSError:
            pass  # whoever asked has gone
        account(self._service, name, one, 1, perf_counter() - begun_s)

    def _say(self, kind: Frame, *rest: Any) -> None:
        number, self._number = self._number, 0
        self._wire.send(self._wire.encode(kind, number, *rest))
