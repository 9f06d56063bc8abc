"""Where requests go: the URLs that were given, and to the owner of a topic, once a daemon has told where that is."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from plainsong.core.effects import Failure
from plainsong.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, UnexpectedAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plainsong.core.effects import Answer
    from plainsong.protocol.errors import PlainsongError

OWNER_HEADER = "plainsong-owner"
#: Owners that are remembered; with one more all are forgotten: they are told again.
MAX_OWNERS = 4096
#: An owner is close, or out of reach as behind a load balancer: that is to cost little.
OWNER_CONNECT_S = 1.0
#: For how long one that did not answer is not gone to, at first and at last; it doubles.
FIRST_AWAY_S = 30.0
MAX_AWAY_S = 960.0
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}\Z")


class Places:
    """The daemons of one client, shared by its threads.

    Args:
      follow: whether to go where a daemon says that an owner is.
      clock: seconds that only go forward.
    """

    __slots__ = ("_at", "_away", "_clock", "_follow", "_owners", "urls")

    def __init__(
        self, urls: tuple[str, ...], *, follow: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.urls = urls
        self._at = 0
        self._follow = follow
        self._clock = clock
        #: What a path is about → where its owner answers.
        self._owners: dict[str, str] = {}
        #: Owners that did not answer → until when they are left alone, and for how long that was.
        self._away: dict[str, tuple[float, float]] = {}

    @property
    def current(self) -> str:
        """The given URL where the last request went well, or the next one to try."""
        return self.urls[self._at % len(self.urls)]

    def leave(self, url: str) -> None:
        """Go to the next of the given URLs, unless somebody has already."""
        if self.current == url:
            self._at = (self._at + 1) % len(self.urls)

    def where(self, path: str) -> str:
        """Where a request with this path goes."""
        owner = self._owners.get(owned_part(path))
        if owner is None or self._away.get(owner, (0.0, 0.0))[0] > self._clock():
            return self.current
        return owner

    def connect_s(self, url: str, timeout_s: float) -> float:
        """How long a connection to ``url`` may take, of ``timeout_s`` for the given ones."""
        return timeout_s if url in self.urls else min(timeout_s, OWNER_CONNECT_S)

    def heard(self, path: str, url: str, answer: Answer | Failure, error: PlainsongError | None) -> bool:
        """What came of a request: learns from it where the next ones go.

        Returns:
          Whether to send it again at once: nothing happened, and it had gone to an owner that was not there.
        """
        part = owned_part(path)
        if error is not None and is_elsewhere(error, followed=self._owners.get(part) == url):
            was_owner = self._owners.pop(part, None) == url
            if was_owner and not isinstance(answer, Failure) and error.code == "no_owner":
                return error.outcome == "not-applied"
            if was_owner:
                self._leave_alone(url)
                return error.outcome == "not-applied"
            self.leave(url)
        elif not isinstance(answer, Failure):
            self.told(path, url, answer.headers)
        return False

    def told(self, path: str, url: str, headers: Mapping[str, str]) -> None:
        """A daemon answered with these headers; the owner, if they name one, is remembered."""
        address = headers.get(OWNER_HEADER, "")
        part = owned_part(path)
        if not (self._follow and part and _ADDRESS.match(address)):
            return
        scheme, _, prefix, *_ = urlsplit(url)
        if prefix not in ("", "/"):
            return  # the URL is a proxy's: what is behind it is not to be gone to
        if len(self._owners) >= MAX_OWNERS:
            self._owners, self._away = {}, {}
        self._owners[part] = f"{scheme}://{address}"

    def _leave_alone(self, owner: str) -> None:
        _, before_s = self._away.get(owner, (0.0, 0.0))
        pause_s = min(2 * before_s or FIRST_AWAY_S, MAX_AWAY_S)
        self._away[owner] = self._clock() + pause_s, pause_s


def owned_part(path: str) -> str:
    """What of a path has an owner: a topic, or the transactions; empty where nothing has."""
    parts = path.partition("?")[0].split("/")
    if len(parts) > 5 and parts[4] == "topics":
        return "/".join(parts[3:6])
    return "transactions" if len(parts) > 2 and parts[2] == "transactions" else ""


def is_elsewhere(error: PlainsongError, *, followed: bool = False) -> bool:
    """Whether another daemon may do better; than one that was ``followed`` also when it is no daemon at all."""
    if isinstance(error, (ConnectFailed, ConnectionLost, DeadlineExceeded)):
        return True
    return error.code in ("shutting_down", "no_owner") or (followed and isinstance(error, UnexpectedAnswer))
