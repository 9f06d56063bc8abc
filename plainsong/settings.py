"""The settings of a client: URLs, namespace and time limits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from plainsong.credentials import UNIX, Credentials
from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.names import namespace_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from plainsong.credentials import File

DEFAULT_URL = "http://127.0.0.1:7420"
#: A year. Sockets refuse timeouts much longer than that.
MAX_S = 366 * 86_400
#: Long enough for a daemon that is being started by the same script, and too short for a person to mind.
WAIT_FOR_DAEMON_S = 0.5
#: The minimum rate at which a daemon accepts a body, by default (``http.body_min_bytes_per_s``).
BODY_MIN_BYTES_PER_S = 16 << 10


def upload_s(size: int) -> float:
    """Return the additional time that a daemon allows for receiving a body of ``size`` bytes instead of a small one."""
    return float(size // BODY_MIN_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that ``Client`` and ``AsyncClient`` take as arguments."""

    urls: tuple[str, ...]
    """The daemons' URLs. The client fails over to the next if a daemon is unreachable or shutting down."""
    namespace: str
    credentials: Credentials
    connect_timeout_s: float
    """For opening one connection."""
    request_timeout_s: float
    """For one request and its complete answer, without a poll's ``wait_ms`` and the body's ``upload_s``."""
    deadline_s: float
    """For one call with retries and pauses, without a poll's ``wait_ms``."""
    retry: bool
    """True if a call may take more than one attempt (at each URL)."""
    max_connections: int
    follow_owners: bool = True
    """Send requests to the instance that owns the topic, once a response has named it."""
    wait_for_daemon_s: float = WAIT_FOR_DAEMON_S
    """Seconds for which a client that has never reached a daemon retries a refused connection."""

    @classmethod
    def checked(
        cls,
        url: str | Sequence[str],
        *,
        namespace: str,
        token: str | None = None,
        token_file: File | None = None,
        ca_file: File | None = None,
        certificate: tuple[File, File] | None = None,
        insecure: bool = False,
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
        given = [url] if isinstance(url, str) else url
        if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
            raise InvalidParameter(
                f"url is {url!r}", hint=(f"use a string or a list of strings, for example {DEFAULT_URL}")
            )
        urls = [part for text in given for part in text.split(",")]
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
        checked = tuple(_checked_url(each.strip()) for each in urls)
        credentials = Credentials(token, token_file, ca_file, certificate, insecure)
        credentials.check(checked)
        return cls(
            checked,
            namespace_name(namespace),
            credentials,
            connect_timeout_s,
            request_timeout_s,
            deadline_s,
            retry,
            max_connections,
            follow_owners,
            wait_for_daemon_s,
        )


def from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """``url``, ``namespace``, ``token_file`` … from ``PLAINSONG_URL`` (several with commas) and so on.

    A certificate takes ``PLAINSONG_CERTIFICATE`` and ``PLAINSONG_KEY``.
    """
    certificate, key = environ.get("PLAINSONG_CERTIFICATE"), environ.get("PLAINSONG_KEY")
    return {
        "token_file": environ.get("PLAINSONG_TOKEN_FILE") or None,
        "ca_file": environ.get("PLAINSONG_CA_FILE") or None,
        "certificate": (certificate, key) if certificate and key else None,
        "url": environ.get("PLAINSONG_URL") or DEFAULT_URL,
        "namespace": environ.get("PLAINSONG_NAMESPACE") or "default",
        "follow_owners": follows_owners(environ),
    }


def follows_owners(environ: Mapping[str, str] = os.environ) -> bool:
    """True if clients may connect to owners: unless ``PLAINSONG_FOLLOW_OWNERS`` is ``false``, ``0`` or ``no``."""
    return environ.get("PLAINSONG_FOLLOW_OWNERS", "").strip().lower() not in ("false", "0", "no")


def _checked_url(url: str) -> str:
    if url.startswith(f"{UNIX}/") and not url.endswith("/"):
        return url
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise InvalidParameter(f"{url[:200]!r} is not the URL of a daemon", hint=f"for example {DEFAULT_URL}")
    return url.rstrip("/")
