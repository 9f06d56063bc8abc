"""What stands between hypercorn and the application: request ids, bounds on bodies, and a clean end when refusing.

An application framework reads a body as fast as it comes, wherever it goes. So bodies are counted and timed here,
by the same rules as in the lane, and refused before the application hears of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from broker.http.bodies import BodyBudget, Holding, body_deadline, too_large, too_slow
from broker.http.request_ids import new_request_id, sane_request_id
from broker.http.status import answer_for
from protocol.errors import MalformedBody, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, Scope

    from broker.http.answers import AnswerRoom
    from broker.http.settings import HttpSettings

#: How long the rest of a body is read and dropped after its request has been answered.
LINGER_S = 2.0
#: Under this key of a scope's ``extensions`` the request's ``Passage`` stands.
PASSAGE = "plainsong.passage"
#: Under this one what ends its connection, if it has one.
CUT = "plainsong.cut"
#: Answers are given to the server in pieces of this size.
PIECE_BYTES = 64 << 10


class Passage:
    """One request on its way through the gate."""

    def __init__(self, scope: Any, budget: BodyBudget) -> None:
        self.headers: dict[str, str] = {}
        for raw_name, raw_value in scope["headers"]:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value
        #: The client's own if it is sane, else a new one.
        self.request_id = sane_request_id(self.headers.get("x-request-id")) or new_request_id()
        #: What the body holds of the budget until the application has answered.
        self.held: Holding = budget.hold()
        #: What the answer holds until it has left.
        self.room: AnswerRoom = budget.answers.room()
        self.received_bytes = 0
        self.body_ended = trio.Event()
        #: Whether the application waits for more of the body.
        self.receiving = 0
        self.started = trio.current_time()
        self.refusal: PlainsongError | None = None
        self.answering = False
        scope.setdefault("extensions", {})[PASSAGE] = self


class Gate:
    """An ASGI application around ``app``. ``is_stopping`` says whether kept connections should come to their end."""

    def __init__(
        self, app: ASGIFramework, settings: HttpSettings, budget: BodyBudget, is_stopping: Callable[[], bool]
    ) -> None:
        self._app = app
        self._settings = settings
        self._budget = budget
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Serves one request of ``app``, or refuses it; anything but a request passes untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = Passage(scope, self._budget)
        try:
            with passage.held:
                await self._pass(passage, scope, receive, send)
        finally:
            passage.room.release()

    async def _pass(self, passage: Passage, scope: Any, receive: Any, send: Any) -> None:
        async def counted_receive() -> Any:
            passage.receiving += 1
            with trio.CancelScope(deadline=self._deadline(passage)) as wait:
                message = await receive()
            passage.receiving -= 1
            if wait.cancelled_caught:
                passage.refusal = too_slow(passage.received_bytes)
            elif message["type"] == "http.request":
                self._count(passage, message)
            else:
                passage.body_ended.set()  # the client is gone
            if passage.refusal is not None:
                attempt.cancel()
                await trio.sleep_forever()
            return message

        async def marked_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                passage.answering = True
                message = {**message, "headers": self._marked(message["headers"], passage, scope)}
            elif message["type"] == "http.response.body" and not (
                message.get("more_body") or passage.body_ended.is_set()
            ):
                await self._send({**message, "more_body": True}, scope, send)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
                await self._linger(passage, receive)
            await self._send(message, scope, send)

        with trio.CancelScope() as attempt:
            passage.refusal = self._refusal(passage)
            if passage.refusal is None:
                await self._app(scope, counted_receive, marked_send)
        if passage.refusal is not None and not passage.answering:
            await self._refuse(passage, scope, receive, send)

    async def _send(self, message: Any, scope: Any, send: Any) -> None:
        """Sends a message in pieces, each in its time: the server in between keeps what it has got until it is sent."""
        rest = memoryview(message.get("body", b""))
        while len(rest) > PIECE_BYTES:
            piece = {"type": "http.response.body", "body": bytes(rest[:PIECE_BYTES]), "more_body": True}
            await self._send_piece(piece, scope, send)
            rest = rest[PIECE_BYTES:]
            message = {**message, "body": bytes(rest)} if len(rest) <= PIECE_BYTES else message
        await self._send_piece(message, scope, send)

    async def _send_piece(self, message: Any, scope: Any, send: Any) -> None:
        """Sends one piece; over HTTP/2, whose reader may stop while its connection lives, with a deadline of our own."""
        cut = scope.get("extensions", {}).get(CUT)
        if cut is None or scope["http_version"] < "2":
            await send(message)
            return
        with trio.move_on_after(self._settings.send_timeout_s) as wait:
            await send(message)
        if wait.cancelled_caught:
            cut()
            await trio.sleep_forever()  # the end of the connection is ours

    def _refusal(self, passage: Passage) -> PlainsongError | None:
        """Why the request is refused by its head alone; takes its announced length off the budget if it is not."""
        length = passage.headers.get("content-length")
        if length is None:
            return None
        if "transfer-encoding" in passage.headers:
            return MalformedBody("a body has a Content-Length or is chunked, never both")
        if int(length) > self._settings.max_body_bytes:
            return too_large(self._settings.max_body_bytes)
        try:
            passage.held.grow(int(length))
        except PlainsongError as error:
            return error
        return None

    def _count(self, passage: Passage, message: Any) -> None:
        passage.received_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            passage.body_ended.set()
        if passage.received_bytes > self._settings.max_body_bytes:
            passage.refusal = too_large(self._settings.max_body_bytes)
        try:
            passage.held.grow(max(0, passage.received_bytes - passage.held.held_bytes))
        except PlainsongError as error:
            passage.refusal = error

    def _deadline(self, passage: Passage) -> float:
        if passage.body_ended.is_set() or passage.answering:
            return float("inf")
        return body_deadline(passage.started, passage.received_bytes, self._settings.body_timeout_s)

    def _marked(self, headers: Any, passage: Passage, scope: Any) -> list[tuple[bytes, bytes]]:
        marked = [*headers, (b"x-request-id", passage.request_id.encode("ascii"))]
        if scope["http_version"] < "2" and (self._is_stopping() or passage.refusal is not None):
            marked.append((b"connection", b"close"))
        return marked

    async def _refuse(self, passage: Passage, scope: Any, receive: Any, send: Any) -> None:
        """Answers, then lets the rest of the body come: a reset would take the answer from the client."""
        assert passage.refusal is not None
        answer = answer_for(passage.refusal)
        assert isinstance(answer.body, bytes)
        headers = [(b"content-type", str(answer.content_type).encode()), (b"content-length", b"%d" % len(answer.body))]
        headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers]
        marked = self._marked(headers, passage, scope)
        await send({"type": "http.response.start", "status": answer.status, "headers": marked})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await self._linger(passage, receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self, passage: Passage, receive: Any) -> None:
        """Waits for the rest of the body for a while, and drops it unless the application still reads."""
        with trio.move_on_after(LINGER_S):
            if passage.receiving:
                await passage.body_ended.wait()
            while not passage.body_ended.is_set():
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    passage.body_ended.set()
