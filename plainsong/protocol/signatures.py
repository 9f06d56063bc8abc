"""Signatures of Standard Webhooks 1.0: holders of a secret can verify that we signed a payload, and when."""

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
#: The old and the new secret, while receivers are being switched to the new one.
MAX_SECRETS = 2
MAX_FILE_BYTES = 4096
HINT = "one line, or two during a rotation: whsec_ and 24 to 64 random bytes in base64"


class NoSecret(ValueError):
    """A file of secrets is invalid. The error quotes nothing from the file, since it may still contain a secret."""


def secrets_in(data: bytes) -> tuple[bytes, ...]:
    """Return the secrets of a file, which has one per line. Raises NoSecret."""
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
    """Return the value of ``webhook-signature``: one signature for each secret."""
    signed = f"{webhook_id}.{now_s}.".encode() + payload
    each = (b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets)
    return " ".join(f"v1,{signature}" for signature in each)
