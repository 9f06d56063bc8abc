"""Signatures as Standard Webhooks 1.0 has them: who knows a secret can tell that a text is ours, and when it was signed."""

from __future__ import annotations

import binascii
import hashlib
import hmac
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "whsec_"
#: Bytes of a secret. Source: Standard Webhooks, symmetric signatures.
MIN_SECRET_BYTES = 24
MAX_SECRET_BYTES = 64
#: The old and the new one, while receivers change from one to the other.
MAX_SECRETS = 2
MAX_FILE_BYTES = 4096
HINT = "one line, or two during a rotation: whsec_ and 24 to 64 random bytes in base64"


class NoSecret(ValueError):
    """A file of secrets has something else; nothing of it is quoted, since it may still be a secret."""


def secrets_in(data: bytes) -> tuple[bytes, ...]:
    """The secrets of a file, one a line. Raises NoSecret."""
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    if len(data) > MAX_FILE_BYTES or not 1 <= len(lines) <= MAX_SECRETS:
        raise NoSecret("one or two secrets are needed")
    return tuple(_secret(number, line) for number, line in enumerate(lines, 1))


def _secret(number: int, line: bytes) -> bytes:
    prefix = PREFIX.encode()
    text = line.removeprefix(prefix).rstrip(b"=")
    try:
        secret = b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        secret = b""
    if not line.startswith(prefix) or not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise NoSecret(f"line {number} is not a secret")
    return secret


def signatures_of(secrets: Iterable[bytes], webhook_id: str, now_s: int, payload: bytes) -> str:
    """The value of ``webhook-signature``: one signature for each secret."""
    signed = f"{webhook_id}.{now_s}.".encode() + payload
    each = (b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets)
    return " ".join(f"v1,{signature}" for signature in each)
