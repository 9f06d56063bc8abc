"""The settings of a client: URLs, namespace and time limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.names import namespace_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

DEFAULT_URL = "http://127.0.0.1:7420"
#: A year. Sockets refuse timeouts much longer than that.
MAX_S = 366 * 86_400
#: Long enough for a daemon that is being started by the same script, and too short to leave anyone wondering.
WAIT_FOR_DAEMON_S = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that ``Client`` and ``AsyncClient`` take as arguments."""

    urls: tuple[str, ...]
    """The daemons' URLs. The client fails over to the next if a daemon is unreachable or shutting down."""
    namespace: str
    token: str | None
    connect_timeout_s: float
    """For opening one connection."""
    request_timeout_s: float
    """For one request and its complete answer, without a poll's ``wait_ms``."""
    deadline_s: float
    """For one call with retries and pauses, without a poll's ``wait_ms``."""
    retry: bool
    """Whether a call may take more than one attempt (at each URL)."""
    max_connections: int
    follow_owners: bool = True
    """Whether to send requests to the instance that owns the topic, once an answer has named it."""
    wait_for_daemon_s: float = WAIT_FOR_DAEMON_S
    """How long a client that has never reached a daemon retries a refused connection."""

    @classmethod
    def checked(
        cls,
        url: str | Sequence[str],
        *,
        namespace: str,
        token_file: str | os.PathLike[str] | None,
        connect_timeout_s: float,
        request_timeout_s: float,
        deadline_s: float,
        retry: bool,
        max_connections: int,
        follow_owners: bool = True,
        wait_for_daemon_s: float = WAIT_FOR_DAEMON_S,
    ) -> Self:
        """Checks the arguments.

        Raises:
          InvalidName: the namespace. InvalidParameter: another argument, named by the detail.
        """
        urls = [part for text in ([url] if isinstance(url, str) else url) for part in text.split(",")]
        if not urls:
            raise InvalidParameter("no URL is given", hint=f"for example {DEFAULT_URL}")
        for name, seconds in (
            ("connect_timeout_s", connect_timeout_s),
            ("request_timeout_s", request_timeout_s),
            ("deadline_s", deadline_s),
        ):
            if not 0 < seconds <= MAX_S:
                raise InvalidParameter(f"{name} is {seconds}", hint=f"use a number of seconds up to {MAX_S}")
        if not 0 <= wait_for_daemon_s <= MAX_S:
            raise InvalidParameter(
                f"wait_for_daemon_s is {wait_for_daemon_s}", hint=f"use a number of seconds from 0 to {MAX_S}"
            )
        if max_connections < 1:
            raise InvalidParameter(f"max_connections is {max_connections}", hint="use 1 or more")
        return cls(
            tuple(_checked_url(each.strip()) for each in urls),
            namespace_name(namespace),
            _token(token_file),
            connect_timeout_s,
            request_timeout_s,
            deadline_s,
            retry,
            max_connections,
            follow_owners,
            wait_for_daemon_s,
        )


def from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str | bool]:
    """``url``, ``namespace`` and ``follow_owners`` from ``PLAINSONG_URL`` (several with commas) and so on."""
    return {
        "url": environ.get("PLAINSONG_URL") or DEFAULT_URL,
        "namespace": environ.get("PLAINSONG_NAMESPACE") or "default",
        "follow_owners": follows_owners(environ),
    }


def follows_owners(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``PLAINSONG_FOLLOW_OWNERS`` lets clients connect to owners: unless it is ``false``, ``0`` or ``no``."""
    return environ.get("PLAINSONG_FOLLOW_OWNERS", "").strip().lower() not in ("false", "0", "no")


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise InvalidParameter(f"{url[:200]!r} is no URL of a daemon", hint=f"for example {DEFAULT_URL}")
    return url.rstrip("/")


def _token(token_file: str | os.PathLike[str] | None) -> str | None:
    if token_file is None:
        return None
    try:
        token = Path(token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"the token file cannot be read: {error}") from error
    if not token or not token.isprintable() or not token.isascii():
        raise InvalidParameter(f"{token_file}: a token is one line of printable ASCII")
    return token
