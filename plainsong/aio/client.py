"""The client for event loops, asyncio and trio alike."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import anyio

from plainsong.aio.administration import AsyncAdministration
from plainsong.aio.polling import AsyncPolling
from plainsong.aio.producers import AsyncProducers
from plainsong.aio.publishing import AsyncPublishing
from plainsong.aio.shell import AsyncShell
from plainsong.aio.streams import AsyncStreams
from plainsong.aio.transacting import AsyncTransacting
from plainsong.core.operations import Operations
from plainsong.settings import DEFAULT_URL, Settings, from_environment
from plainsong.transport.waiting import AsyncWire

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Self


class AsyncClient(AsyncPublishing, AsyncProducers, AsyncStreams, AsyncPolling, AsyncTransacting, AsyncAdministration):
    """Talks to a daemon: topics, publishing, polling, reading, on asyncio and trio alike.

    For one event loop; any number of its tasks may share it. Use it in an ``async with`` block, or ``aclose`` it.
    Connections are made when they are needed: making a client does not need a daemon. A task that is
    cancelled in the middle of a call leaves it: what became of the request is then unknown, as after a
    broken connection.

    Every method raises ``PlainsongError`` and nothing else on account of the daemon or the network; the error's
    ``outcome`` says whether the request happened. Calls are tried again, with pauses, as long as that is safe
    and ``deadline_s`` is not over.

    Args:
      url: of the daemon, or several (a list, or one string with commas): the next is tried when one cannot be
        reached or is leaving.
      namespace: of all topics.
      token_file: a file whose one line is sent as a bearer token; read once.
      connect_timeout_s: for a connection to come about.
      request_timeout_s: for one request and its whole answer.
      deadline_s: for a call with all its retries; methods take one of their own. The time that a poll is
        asked to wait is added to both.
      retry: False: one attempt at each URL, and no pauses.
      max_connections: open at once; further requests wait for one.
      follow_owners: of several instances, go to the one that owns the topic, which its first answer names; False:
        only ever to ``url``, as behind a load balancer.
    Raises:
      InvalidName, InvalidParameter: an argument makes no sense.
    """

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        *,
        namespace: str = "default",
        token_file: str | os.PathLike[str] | None = None,
        connect_timeout_s: float = 5.0,
        request_timeout_s: float = 30.0,
        deadline_s: float = 60.0,
        retry: bool = True,
        max_connections: int = 100,
        follow_owners: bool = True,
    ) -> None:
        self._settings = Settings.checked(
            url,
            namespace=namespace,
            token_file=token_file,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            deadline_s=deadline_s,
            retry=retry,
            max_connections=max_connections,
            follow_owners=follow_owners,
        )
        self._wire = AsyncWire(self._settings)
        self._shell = AsyncShell(self._wire.carry)
        self._operations = Operations(self._settings, random.random, lambda: time.time_ns() // 1_000_000)

    @classmethod
    def from_environment(cls, **options: Any) -> Self:
        """A client for ``PLAINSONG_URL`` and ``PLAINSONG_NAMESPACE``; ``options`` as above, which win."""
        return cls(**{**from_environment(), **options})

    async def aclose(self) -> None:
        """Close all connections; what is under way fails. Idempotent. Its publishers end with their own blocks."""
        await self._wire.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._wire.aclose()

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.namespace} at {self._operations.places.current}>"
