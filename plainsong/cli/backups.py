"""The requests of ``plainsong backup create``: a cut, the objects in it, and their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from plainsong.calls import Call, Request, object_of
from plainsong.cli.connection import run_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong import Client
    from plainsong.calls import Answer
    from plainsong.protocol.answers.service import BackupObjects, BegunBackup

T = TypeVar("T")
_PATH = "/v1/backups"
#: How long a daemon may take for an answer: where `backup.bytes_per_s` is low, an object takes a while.
WAIT_S = 600.0


class HeldCut:
    """A cut that the daemon holds, and its manifest without objects."""

    def __init__(self, client: Client, *, without_damaged: bool = False) -> None:
        """Begin. Raises PlainsongError: BackupRunning, or the daemon cannot be asked, or cannot read something.

        Args:
          without_damaged: leave out what cannot be read: ``leftOut`` here and on pages.
        """
        self._client = client
        query = "?withoutDamaged=true" if without_damaged else ""
        self.begun: BegunBackup = self._json("POST", query, repeat=False)
        self._path = f"/{self.begun['id']}"

    def page(self, topic: str, after: str | None = None) -> BackupObjects:
        """Objects of ``namespace:topic``, or ``service``, or ``metadata``, from the place ``after`` on."""
        query = {"topic": topic} | ({} if after is None else {"after": after})
        page: BackupObjects = self._json("GET", f"{self._path}/objects?{urlencode(query)}")
        return page

    def object(self, name: str) -> bytes:
        """The bytes of an object that was listed. Raises NotFound: its rows have changed since."""
        return self._send("GET", f"{self._path}/objects/{name}", _body)

    def end(self, *, complete: bool) -> None:
        """Have the daemon release it, and report whether the backup is complete."""
        self._json("DELETE", self._path + ("?complete=true" if complete else ""))

    def _json(self, method: str, rest: str, *, repeat: bool = True) -> Any:
        return self._send(method, rest, object_of, repeat=repeat)

    def _send(self, method: str, rest: str, read: Callable[[Answer], T], *, repeat: bool = True) -> T:
        request = Request(method, _PATH + rest)
        return run_call(self._client, Call(request, read, "harmless" if repeat else "twice", wait_s=WAIT_S))


def _body(answer: Answer) -> bytes:
    return answer.body
