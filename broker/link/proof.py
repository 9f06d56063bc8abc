"""The proof that both ends of a link know the cluster's secret, exchanged before any frame is read.

    acceptor     32 random bytes, its name
    connector    32 random bytes, its name, HMAC-SHA-256(secret, "connect", both numbers, both names, the connection)
    acceptor     HMAC-SHA-256(secret, "accept", both numbers, both names, the connection)

A name is preceded by its length in one byte. With TLS, "the connection" is its channel binding (tls-unique); with plain
TCP it is empty. So a relay that forwards the proof, but terminates TLS on both sides to read or change what follows,
proves nothing, whatever certificate it has. An end that sends a wrong proof, or anything else, is cut off.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, Protocol

from broker.security.files import FileUnusable, read_named

if TYPE_CHECKING:
    from broker.config import Config

NONCE_BYTES = 32
MAC_BYTES = 32
MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096


class NotProven(Exception):
    """The peer does not know the secret, or did not prove it in time."""


class Talk(Protocol):
    """Sends and receives bytes on the connection."""

    async def send(self, data: bytes) -> None:
        """Send all of ``data``."""

    async def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes. Raises NotProven: there are no more."""
        ...


@dataclass(frozen=True, slots=True)
class LinkSecret:
    """The secret of the cluster, and this instance's name in the proof."""

    secret: bytes
    name: str
    """The name of this instance."""

    def __repr__(self) -> str:
        return f"LinkSecret(name={self.name!r})"

    @property
    def fingerprint(self) -> str:
        """Equal on all instances with this secret; it does not reveal the secret."""
        return hmac.digest(self.secret, b"member", sha256).hex()[:32]

    async def exchange(self, side: Literal["connect", "accept"], binding: bytes, talk: Talk) -> str:
        """Prove each end to the other; return the peer's name. Raises NotProven.

        Args:
          binding: the channel binding; both ends must have the same.
        """
        mine = secrets.token_bytes(NONCE_BYTES) + _named(self.name)
        if side == "accept":
            await talk.send(mine)
            theirs, name = await _hello(talk)
            await self._check(talk, "connect", mine, theirs, binding)
            await talk.send(self._mac("accept", mine, theirs, binding))
        else:
            theirs, name = await _hello(talk)
            await talk.send(mine + self._mac("connect", theirs, mine, binding))
            await self._check(talk, "accept", theirs, mine, binding)
        return name

    async def _check(self, talk: Talk, word: str, acceptor: bytes, connector: bytes, binding: bytes) -> None:
        if not hmac.compare_digest(await talk.read(MAC_BYTES), self._mac(word, acceptor, connector, binding)):
            raise NotProven("its answer does not match the secret on this connection")

    def _mac(self, word: str, acceptor: bytes, connector: bytes, binding: bytes) -> bytes:
        numbers = acceptor[:NONCE_BYTES] + connector[:NONCE_BYTES]
        names = acceptor[NONCE_BYTES:] + connector[NONCE_BYTES:]
        return hmac.digest(self.secret, word.encode() + numbers + names + binding, sha256)


def with_binding(binding: bytes, already_read: bytes) -> bytes:
    """Return the binding and the bytes read so far, for the process that takes over the connection."""
    return bytes([len(binding)]) + binding + already_read


def without_binding(data: bytes) -> tuple[bytes, bytes]:
    """Return the binding and the bytes from ``with_binding``'s result."""
    end = 1 + data[0]
    return data[1:end], data[end:]


def _named(name: str) -> bytes:
    data = name.encode()[:255]
    return bytes([len(data)]) + data


async def _hello(talk: Talk) -> tuple[bytes, str]:
    """Return nonce and name as sent, and the name as text."""
    head = await talk.read(NONCE_BYTES + 1)
    name = await talk.read(head[-1])
    return head + name, name.decode("utf-8", "replace")


def link_secret(config: Config, name: str) -> LinkSecret | None:
    """Read the secret that the settings name; None if there is none. Raises FileUnusable."""
    file = config.cluster.secret_file
    if not file:
        return None
    setting = "cluster.secret_file"
    secret = read_named(setting, file, MAX_SECRET_BYTES, "one line, chmod 600").strip()
    if len(secret) < MIN_SECRET_BYTES or b"\n" in secret:
        raise FileUnusable(
            setting, f"{file} is not a single line of at least {MIN_SECRET_BYTES} bytes", "openssl rand -hex 32"
        )
    return LinkSecret(secret, name)
