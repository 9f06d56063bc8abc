"""A client's credentials and trust: token, certificate, authorities; and the URLs that a token may be sent to."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from plainsong.loading import load
from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Iterable

#: A file's path.
File: TypeAlias = "str | os.PathLike[str]"
#: The prefix of the URL of a daemon on a Unix socket.
UNIX = "unix:"
#: Seconds between checks for replaced certificate files.
_LOOK_S = 1.0


class Credentials:
    """The credentials of one client; threads may share them.

    Args:
      token: a bearer token.
      token_file: a file with the token on its only line. It is read again after a 401, since tokens are rotated.
      ca_file: the trusted authorities, PEM; None: the system's.
      certificate: the files of the client's own certificate and its key, PEM. These and ``ca_file`` are read again when
        they have been replaced; new connections then use the new ones.
      insecure: allow sending the token unencrypted to another machine.
    Raises:
      InvalidParameter: two tokens, a file that cannot be read, or files that are not a certificate.
    """

    def __init__(
        self,
        token: str | None = None,
        token_file: File | None = None,
        ca_file: File | None = None,
        certificate: tuple[File, File] | None = None,
        insecure: bool = False,
    ) -> None:
        if token is not None and token_file is not None:
            raise InvalidParameter("both token and token_file are given", hint="give one of them")
        self._token_file = token_file
        self._token = _read_token(token_file) if token_file is not None else _checked_token(token, "token")
        self._ca_file = ca_file
        self._certificate = certificate
        self._insecure = insecure
        self._context: ssl.SSLContext | None = None
        self._files = [Path(file) for file in (ca_file, *(certificate or ())) if file is not None]
        self._stamps: list[tuple[int, int, int]] = []
        self._looked_s = -inf
        if ca_file is not None or certificate is not None:
            self.tls_context()  # report wrong files now, not at the first request

    @property
    def token(self) -> str | None:
        """The token last read."""
        return self._token

    def check(self, urls: Iterable[str]) -> None:
        """Check where the token goes. Raises InvalidParameter: unencrypted to another machine."""
        for url in urls:
            if not self.may_go_to(url):
                raise InvalidParameter(
                    f"the token would be sent to {url} unencrypted",
                    hint="use https://, or insecure=True (--insecure) on a network without eavesdroppers",
                )

    def may_go_to(self, url: str) -> bool:
        """True if requests to this URL are encrypted, stay on this machine, or have no token."""
        return self._token is None or self._insecure or _is_private(url)

    def headers(self, url: str) -> list[tuple[bytes, bytes]]:
        """Return the authentication headers of a request to ``url``."""
        if self._token is None or not self.may_go_to(url):
            return []
        return [(b"Authorization", b"Bearer " + self._token.encode("ascii"))]

    def read_again(self, refused: str | None) -> bool:
        """Read the token again after a 401; True if it differs from the refused one."""
        if self._token_file is None:
            return False
        if self._token == refused:
            try:
                self._token = _read_token(self._token_file)
            except InvalidParameter:
                return False  # it is missing or being replaced: the caller gets the 401
        return self._token != refused

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context; a new one after the certificate files were replaced.

        If the new files are invalid, possibly because they are just being written, the previous context stays in use.

        Raises:
          InvalidParameter: the files are invalid, and there is no previous context.
        """
        now_s = time.monotonic()
        if self._context is None:
            self._stamps, self._context = self._stamps_now(), self._new_context()
        elif self._files and now_s >= self._looked_s + _LOOK_S:
            self._looked_s = now_s
            stamps = self._stamps_now()
            if stamps != self._stamps:
                with suppress(InvalidParameter):
                    # Do not load into the old context: threads may be connecting with it.
                    self._stamps, self._context = stamps, self._new_context()
        return self._context

    def _new_context(self) -> ssl.SSLContext:
        load("ssl")
        import ssl  # here, since most programs connect without TLS

        try:
            context = ssl.create_default_context(cafile=self._ca_file)
        except (OSError, ValueError) as error:
            raise InvalidParameter(f"ca_file {self._ca_file}: {_reason(error)}", hint="certificates, PEM") from error
        if self._certificate is not None:
            certificate, key = self._certificate
            try:
                context.load_cert_chain(certificate, key)
            except (OSError, ValueError) as error:
                why = f"certificate {certificate} and key {key}: {_reason(error)}"
                raise InvalidParameter(why, hint="a certificate and its key, PEM") from error
        return context

    def _stamps_now(self) -> list[tuple[int, int, int]]:
        """Return a stamp per file, which changes when the file is replaced; missing files are left out."""
        found = []
        for file in self._files:
            with suppress(OSError):
                stat = file.stat()
                found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return found


@lru_cache(maxsize=256)
def _is_private(url: str) -> bool:
    if url.startswith((UNIX, "https://")):
        return True
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_token(file: File) -> str:
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"the token file cannot be read: {error}") from error
    return _checked_token(text, str(file)) or ""


def _checked_token(text: str | None, where: str) -> str | None:
    if text is None:
        return None
    token = text.strip()
    if not token or not token.isprintable() or not token.isascii() or " " in token:
        raise InvalidParameter(f"{where}: a token is one line of printable ASCII")  # never the token itself
    return token


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    if isinstance(reason, str):
        return reason.replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
