"""The bytes of a link: queued frames are written once per turn of the event loop, and pings detect a dead peer.

Both sides of a link use it. Reading never waits for a task that answers: input is bounded by what was granted (calls by
number and bytes, pieces by credit), so a slow reader does not delay the others.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import trio
from trio.lowlevel import wait_readable

from broker.link.proof import NotProven
from plainsong.protocol.errors import MalformedBody
from plainsong.protocol.link import MAX_FRAME_BYTES, PREFACE, FrameKind, FrameReader, FrameWriter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from broker.link.proof import Talk

    #: Proves this side to the peer, and the peer to this side. Raises NotProven.
    Prove: TypeAlias = Callable[[Talk], Awaitable[object]]


KIB = 1 << 10
MIB = 1 << 20
#: Bodies up to this size travel in the frame of their call or answer; larger ones in pieces of ``PIECE_BYTES``.
INLINE_BYTES = 64 * KIB
PIECE_BYTES = 128 * KIB
#: Added to the size of each piece, so that empty pieces are bounded too.
PIECE_OVERHEAD_BYTES = 64
#: Bytes queued for writing, beyond which senders wait.
GATHERED_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class LinkBounds:
    """The limits of one link, in bytes and seconds. Each side applies its own."""

    requests: int = 4096
    """Calls and conversations in progress; beyond it ``Overloaded``."""
    bytes: int = 256 * MIB
    """Bytes of bodies in progress; beyond it ``Overloaded``. A larger body is accepted while it is the only one."""
    frame_bytes: int = MAX_FRAME_BYTES
    """Size of a frame; a larger one ends the link."""
    window_bytes: int = 512 * KIB
    """Bytes that a stream or conversation may send before its reader has consumed them."""
    message_bytes: int = 65 * MIB
    """Size of a conversation's message."""
    silence_s: float = 10.0
    """The longest time for the answer to a ping; a peer that takes longer counts as gone."""
    parting_s: float = 3.0
    """The same for a peer that is leaving the cluster, or has left it."""
    dial_s: float = 3.0
    """The limit for connecting, and then for the peer's preface."""


BETWEEN_INSTANCES = LinkBounds()
#: Between processes of one daemon: the end of a process closes the link immediately, and a busy one must not count as
#: dead.
WITHIN_DAEMON = LinkBounds(requests=20_000, silence_s=inf, dial_s=inf)


# --- wire ------------------------------------------------------------------------------------------


log = logging.getLogger("plainsong.peering")
RECEIVE_BYTES = 256 << 10


class FrameHandler(Protocol):
    """Handles the frames that one side receives."""

    def on_frame(self, frame: list[Any]) -> None:
        """Handle one frame, without waiting. Raises MalformedBody: it violates the protocol, so the link ends."""

    def flush(self) -> None:
        """Called when all frames of one read have been handled."""


class Wire:
    """One connection and its frames; call ``run`` once."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        bounds: LinkBounds,
        peer: str,
        prove: Prove | None = None,
    ) -> None:
        self.bounds = bounds
        self.peer = peer
        self._prove = prove
        self._greeted = trio.Event()
        #: Position of the last frame that may have been sent; later ones certainly have not.
        self.written = 0
        self.is_open = True
        #: True once the peer has sent the preface of a link, and the proof if one is required.
        self.is_peer = False
        self._heartbeat = Heartbeat(lambda: self.put(FrameKind.PING, 0))
        self._why = "the link was cut"
        self._meeting = trio.Event()
        self._stream = stream
        #: A plain socket is used directly: a stream's locks and checkpoints cost more than the system call.
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._writer = FrameWriter(bounds.frame_bytes)
        self._queued = 0
        self._out: list[bytes] = []
        self._out_bytes = 0
        #: True if only ``_write`` may write: until both prefaces were sent, and while it writes.
        self._writing = True
        self._something = trio.Event()
        self._emptied = trio.Event()
        self._finishing = False
        self._cancel = trio.CancelScope()

    # --- out -----------------------------------------------------------------------------------

    def put(self, *frame: Any) -> int:
        """Queue a frame; return its position. After the end of the link, the frame is dropped.

        Raises:
          FrameTooLarge, TypeError, ValueError: as ``FrameWriter.encode`` does; nothing was queued.
        """
        self._queue(self._writer.encode(*frame))
        self._something.set()
        return self._queued

    def put_at_once(self, *frame: Any) -> int:
        """Queue a frame, and write all queued frames immediately; for a single frame, or the last of several."""
        self._queue(self._writer.encode(*frame))
        if not self._write_now():
            self._something.set()
        return self._queued

    def _queue(self, data: bytes) -> None:
        self._queued += 1
        if self.is_open:
            self._out.append(data)
            self._out_bytes += len(data)

    def _write_now(self) -> bool:
        """Write what the socket accepts now, and leave the rest to ``_write``. Return True if it accepted all."""
        if self._socket is None or self._writing or self.is_full or not self.is_open:
            return False
        data = b"".join(self._out)
        try:
            sent = os.write(self._socket.fileno(), data)
        except OSError:
            return False  # it accepts nothing now, or is broken; ``_write`` or ``_read`` will notice
        self.written = self._queued
        self._out = [data[sent:]] if sent < len(data) else []
        self._out_bytes = len(data) - sent
        return not self._out

    @property
    def is_full(self) -> bool:
        """True if senders must ``drain`` before they queue more."""
        return self._out_bytes >= GATHERED_BYTES

    async def drain(self) -> None:
        """Wait until ``is_full`` is False, or the link has ended."""
        while self._out_bytes >= GATHERED_BYTES and self.is_open:
            await self._emptied.wait()

    def finish(self) -> None:
        """Close the connection once all queued frames are written."""
        self._finishing = True
        self._something.set()

    def cut(self) -> None:
        """End the link now."""
        self._cancel.cancel()

    # --- life ----------------------------------------------------------------------------------

    async def run(self, handler: FrameHandler, already_read: bytes = b"") -> str:
        """Read and write until the connection ends. Return why it did; empty if it was closed in an orderly way."""
        why = ""
        try:
            with self._cancel:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._watch)
                    why = await self._read(handler, already_read)
                    nursery.cancel_scope.cancel()
            if self._finishing:
                why = ""
            elif self._cancel.cancelled_caught:
                why = self._why
        except* _Broken as broken:
            why = str(_first(broken))
        finally:
            self.is_open = False
            self._emptied.set()
            await trio.aclose_forcefully(self._stream)
        return why

    async def _write(self) -> None:
        await self._write_out(PREFACE)
        self._greeted.set()
        await self._meeting.wait()  # nothing must be sent to a peer that is not a link
        self._writing = False
        while True:
            if not self._out:
                if self._finishing:
                    self._cancel.cancel()
                    return
                self._something = trio.Event()
                await self._something.wait()
                continue
            batch, self._out = self._out, []
            self.written = self._queued
            self._writing = True
            await self._write_out(batch[0] if len(batch) == 1 else b"".join(batch))
            self._writing = False
            self._out_bytes = sum(map(len, self._out))
            self._emptied.set()
            self._emptied = trio.Event()

    async def _write_out(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _Broken("the connection broke") from error

    async def _read(self, handler: FrameHandler, data: bytes) -> str:
        reader = FrameReader(self.bounds.frame_bytes)
        try:
            data = await self._after_preface(data)
            while True:
                for frame in reader.feed(data):
                    if frame[0] == FrameKind.PING:
                        self.put(FrameKind.PONG, frame[1])
                    elif frame[0] != FrameKind.PONG:
                        handler.on_frame(frame)
                handler.flush()
                data = await self._receive()
                self._heartbeat.received = True
                if not data:
                    return "the connection ended within a frame" if reader.begun_bytes else ""
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            return "the connection broke"
        except NotProven as error:
            refusals.warn(self.peer, str(error))
            return f"{UNPROVEN}: {error}"
        except MalformedBody as error:
            log.warning(
                "a link is ended because of what the peer sent",
                extra={"peer": self.peer, "why": error.detail, "hint": error.hint},
            )
            return f"what it sent cannot be read: {error.detail}"

    async def _receive(self) -> bytes:
        while self._socket is not None:
            await wait_readable(self._socket)
            try:
                return os.read(self._socket.fileno(), RECEIVE_BYTES)
            except BlockingIOError:
                continue
        return bytes(await self._stream.receive_some(RECEIVE_BYTES))

    async def _after_preface(self, data: bytes) -> bytes:
        """Return the bytes that follow the peer's preface. Raises MalformedBody: there is none."""
        with trio.move_on_after(self.bounds.dial_s):
            while len(data) < len(PREFACE) and PREFACE.startswith(data):
                more = await self._receive()
                if not more:
                    break
                data += more
        if not data.startswith(PREFACE):
            raise MalformedBody("it did not begin with the preface of a link", hint=f"it began with {data[:20]!r}")
        data = data[len(PREFACE) :]
        if self._prove is not None:
            data = await self._proven(self._prove, data)
        self.is_peer = True
        self._meeting.set()
        return data

    async def _proven(self, prove: Prove, data: bytes) -> bytes:
        """Return the bytes that follow the proof. Raises NotProven."""
        talk = _Talk(self, data)
        with trio.move_on_after(self.bounds.dial_s):
            await self._greeted.wait()
            await prove(talk)
            return talk.rest
        raise NotProven("it sent nothing in time")

    async def _watch(self) -> None:
        """Ping a silent peer, and end the link if it stays silent."""
        silence_s = self.bounds.silence_s
        if silence_s == inf:
            return
        await self._meeting.wait()  # ``dial_s`` applies until then
        raise _Broken(await self._heartbeat.wait_for_silence(silence_s))

    async def probe(self, within_s: float) -> None:
        """Cut the link unless the peer sends something within this time after a ping."""
        why = await self._heartbeat.probe(within_s)
        if why:
            self._why = why
            self._cancel.cancel()


class _Talk:
    """The connection during the proof; see ``broker.link.proof.Talk``."""

    def __init__(self, wire: Wire, data: bytes) -> None:
        self._wire = wire
        self.rest = data

    async def send(self, data: bytes) -> None:
        await self._wire._write_out(data)

    async def read(self, size: int) -> bytes:
        while len(self.rest) < size:
            more = await self._wire._receive()
            if not more:
                raise NotProven("it ended the connection")
            self.rest += more
        found, self.rest = self.rest[:size], self.rest[size:]
        return found


class _Refusals:
    """Logs peers that failed the proof, at a limited rate, so that they cannot fill the log."""

    def __init__(self) -> None:
        self._again_s = -inf
        self._since = 0

    def warn(self, peer: str, why: str) -> None:
        self._since += 1
        if trio.current_time() < self._again_s:
            return
        log.warning("a peer could not prove itself", extra={"peer": peer, "why": why, "times": self._since})
        self._since, self._again_s = 0, trio.current_time() + REFUSAL_LOG_S


#: The shortest time between two log lines about peers that failed the proof.
REFUSAL_LOG_S = 10.0
#: The reason of a link's end when the peer failed the proof.
UNPROVEN = "it could not prove itself"
refusals = _Refusals()


class _Broken(Exception):
    """The connection is no longer usable."""


def _first(group: BaseExceptionGroup[_Broken]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


# --- heartbeat -------------------------------------------------------------------------------------


#: The minimum fraction of a probe's time that a peer gets: its answer may have arrived unread.
_AT_LEAST = 0.1


class Heartbeat:
    """Detects by pings whether the peer is alive. The reader sets ``received`` whenever data has arrived."""

    def __init__(self, ping: Callable[[], object]) -> None:
        """``ping`` sends a ping."""
        self.received = False
        self._ping = ping
        #: When the ping that is still unanswered was sent; inf: there is none.
        self._pinged_s = inf
        self._received_s = trio.current_time()
        self._times_received = 0

    async def wait_for_silence(self, silence_s: float) -> str:
        """Return the reason once nothing has arrived for ``silence_s``, not even an answer to a ping."""
        pause_s = silence_s / 3
        self._received_s = trio.current_time()
        while True:
            woken_s = trio.current_time() + pause_s
            await trio.sleep_until(woken_s)
            if trio.current_time() - woken_s > pause_s:
                self._note_received()  # this process was suspended: data may have arrived unread
            elif self._pinging_s() >= silence_s - pause_s:
                return self._reason()

    async def probe(self, within_s: float) -> str:
        """Return "" once something has arrived, or the reason if nothing has within this time after a ping.

        The time of a ping that is already unanswered counts: a peer that was silent before has little time left.
        """
        while True:
            if self.received:
                self._note_received()  # data that arrived before the probe
            begun_s, times = trio.current_time(), self._times_received
            until_s = max(begun_s + within_s - self._pinging_s(), begun_s + within_s * _AT_LEAST)
            await trio.sleep_until(until_s)
            if self.received or self._times_received > times:
                return ""
            if trio.current_time() - until_s <= within_s:
                return self._reason()
            self._note_received()  # this process was suspended

    def _pinging_s(self) -> float:
        """Return how long a ping has been unanswered. Send one if none is, unless data has just arrived."""
        if self.received:
            self._note_received()
        elif self._pinged_s == inf:
            self._ping()
            self._pinged_s = trio.current_time()
        return max(0.0, trio.current_time() - self._pinged_s)

    def _note_received(self) -> None:
        self.received, self._pinged_s, self._received_s = False, inf, trio.current_time()
        self._times_received += 1

    def _reason(self) -> str:
        return f"nothing was received for {trio.current_time() - self._received_s:.1f} s, not even an answer to a ping"
