"""The daemon under test, started by ``plainsong serve --testing SOCKET``: a movable clock, and faults on request.

Commands arrive on a Unix socket as lines of JSON; each is answered with a line:

    {"advance_ms": 60000}           advance the daemon's time of day; time-outs of waits are not affected
    {"next_publish": "unknown"}     make the next publish, and answer that its outcome is unknown
    {"next_publish": "refused"}     refuse the next publish; nothing happens
    {"next_commit": "lost"}         make the next commit of a transaction, and lose the answer

``plainsong.testing`` is the only intended client. The daemon reports in its banner and in ``/readyz`` that it is under
test, and serves only a store in memory or a new directory.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from actors.observe import SystemClock
from plainsong.protocol.errors import OutcomeUnknown, Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from broker.http.messages import Answer, Answered, Handler, Request
    from broker.http.route import Endpoint

#: The longest command.
MAX_LINE_BYTES = 1 << 16
#: Fault → its kinds, as in the commands.
_FAULTS = {"next_publish": ("unknown", "refused"), "next_commit": ("lost",)}


class MovableClock(SystemClock):
    """The system's clock plus ``ahead_ms``."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class Testing:
    """The faults and the clock that tests control."""

    __test__ = False  # keeps pytest from collecting the class

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = MovableClock()
        self._faults: dict[str, str] = {}

    # --- the daemon's side ---------------------------------------------------------------------

    def faulty(self, endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
        """Wrap the endpoints that publish and commit, so that tests can make them fail."""
        found = []
        for endpoint in endpoints:
            fault = {"publish": "next_publish", "commit": "next_commit"}.get(endpoint.route.name)
            if fault is not None:
                endpoint = endpoint._replace(handler=partial(self._failing, fault, endpoint.handler))
            elif endpoint.route.name == "readyz":
                endpoint = endpoint._replace(handler=partial(_under_test, endpoint.handler))
            found.append(endpoint)
        return tuple(found)

    def _failing(self, fault: str, handler: Handler, request: Request, answered: Answered) -> None:
        kind = self._faults.pop(fault, None)
        if kind is None:
            handler(request, answered)
        elif kind == "refused":
            answered(Overloaded("refused by a test", hint="nothing happened"))
        else:
            lost = OutcomeUnknown("a test dropped the answer", hint="it may have happened")
            handler(request, lambda outcome: answered(outcome if isinstance(outcome, Exception) else lost))

    # --- the tests' side -----------------------------------------------------------------------

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take commands until cancelled; then remove the socket."""
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Only this user may connect.
        before = os.umask(0o177)
        try:
            await listener.bind(str(self.path))
        finally:
            os.umask(before)
        listener.listen()
        try:
            await trio.serve_listeners(self._take, [trio.SocketListener(listener)], task_status=_Started(task_status))
        finally:
            self.path.unlink(missing_ok=True)

    async def _take(self, stream: trio.SocketStream) -> None:
        data = b""
        with suppress(trio.BrokenResourceError):
            while chunk := await stream.receive_some(MAX_LINE_BYTES):
                data += chunk
                while b"\n" in data:
                    line, _, data = data.partition(b"\n")
                    await stream.send_all(json.dumps(self._obey(line)).encode() + b"\n")
                if len(data) > MAX_LINE_BYTES:
                    return

    def _obey(self, line: bytes) -> dict[str, Any]:
        try:
            ((name, value),) = json.loads(line).items()
            if name == "advance_ms" and isinstance(value, int) and value >= 0:
                self.clock.ahead_ms += value
                return {"ok": True}
            if value in _FAULTS.get(name, ()):
                self._faults[name] = value
                return {"ok": True}
        except (ValueError, AttributeError, TypeError):
            pass
        return {"ok": False, "error": f"no such command: {line[:200].decode(errors='replace')}"}


class _Started(trio.TaskStatus[Any]):
    """Passes ``started`` on without the value, the listeners."""

    def __init__(self, inner: trio.TaskStatus[None]) -> None:
        self._inner = inner

    def started(self, value: object = None) -> None:
        self._inner.started()


def _under_test(handler: Handler, request: Request, answered: Answered) -> None:
    def say(outcome: Answer | Exception) -> None:
        if not isinstance(outcome, Exception):
            assert isinstance(outcome.body, bytes)
            outcome.body = json.dumps({**json.loads(outcome.body), "testing": True}).encode()
        answered(outcome)

    handler(request, say)
