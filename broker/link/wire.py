"""The bytes of a link: frames are gathered and written once a turn of the event loop, read, and kept alive by pings.

Both sides of a link are made on it. Reading never waits for a task that answers: what comes in is bounded by what was
granted (calls by their number and bytes, pieces by credit), so one slow reader delays no other.
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

    #: Proves this side to the other, and the other to this one. Raises NotProven.
    Prove: TypeAlias = Callable[[Talk], Awaitable[object]]

    from plainsong.protocol.link import Vocabulary

KIB = 1 << 10
MIB = 1 << 20
#: Bodies up to this size travel in the frame of their call or answer; larger ones in pieces of ``PIECE_BYTES``.
INLINE_BYTES = 64 * KIB
PIECE_BYTES = 128 * KIB
#: Counted for each piece besides its bytes, so that empty ones are bounded too.
PIECE_OVERHEAD_BYTES = 64
#: Bytes that may wait to be written; beyond it senders wait.
GATHERED_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class LinkBounds:
    """Bounds of one link, in bytes and seconds. Each side keeps its own."""

    requests: int = 4096
    """Calls and conversations under way; beyond it ``Overloaded``."""
    bytes: int = 256 * MIB
    """Bodies of calls under way; a larger one goes alone. Beyond it ``Overloaded``."""
    frame_bytes: int = MAX_FRAME_BYTES
    """Of one frame; a larger one ends the link."""
    window_bytes: int = 512 * KIB
    """What one stream or conversation may have sent that its reader has not used yet."""
    message_bytes: int = 65 * MIB
    """Of one message of a conversation."""
    silence_s: float = 10.0
    """How long the other side may leave a ping unanswered before it counts as gone."""
    parting_s: float = 3.0
    """The same once it is known to be leaving, or to be gone."""
    dial_s: float = 3.0
    """How long connecting may take, and then the other side's preface."""


BETWEEN_INSTANCES = LinkBounds()
#: Between processes of one daemon: the end of one closes the link at once, and a busy one is not taken for dead.
WITHIN_DAEMON = LinkBounds(requests=20_000, silence_s=inf, dial_s=inf)


# --- wire ------------------------------------------------------------------------------------------


log = logging.getLogger("plainsong.peering")
RECEIVE_BYTES = 256 << 10


class FrameHandler(Protocol):
    """Handles the frames of one side."""

    def on_frame(self, frame: list[Any]) -> None:
        """Handles one frame; never waits. Raises MalformedBody for a frame that breaks the protocol: the link ends."""

    def flush(self) -> None:
        """All frames that had arrived were handled; the next ones are read later."""


class Wire:
    """One connection and its frames; ``run`` it once."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        bounds: LinkBounds,
        vocabulary: Vocabulary,
        peer: str,
        prove: Prove | None = None,
    ) -> None:
        self.bounds = bounds
        self.peer = peer
        self._prove = prove
        self._greeted = trio.Event()
        #: The place of the last frame that may have left; the frames behind it certainly have not.
        self.written = 0
        self.is_open = True
        #: Whether the other side has sent the preface of a link, and has proven what it has to.
        self.is_peer = False
        self._heartbeat = Heartbeat(lambda: self.put(FrameKind.PING, 0))
        self._why = "the link was cut"
        self._meeting = trio.Event()
        self._stream = stream
        #: A plain socket is read and written directly: a stream's locks and checkpoints cost more than the call.
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._vocabulary = vocabulary
        self._writer = FrameWriter(vocabulary, bounds.frame_bytes)
        self._queued = 0
        self._out: list[bytes] = []
        self._out_bytes = 0
        #: Whether ``_write`` alone may write: until both prefaces were sent, and while it writes.
        self._writing = True
        self._something = trio.Event()
        self._emptied = trio.Event()
        self._finishing = False
        self._cancel = trio.CancelScope()

    # --- out -----------------------------------------------------------------------------------

    def put(self, *frame: Any) -> int:
        """Queues a frame; its place. After the end of the link it goes nowhere.

        Raises:
          FrameTooLarge, TypeError, ValueError: as ``FrameWriter.encode`` does; nothing was queued.
        """
        self._queue(self._writer.encode(*frame))
        self._something.set()
        return self._queued

    def put_at_once(self, *frame: Any) -> int:
        """As ``put``, and writes all that is queued without waiting for more; for a single frame or the last one."""
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
        """Writes what the connection takes now, and leaves the rest to ``_write``; whether it took all."""
        if self._socket is None or self._writing or self.is_full or not self.is_open:
            return False
        data = b"".join(self._out)
        try:
            sent = os.write(self._socket.fileno(), data)
        except OSError:
            return False  # it takes nothing now, or is broken, which ``_write`` or ``_read`` will see
        self.written = self._queued
        self._out = [data[sent:]] if sent < len(data) else []
        self._out_bytes = len(data) - sent
        return not self._out

    @property
    def is_full(self) -> bool:
        """Whether senders should ``drain`` before they queue more."""
        return self._out_bytes >= GATHERED_BYTES

    async def drain(self) -> None:
        """Waits until ``is_full`` is over, or the link has ended."""
        while self._out_bytes >= GATHERED_BYTES and self.is_open:
            await self._emptied.wait()

    def finish(self) -> None:
        """Closes the connection once all that is queued has been written."""
        self._finishing = True
        self._something.set()

    def cut(self) -> None:
        """Ends the link now."""
        self._cancel.cancel()

    # --- life ----------------------------------------------------------------------------------

    async def run(self, handler: FrameHandler, already_read: bytes = b"") -> str:
        """Reads and writes until the connection ends; why it did, empty when it was closed in good order."""
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
        await self._meeting.wait()  # so that nothing was sent to a peer that is no link
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
        reader = FrameReader(self._vocabulary, self.bounds.frame_bytes)
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
                "a link is ended for what it sent", extra={"peer": self.peer, "why": error.detail, "hint": error.hint}
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
        """The bytes behind the other side's preface. Raises MalformedBody: there is none."""
        with trio.move_on_after(self.bounds.dial_s):
            while len(data) < len(PREFACE) and PREFACE.startswith(data):
                more = await self._receive()
                if not more:
                    break
                data += more
        if not data.startswith(PREFACE):
            raise MalformedBody("it did not begin as a link does", hint=f"it began with {data[:20]!r}")
        data = data[len(PREFACE) :]
        if self._prove is not None:
            data = await self._proven(self._prove, data)
        self.is_peer = True
        self._meeting.set()
        return data

    async def _proven(self, prove: Prove, data: bytes) -> bytes:
        """The bytes behind the proof that both sides belong together. Raises NotProven."""
        talk = _Talk(self, data)
        with trio.move_on_after(self.bounds.dial_s):
            await self._greeted.wait()
            await prove(talk)
            return talk.rest
        raise NotProven("it said nothing in time")

    async def _watch(self) -> None:
        """Pings a silent side, and ends the link when it stays silent."""
        silence_s = self.bounds.silence_s
        if silence_s == inf:
            return
        await self._meeting.wait()  # until then it is ``dial_s`` that counts
        raise _Broken(await self._heartbeat.wait_for_silence(silence_s))

    async def probe(self, within_s: float) -> None:
        """Cuts the link unless the other side sends something within this time after a ping."""
        why = await self._heartbeat.probe(within_s)
        if why:
            self._why = why
            self._cancel.cancel()


class _Talk:
    """The connection while both sides prove themselves; see ``broker.link.proof.Talk``."""

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
    """Logs peers that could not prove themselves, seldom enough that they cannot fill the log."""

    def __init__(self) -> None:
        self._again_s = -inf
        self._since = 0

    def warn(self, peer: str, why: str) -> None:
        self._since += 1
        if trio.current_time() < self._again_s:
            return
        log.warning("a peer could not prove itself", extra={"peer": peer, "why": why, "times": self._since})
        self._since, self._again_s = 0, trio.current_time() + REFUSAL_LOG_S


#: Between two lines about peers that could not prove themselves.
REFUSAL_LOG_S = 10.0
#: What a link ends with when the other side could not prove itself.
UNPROVEN = "it could not prove itself"
refusals = _Refusals()


class _Broken(Exception):
    """The connection cannot be used any more."""


def _first(group: BaseExceptionGroup[_Broken]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


# --- heartbeat -------------------------------------------------------------------------------------


#: The part of a probe's time that a side has in any case: its answer may be here and unread.
_AT_LEAST = 0.1


class Heartbeat:
    """Finds out whether the other side is alive, by pings. The reader sets ``received`` whenever anything came."""

    def __init__(self, ping: Callable[[], object]) -> None:
        """``ping``: sends a ping."""
        self.received = False
        self._ping = ping
        #: When the ping was sent that nothing has followed yet; inf: none was.
        self._pinged_s = inf
        self._heard_s = trio.current_time()
        self._times_heard = 0

    async def wait_for_silence(self, silence_s: float) -> str:
        """Returns the reason once nothing has come for so many seconds, not even an answer to a ping."""
        pause_s = silence_s / 3
        self._heard_s = trio.current_time()
        while True:
            woken_s = trio.current_time() + pause_s
            await trio.sleep_until(woken_s)
            if trio.current_time() - woken_s > pause_s:
                self._heard()  # this process was suspended: what came meanwhile is unread
            elif self._pinging_s() >= silence_s - pause_s:
                return self._reason()

    async def probe(self, within_s: float) -> str:
        """Returns "" when something has come, or the reason when nothing has within this time of a ping.

        The time of a ping that is unanswered already counts: a side that was silent before has little left.
        """
        while True:
            if self.received:
                self._heard()  # that was before the doubt
            begun_s, times = trio.current_time(), self._times_heard
            until_s = max(begun_s + within_s - self._pinging_s(), begun_s + within_s * _AT_LEAST)
            await trio.sleep_until(until_s)
            if self.received or self._times_heard > times:
                return ""
            if trio.current_time() - until_s <= within_s:
                return self._reason()
            self._heard()  # this process was suspended

    def _pinging_s(self) -> float:
        """How long a ping has been unanswered; sends one unless one is, or something has just come."""
        if self.received:
            self._heard()
        elif self._pinged_s == inf:
            self._ping()
            self._pinged_s = trio.current_time()
        return max(0.0, trio.current_time() - self._pinged_s)

    def _heard(self) -> None:
        self.received, self._pinged_s, self._heard_s = False, inf, trio.current_time()
        self._times_heard += 1

    def _reason(self) -> str:
        return f"nothing was heard for {trio.current_time() - self._heard_s:.1f} s, not even an answer to a ping"
