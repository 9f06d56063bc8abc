"""Streams for hypercorn: one that begins with bytes already read, and what TLS knows of the client."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from hypercorn.typing import AppWrapper

#: The TLS versions as ASGI's ``tls`` extension numbers them.
_TLS_VERSIONS = {"TLSv1.2": 0x0303, "TLSv1.3": 0x0304}


class ResumedStream(trio.abc.HalfCloseableStream):
    """A socket stream whose first ``receive_some`` returns what somebody else has read from it."""

    def __init__(self, stream: trio.SocketStream, already_read: bytes) -> None:
        self._stream = stream
        self._already_read = already_read
        #: Where hypercorn looks for the addresses of both ends.
        self.socket = stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """The next bytes; ``b""`` at the end."""
        if self._already_read:
            first, self._already_read = self._already_read, b""
            await trio.lowlevel.checkpoint()
            return first
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of ``data``."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Waits until a send may succeed at once."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Says that nothing more will be sent."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._stream.aclose()


def with_certificate(app: AppWrapper, stream: trio.SSLStream[trio.SocketStream]) -> AppWrapper:
    """``app`` with ASGI's ``tls`` extension in its scopes: version, and the client's certificate if it showed one."""
    shown = stream.getpeercert(binary_form=True)
    tls = {
        "server_cert": None,
        "client_cert_chain": [ssl.DER_cert_to_PEM_cert(shown)] if shown else [],
        "client_cert_name": _subject(stream.getpeercert()) if shown else None,
        "client_cert_error": None,
        "tls_version": _TLS_VERSIONS.get(stream.version() or ""),
        "cipher_suite": None,
    }

    return with_extension(app, "tls", tls)


def with_extension(app: AppWrapper, name: str, value: object) -> AppWrapper:
    """``app`` with ``value`` under ``name`` in the extensions of its scopes."""

    async def told(scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
        scope.setdefault("extensions", {})[name] = value
        await app(scope, receive, send, sync_spawn, call_soon)

    return told


_SHORT = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}


def _subject(certificate: Any) -> str:
    """The subject's name as text, the most specific part first (RFC 4514)."""
    parts = [
        f"{_SHORT.get(kind, kind)}={value.replace(chr(92), chr(92) * 2).replace(',', chr(92) + ',')}"
        for group in certificate.get("subject", ())
        for kind, value in group
    ]
    return ",".join(reversed(parts))
