"""The links of this process to others: dialled when first needed, kept, and dialled again after they broke."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import trio

from broker.http.sockets import split_bind
from broker.peering.answers import LinkBroken
from broker.peering.bounds import BETWEEN_INSTANCES, LinkBounds
from broker.peering.link import Link

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

log = logging.getLogger("plainsong.peering")

#: Seconds after a first, second … failed attempt within which nobody tries again; the last one repeats.
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)


async def connect(address: str) -> trio.SocketStream:
    """A connection to ``host:port``. Raises OSError; ValueError for what is no address."""
    host, port = split_bind(address)
    stream = await trio.open_tcp_stream(host, port)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return stream


class _Peer:
    """One address: its link, whoever dials it, and how that went lately."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.dialled: trio.Event | None = None
        self.failures = 0
        self.not_before_s = 0.0
        self.why = ""


class Links:
    """One link for each address that is asked for, run in ``nursery``."""

    def __init__(
        self,
        nursery: trio.Nursery,
        bounds: LinkBounds = BETWEEN_INSTANCES,
        *,
        dial: Callable[[str], Awaitable[trio.abc.Stream]] = connect,
    ) -> None:
        self._nursery = nursery
        self._bounds = bounds
        self._dial = dial
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def __iter__(self) -> Iterator[tuple[str, Link]]:
        """The links that are open, with their addresses."""
        for address, peer in list(self._peers.items()):
            if peer.link is not None and peer.link.is_open:
                yield address, peer.link

    @property
    def unreachable(self) -> dict[str, str]:
        """Addresses that were asked for and could not be reached the last time → why."""
        lost = {address: peer for address, peer in self._peers.items() if peer.failures}
        return {address: peer.why for address, peer in lost.items() if peer.link is None or not peer.link.is_open}

    async def to(self, address: str) -> Link:
        """The link to ``address``, dialled if need be; many who ask at once share one attempt.

        Raises:
          LinkBroken: there is none just now; ``sent`` is false.
        """
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer()
        if peer.link is not None and peer.link.is_open:
            return peer.link
        if self._closed:
            raise LinkBroken("the links of this process are closed", sent=False)
        if trio.current_time() < peer.not_before_s:
            raise LinkBroken(peer.why, sent=False)
        if peer.dialled is None:
            peer.dialled = trio.Event()
            self._nursery.start_soon(self._dialling, address, peer, peer.dialled)
        await peer.dialled.wait()
        if peer.link is None or not peer.link.is_open:
            raise LinkBroken(peer.why or f"the link to {address} has ended", sent=False)
        return peer.link

    def forget(self, address: str) -> None:
        """It is leaving, or gone: its link is ended when all that is under way on it is answered, or nobody is there."""
        peer = self._peers.pop(address, None)
        if peer is not None and peer.link is not None:
            self._nursery.start_soon(self._parting, peer.link)

    async def _parting(self, link: Link) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.prove, self._bounds.parting_s)
            await link.aclose()
            nursery.cancel_scope.cancel()

    async def aclose(self) -> None:
        """Takes no more calls, and closes each link once its calls are answered. Cancel it to end them sooner."""
        self._closed = True
        async with trio.open_nursery() as closing:
            for peer in self._peers.values():
                if peer.link is not None:
                    closing.start_soon(peer.link.aclose)

    async def _dialling(self, address: str, peer: _Peer, dialled: trio.Event) -> None:
        try:
            stream = await self._connected(address, peer)
        finally:
            peer.dialled = None
            dialled.set()
        if stream is None:
            return
        link = peer.link
        assert link is not None
        if self._peers.get(address) is not peer:  # forgotten while it was dialled
            self._nursery.start_soon(self._parting, link)
        why = await link.run()
        if not self._closed and peer.link is link:
            log.info("a link has ended", extra={"peer": address, "why": why})
        if link.was_heard:
            peer.failures = 0
        else:
            self._failed(peer, f"{address} is no peer: {why}")

    async def _connected(self, address: str, peer: _Peer) -> trio.abc.Stream | None:
        try:
            with trio.fail_after(self._bounds.dial_s):
                stream = await self._dial(address)
        except (OSError, ValueError, trio.TooSlowError) as error:
            what = "it does not answer" if isinstance(error, trio.TooSlowError) else str(error)
            self._failed(peer, f"{address} cannot be reached: {what}")
            return None
        peer.link = Link(stream, self._bounds, peer=address)
        return stream

    def _failed(self, peer: _Peer, why: str) -> None:
        peer.why = why
        peer.not_before_s = trio.current_time() + PAUSES_S[min(peer.failures, len(PAUSES_S) - 1)]
        peer.failures += 1
        if peer.failures == 1:
            log.warning("a peer cannot be reached", extra={"why": why})
