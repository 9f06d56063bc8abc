# Written by scripts/unasync.py from plainsong/_async/events.py: change that, and run it (make sync).
"""Service events: one stream, reconnected whenever it breaks."""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import TYPE_CHECKING

from plainsong._sync._backend import BROKEN_STREAM, ReaderStop, connect
from plainsong.calls import Answer, Failure
from plainsong.errors import ConnectionLost, UnexpectedAnswer
from plainsong.messages import ServiceEvent
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import PlainsongError, ShuttingDown, Unauthenticated
from plainsong.retry import PAUSES_S, error_of, may_repeat, pause_after
from plainsong.transport.event_source import BROKEN_BODY, EventSource
from plainsong.transport.websocket import address_of

if TYPE_CHECKING:
    from typing import Self

    from plainsong._sync._backend import Connection
    from plainsong._sync.retry import Channel
    from plainsong.transport.event_source import RawEvent

log = logging.getLogger("plainsong.client")

#: A daemon pings every 15 s; a stream that is silent for longer than this is dead.
SILENCE_S = 40.0
#: A failure that lasts this long is logged, once per outage: it is not just a restart of the daemon, and silence would
#: look as if nothing changed.
REPORT_AFTER_S = 10.0
#: The event by which a daemon that shuts down ends its streams.
END = "end"


class Events:
    """Events of the service as they happen; made by ``Administration.events``, which explains the options.

    Iterate over it once, in one thread, in a ``with`` block, whose end closes the connection. When a connection
    breaks off, another is made, at whichever of the client's URLs answers: unchanged state is not sent
    again, and changes are sent in their latest state.
    """

    def __init__(self, channel: Channel, path: str) -> None:
        self._stop = ReaderStop()
        self._channel = channel.for_reader(self._stop, endless=True)
        self._path = path
        self._backoff = Backoff(PAUSES_S, channel.random)
        #: The time of the first failure since the last event or ping; and whether it was logged.
        self._failing_since_s: float | None = None
        self._told = False
        self._found: deque[ServiceEvent] = deque()
        self._last_id = ""
        self._url = ""
        self._connection: Connection | None = None
        self._source: EventSource | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ServiceEvent:
        while not self._found:
            if self._stop.is_set:
                raise StopIteration
            try:
                self._receive()
            except PlainsongError as error:
                self._disconnect()
                if not self._stop.is_set:
                    self._pause(error)
            except Exception:
                # Closing a connection while a thread reads from it can raise any error.
                if not self._stop.is_set:
                    raise
        return self._found.popleft()

    def stop(self) -> None:
        """Ends the loop, also while it waits. Idempotent.

        Other threads, and signal handlers, call it while the loop waits.
        """
        self._stop.set()

    def close(self) -> None:
        """Ends the loop and closes the connection. Idempotent."""
        self._stop.set()
        self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Events {self._path}>"

    def _receive(self) -> None:
        """Connects, or receives data. Raises PlainsongError: the connection is unusable."""
        if self._connection is None or self._source is None:
            self._connect()
            return
        try:
            data = self._stop.during(self._connection.receive, SILENCE_S)
            if data is None:
                return  # ``stop`` was called
            if not data:
                raise ConnectionLost(f"{self._url}: nothing has arrived for {SILENCE_S:g} s")
            self._failing_since_s = None  # the daemon has sent events or a ping
            self._take(self._source.receive(data))
        except (*BROKEN_STREAM, BROKEN_BODY) as error:
            raise ConnectionLost(f"{self._url}: {str(error) or type(error).__name__}") from error
        if self._source.has_ended:
            raise ConnectionLost(f"{self._url}: the stream has ended")

    def _take(self, events: list[RawEvent]) -> None:
        for each in events:
            if each.kind == END:
                raise ShuttingDown(f"{self._url} ended the stream")
            try:
                self._found.append(ServiceEvent(each.kind, json.loads(each.data)))
            except ValueError as error:
                raise UnexpectedAnswer(f"{self._url} sent an event that is not JSON") from error
            self._last_id = each.event_id
            self._failing_since_s = None
            self._backoff.reset()

    def _connect(self) -> None:
        """One attempt, at the URL that last answered or the next one. Raises PlainsongError."""
        channel = self._channel
        places, settings = channel.places, channel.settings
        token = settings.credentials.token
        url = self._url = places.current
        try:
            headers = self._stop.during(self._connected_to, url)
        except Unauthenticated:
            if not settings.credentials.read_again(token):
                raise
            self._disconnect()
            headers = self._stop.during(self._connected_to, url)
        except PlainsongError as error:
            places.note_answer("", url, Failure("connect", error.detail), error)
            places.note_first(error, channel.now(), settings.wait_for_daemon_s)
            raise
        if headers is not None:
            places.note_answer("", url, Answer(200, headers, b""), None)

    def _connected_to(self, url: str) -> dict[str, str]:
        """Connects within the connect timeout, sends the request and receives the head of the answer within its own."""
        settings, now = self._channel.settings, self._channel.now
        host, port, tls = address_of(url)
        try:
            context = settings.credentials.tls_context() if tls else None
            connection = connect(host, port, tls=context, timeout_s=settings.connect_timeout_s, stop=self._stop)
            self._connection = connection
            self._stop.watch(connection)
            source = EventSource(url, self._path, settings.credentials, self._last_id)
            until_s = now() + settings.request_timeout_s
            connection.send(source.request(), until_s - now())
            while source.headers is None:
                data = connection.receive(until_s - now())
                if not data:
                    raise TimeoutError(f"no answer within {settings.request_timeout_s:g} s")
                self._take(source.receive(data))
        except (TimeoutError, *BROKEN_STREAM, BROKEN_BODY) as error:
            failed = error_of(Failure("connect", str(error) or type(error).__name__, error), url)
            assert failed is not None
            raise failed from error
        self._source = source
        return source.headers

    def _disconnect(self) -> None:
        connection, self._connection, self._source = self._connection, None, None
        if connection is not None:
            self._stop.watch(None)
            connection.close()

    def _pause(self, error: PlainsongError) -> None:
        """Sleeps before the next attempt. Raises ``error`` if there should be none."""
        channel = self._channel
        if not (channel.settings.retry and may_repeat("reading", error)):
            raise error
        if isinstance(error, ShuttingDown):
            channel.places.leave(self._url)
        pause_s = pause_after(error, self._backoff)
        now_s = channel.now()
        if self._failing_since_s is None:
            self._failing_since_s, self._told = now_s, False
        if now_s - self._failing_since_s >= REPORT_AFTER_S and not self._told:
            self._told = True
            log.warning("no events arrive; still trying: %s", error.detail)
        else:
            log.debug("reconnecting to the events in %.2f s: %s", pause_s, error.detail)
        channel.sleep(pause_s)
