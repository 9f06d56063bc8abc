"""The client for threads."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from plainsong.core.operations import Operations
from plainsong.errors import NotSent
from plainsong.settings import DEFAULT_URL, Settings, from_environment
from plainsong.sync.administration import Administration
from plainsong.sync.delivery import close_all
from plainsong.sync.polling import Polling
from plainsong.sync.producers import Producers
from plainsong.sync.publishing import Publishing
from plainsong.sync.shell import Shell
from plainsong.sync.streams import Streams
from plainsong.sync.transacting import Transacting
from plainsong.transport.blocking import Wire

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Self

    from plainsong.sync.delivery import Closing

log = logging.getLogger("plainsong.client")


class Client(Publishing, Producers, Streams, Polling, Transacting, Administration):
    """Talks to a daemon: topics, publishing, polling, reading.

    Thread-safe: share one among all threads. After a fork the child gets connections of its own; parent and
    child can both go on using the client. Connections are made when needed: making a client needs no daemon.

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
        self._wire = Wire(self._settings)
        self._shell = Shell(self._wire.carry)
        self._operations = Operations(self._settings, random.random, lambda: time.time_ns() // 1_000_000)
        self._publishers: WeakSet[Closing] = WeakSet()

    @classmethod
    def from_environment(cls, **options: Any) -> Self:
        """A client for ``PLAINSONG_URL`` and ``PLAINSONG_NAMESPACE``; ``options`` as above, which win."""
        return cls(**{**from_environment(), **options})

    def close(self) -> None:
        """Close its publishers, with a limit of their ``exit_timeout_s``, then all connections. Idempotent.

        Raises:
          NotSent: what its publishers could not send; all is closed nevertheless.
        """
        try:
            close_all(list(self._publishers))
        finally:
            self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except NotSent as error:
            if kind is None:
                raise
            log.warning("a client was left by an error: %s", error.detail)

    def __repr__(self) -> str:
        return f"<Client of {self.namespace} at {self._operations.places.current}>"
