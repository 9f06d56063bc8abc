"""The Host and Origin checks, which protect the daemon against web pages of other sites in its users' browsers.

A browser sends requests of any page to any address. ``Host`` reveals pages that reached this address under their own
name (DNS rebinding); ``Origin`` and ``Sec-Fetch-Site`` reveal pages of other sites that used the right name. Requests
that do not come from a browser have neither ``Origin`` nor ``Sec-Fetch-Site``, and pass.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from broker.config.values import Address, parse_address
from plainsong.protocol.errors import BadRequest, Forbidden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from broker.config import Config
    from broker.security.peer import Peer
    from plainsong.protocol.errors import PlainsongError

#: A host with an optional port, as in ``Host``.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)(?:%[\w.%-]*)?\]|([\w.-]{1,255}))(?::(\d{0,5}))?", re.ASCII)
_DEFAULT_PORTS = {"http": 80, "https": 443}
#: Methods that change nothing, and whose answers a browser does not show to a page of another origin.
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Headers that a page of an allowed origin may read, in addition to our own.
_EXPOSED = ("Retry-After", "X-Request-Id", "RateLimit", "RateLimit-Policy")
#: Headers that a page of an allowed origin may send.
_SENT = "authorization, content-type, accept, last-event-id, traceparent, prefer"
PREFLIGHT_S = 600


class OriginCheck:
    """Decides from the head of a request whether it may be served; runs before all other checks.

    Args:
      hosts: names by which clients may address this daemon; ``*.example.org`` means every name below ``example.org``.
        IP addresses, ``localhost`` and names below it are always allowed: rebinding needs a name.
      origins: exact origins of pages that may use the daemon, in addition to its own.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        names = [_plain_name(host) for host in hosts]
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = (".localhost", *(name[1:] for name in names if name.startswith("*.")))
        self.origins = frozenset(_origin(origin) for origin in origins)
        #: DNS names of the current certificate; a ``*`` stands for one label.
        self.certificate_names: frozenset[str] = frozenset()
        #: Called with the refused header (``host`` or ``origin``), its sender, and the error.
        self.on_refused: Callable[[str, Peer, PlainsongError], None] = lambda what, peer, error: None
        #: Writes the ``log.access`` line of a refused request, from the refused value and the error.
        self.on_answered: Callable[[str, PlainsongError], None] = lambda target, error: None

    def serve_names(self, names: frozenset[str]) -> None:
        """Set the DNS names of the current certificate."""
        self.certificate_names = names

    def is_clear(self, headers: Mapping[str, str], peer: Peer) -> bool:
        """True if no browser sent the request, and its host is allowed. All other requests need ``refusal``."""
        return "origin" not in headers and "sec-fetch-site" not in headers and self._host_problem(headers, peer) is None

    def refusal(
        self, method: str, headers: Mapping[str, str], peer: Peer, *, streams: bool = False
    ) -> PlainsongError | None:
        """Return the error for a request that must be refused, or None.

        Args:
          headers: by lower-case name, with repeated ones joined.
          streams: True for a GET that becomes a stream, whose data browsers show to any page.
        """
        problem = self._host_problem(headers, peer)
        if problem is not None:
            self.on_refused("host", peer, problem)
            self.on_answered(f"host {headers.get('host', '')}", problem)
            return problem
        if (method in _SAFE_METHODS and not streams) or self._origin_allowed(headers, peer):
            return None
        problem = _foreign(headers.get("origin"))
        self.on_refused("origin", peer, problem)
        self.on_answered(f"origin {headers.get('origin', '')}", problem)
        return problem

    # --- Host -------------------------------------------------------------------------------------

    def _host_problem(self, headers: Mapping[str, str], peer: Peer) -> PlainsongError | None:
        host = headers.get("host")
        if host is None:
            return None  # HTTP/1.0; other requests without it are refused by the parsers
        found = _HOST.fullmatch(host)
        if found is None:
            return BadRequest(
                "the Host header does not name a host", hint="send Host: as HTTP/1.1 requires (RFC 9112, 3.2)"
            )
        if found[1] or peer.unix is not None:  # a page cannot open a Unix socket
            return None
        name = found[2].lower().removesuffix(".")
        if self.allows_name(name):
            return None
        return Forbidden(f"{name!r} is not a host name of this daemon", hint=f"add {name} to security.allowed_hosts")

    def allows_name(self, name: str) -> bool:
        """True if ``Host`` may be this name, in lower case and without a final dot, or this IPv4 address."""
        if name == "localhost" or name in self._names or name in self.certificate_names or _is_ipv4(name):
            return True
        if name.endswith(self._suffixes) and not name.startswith("."):
            return True
        first, dot, rest = name.partition(".")
        return bool(first and dot) and f"*.{rest}" in self.certificate_names

    # --- Origin -----------------------------------------------------------------------------------

    def _origin_allowed(self, headers: Mapping[str, str], peer: Peer) -> bool:
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none").lower() not in ("cross-site", "same-site")
        sent = _origin(origin)
        if sent in self.origins:
            return True
        host = headers.get("host")
        # A Unix socket is used by a proxy, which may have terminated TLS.
        schemes = (peer.scheme,) if peer.unix is None else ("http", "https")
        return host is not None and sent is not None and sent in {_origin(f"{each}://{host}") for each in schemes}

    # --- CORS -------------------------------------------------------------------------------------

    def cors_headers(self, headers: Mapping[str, str], answered: Iterable[str]) -> list[tuple[str, str]]:
        """Return the CORS headers of every answer; none unless other origins are allowed.

        Args:
          headers: the request's headers.
          answered: the names of the answer's own headers.
        """
        if not self.origins:
            return []
        added = [("Vary", "Origin")]  # a stored answer must not be shown to another origin
        origin = headers.get("origin")
        if origin is not None and _origin(origin) in self.origins:
            own = sorted({name.title() for name in answered if name.lower().startswith("plainsong-")})
            added.append(("Access-Control-Allow-Origin", origin))
            added.append(("Access-Control-Expose-Headers", ", ".join((*own, *_EXPOSED))))
        return added

    def preflight_headers(self, headers: Mapping[str, str], allow: str) -> list[tuple[str, str]]:
        """Return the CORS headers for a preflight to a path with the methods ``allow``; ``[]`` for other requests."""
        origin = headers.get("origin")
        if "access-control-request-method" not in headers or origin is None or _origin(origin) not in self.origins:
            return []
        return [
            ("Access-Control-Allow-Methods", allow),
            ("Access-Control-Allow-Headers", _SENT),
            ("Access-Control-Max-Age", str(PREFLIGHT_S)),
        ]


def origin_check(config: Config) -> OriginCheck:
    """Return the checks that the settings ask for."""
    hosts = _listed(config.security.allowed_hosts)
    places = [*config.http.binds, *([parse_address(config.cluster.advertise)] if config.cluster.advertise else [])]
    hosts += [place.host for place in places if isinstance(place, Address)]
    return OriginCheck(hosts, _listed(config.security.allowed_origins))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _plain_name(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_ipv4(name: str) -> bool:
    """True for an address in the only form that browsers write into Host."""
    try:
        ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True


def _origin(text: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of an origin; None if it is malformed, or opaque (``null``)."""
    scheme, mark, rest = text.strip().partition("://")
    found = _HOST.fullmatch(rest)
    if not mark or found is None or scheme.lower() not in _DEFAULT_PORTS:
        return None
    scheme = scheme.lower()
    host = str(found[1] or found[2]).lower().removesuffix(".")
    return scheme, host, int(found[3] or _DEFAULT_PORTS[scheme])


def _foreign(origin: str | None) -> PlainsongError:
    if origin is None:
        return Forbidden("web pages of other sites may not use this daemon", hint="their origin was not sent")
    if _origin(origin) is None:
        return Forbidden("web pages without an origin may not use this daemon")
    return Forbidden(f"pages of {origin} may not use this daemon", hint=f"add {origin} to security.allowed_origins")
