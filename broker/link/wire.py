"""The bytes of a link: frames are gathered and written once a turn of the event loop, read, and kept alive by pings.

What a link may have under way, and how long its other side may be silent.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import trio
from trio.lowlevel import wait_readable

from plainsong.protocol.errors import MalformedBody
from plainsong.protocol.link import MAX_FRAME_BYTES, PREFACE, FrameKind, FrameReader, FrameWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.protocol.link import Vocabulary

KIB = 1 << 10
MIB = 1 << 20
#: Bodies up to this size travel in the frame of their call or answer; larger ones in pieces of ``PIECE_BYTES``.
INLINE_BYTES = 64 * KIB
PIECE_BYTES = 128 * KIB
#: What a piece counts for besides its bytes, so that empty ones are bounded too.
PIECE_COSTS = 64
#: Bytes that may wait to be written before those who have more to say wait.
GATHERED_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class LinkBounds:
    """Bounds of one link. Both sides hold their own; bytes are bytes, times are seconds."""

    requests: int = 4096
    """Calls and conversations under way; beyond it ``Overloaded``."""
    bytes: int = 256 * MIB
    """Bodies of calls under way; a larger one goes alone. Beyond it ``Overloaded``."""
    frame_bytes: int = MAX_FRAME_BYTES
    """Of one frame; a larger one ends the link."""
    window_bytes: int = 512 * KIB
    """What one stream or conversation may have sent that has not been used yet."""
    message_bytes: int = 65 * MIB
    """Of one message of a conversation."""
    silence_s: float = 10.0
    """How long the other side may answer no ping before it counts as gone."""
    parting_s: float = 3.0
    """The same once it is known to be leaving, or to be gone."""
    dial_s: float = 3.0
    """How long a connection, and the other side's first word, may take."""


BETWEEN_INSTANCES = LinkBounds()
#: Between processes of one daemon: the end of one is seen at once, and a busy one is not taken for dead.
WITHIN_DAEMON = LinkBounds(requests=20_000, silence_s=inf, dial_s=inf)


# --- wire ------------------------------------------------------------------------------------------
#
# The bytes of a link: frames are gathered and written once a turn of the event loop, read, and kept alive by pings.
#
# Both sides of a link are made on it. Reading never waits for anybody who answers: what comes in is bounded by what
# was allowed (calls by their number and bytes, pieces by credit), so one slow reader holds up nobody else.


log = logging.getLogger("plainsong.peering")
RECEIVE_BYTES = 256 << 10


class Side(Protocol):
    """Who makes sense of the frames."""

    def take(self, frame: list[Any]) -> None:
        """Takes one frame; never waits. Raises MalformedBody for one that may not be: the link ends."""

    def taken(self) -> None:
        """All frames that had come have been taken; those that come next are read later."""


class Wire:
    """One connection and its frames; ``run`` it once."""

    def __init__(self, stream: trio.abc.Stream, bounds: LinkBounds, vocabulary: Vocabulary, peer: str) -> None:
        self.bounds = bounds
        self.peer = peer
        #: The place of the last frame that may have left; those behind it certainly have not.
        self.written = 0
        self.is_open = True
        #: Whether the other side has said its preface.
        self.is_peer = False
        self._heartbeat = Heartbeat(lambda: self.put(FrameKind.PING, 0))
        self._why = "the link was cut"
        self._meeting = trio.Event()
        self._stream = stream
        #: Where there is one, it is read and written without the stream's ceremony.
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._vocabulary = vocabulary
        self._writer = FrameWriter(vocabulary, bounds.frame_bytes)
        self._queued = 0
        self._out: list[bytes] = []
        self._out_bytes = 0
        #: Whether only ``_write`` may write: first both sides have to have said their prefaces.
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
        """As ``put``, for the last of several or a single one: without waiting for more, all that is queued leaves."""
        self._queue(self._writer.encode(*frame))
        if not self._wrote():
            self._something.set()
        return self._queued

    def _queue(self, data: bytes) -> None:
        self._queued += 1
        if self.is_open:
            self._out.append(data)
            self._out_bytes += len(data)

    def _wrote(self) -> bool:
        """Whether all that is queued has been written now; what the connection does not take is left to ``_write``."""
        if self._socket is None or self._writing or self.is_full or not self.is_open:
            return False
        data = b"".join(self._out)
        try:
            sent = os.write(self._socket.fileno(), data)
        except OSError:
            return False  # it takes nothing now, or is broken, which whoever waits for it will see
        self.written = self._queued
        self._out = [data[sent:]] if sent < len(data) else []
        self._out_bytes = len(data) - sent
        return not self._out

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that one should wait before adding to it."""
        return self._out_bytes >= GATHERED_BYTES

    async def room(self) -> None:
        """Waits until not too much waits to be written, or the link has ended."""
        while self._out_bytes >= GATHERED_BYTES and self.is_open:
            await self._emptied.wait()

    def finish(self) -> None:
        """Closes the connection once all that is queued has been written."""
        self._finishing = True
        self._something.set()

    def cut(self) -> None:
        """Ends the link now."""
        self._cancel.cancel()

    # --- its life ------------------------------------------------------------------------------

    async def run(self, side: Side, already_read: bytes = b"") -> str:
        """Reads and writes until the connection ends; why it did, empty when it was closed in good order."""
        why = ""
        try:
            with self._cancel:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._watch)
                    why = await self._read(side, already_read)
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
        await self._meeting.wait()  # what is no side of a link gets nothing, and did nothing
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

    async def _read(self, side: Side, data: bytes) -> str:
        reader = FrameReader(self._vocabulary, self.bounds.frame_bytes)
        try:
            data = await self._after_preface(data)
            while True:
                for frame in reader.feed(data):
                    if frame[0] == FrameKind.PING:
                        self.put(FrameKind.PONG, frame[1])
                    elif frame[0] != FrameKind.PONG:
                        side.take(frame)
                side.taken()
                data = await self._receive()
                self._heartbeat.received = True
                if not data:
                    return "the connection ended within a frame" if reader.begun_bytes else ""
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            return "the connection broke"
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
        """What follows the other side's preface. Raises MalformedBody: it is no side of a link."""
        with trio.move_on_after(self.bounds.dial_s):
            while len(data) < len(PREFACE) and PREFACE.startswith(data):
                more = await self._receive()
                if not more:
                    break
                data += more
        if not data.startswith(PREFACE):
            raise MalformedBody("it did not begin as a link does", hint=f"it began with {data[:20]!r}")
        self.is_peer = True
        self._meeting.set()
        return data[len(PREFACE) :]

    async def _watch(self) -> None:
        """Asks a silent side whether it is there, and ends the link of one that is not."""
        silence_s = self.bounds.silence_s
        if silence_s == inf:
            return
        await self._meeting.wait()  # until then it is ``dial_s`` that counts
        raise _Broken(await self._heartbeat.silent(silence_s))

    async def probe(self, within_s: float) -> None:
        """Ends the link, as ``cut`` does, unless the other side is heard within so many seconds of a ping."""
        why = await self._heartbeat.proven(within_s)
        if why:
            self._why = why
            self._cancel.cancel()


class _Broken(Exception):
    """The connection is of no use any more."""


def _first(group: BaseExceptionGroup[_Broken]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


# --- pulse -----------------------------------------------------------------------------------------
#
# Whether the other side of a link is there: it is asked when nothing has come for a while, and when it is in doubt.


#: What of the time to probe itself a side has in any case: an answer may be here that nobody has read yet.
_AT_LEAST = 0.1


class Heartbeat:
    """What is known of one other side. Whoever reads sets ``received`` whenever anything came."""

    def __init__(self, ping: Callable[[], object]) -> None:
        """``ping``: asks the other side for a word."""
        self.received = False
        self._ping = ping
        #: Since when it has been asked without anything having come; inf: it has not been asked.
        self._asked_s = inf
        self._heard_s = trio.current_time()
        self._times_heard = 0

    async def silent(self, silence_s: float) -> str:
        """Returns, with the words for it, once nothing has come for so many seconds, not even an answer to a ping."""
        pause_s = silence_s / 3
        self._heard_s = trio.current_time()
        while True:
            woken_s = trio.current_time() + pause_s
            await trio.sleep_until(woken_s)
            if trio.current_time() - woken_s > pause_s:
                self._heard()  # it was we who slept: what came meanwhile is unread
            elif self._asked_for_s() >= silence_s - pause_s:
                return self._words()

    async def proven(self, within_s: float) -> str:
        """Returns when something has come, "", or was not within that time of a ping, with the words for it.

        A ping that is not answered yet counts from when it left: who was silent before has little time left.
        """
        while True:
            if self.received:
                self._heard()  # that was before the doubt
            begun_s, times = trio.current_time(), self._times_heard
            until_s = max(begun_s + within_s - self._asked_for_s(), begun_s + within_s * _AT_LEAST)
            await trio.sleep_until(until_s)
            if self.received or self._times_heard > times:
                return ""
            if trio.current_time() - until_s <= within_s:
                return self._words()
            self._heard()  # it was we who slept

    def _asked_for_s(self) -> float:
        """How long it has been asked without a word from it; it is asked now unless it has been, or was heard lately."""
        if self.received:
            self._heard()
        elif self._asked_s == inf:
            self._ping()
            self._asked_s = trio.current_time()
        return max(0.0, trio.current_time() - self._asked_s)

    def _heard(self) -> None:
        self.received, self._asked_s, self._heard_s = False, inf, trio.current_time()
        self._times_heard += 1

    def _words(self) -> str:
        return f"nothing was heard for {trio.current_time() - self._heard_s:.1f} s, not even an answer to a ping"
