"""Signatures of posts, as Standard Webhooks 1.0 has them: who knows a secret can tell that a post is ours, and recent."""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
from base64 import b64decode, b64encode
from pathlib import Path
from typing import TYPE_CHECKING

from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from plainsong.messages import Message

PREFIX = "whsec_"
#: Bytes of a secret. Source: Standard Webhooks, symmetric signatures.
MIN_SECRET_BYTES = 24
MAX_SECRET_BYTES = 64
#: The old and the new one, while receivers change from one to the other.
MAX_SECRETS = 2
MAX_FILE_BYTES = 4096
_HINT = "one line, or two during a rotation: whsec_ and 24 to 64 random bytes in base64"


class Signer:
    """Signs posts with the secrets of a file, which is read again when it has changed.

    Raises:
      InvalidParameter: the file cannot be read, or has no usable secret.
    """

    def __init__(self, file: str | Path) -> None:
        self._path = Path(file)
        self._read_at: object = None
        self._secrets: tuple[bytes, ...] = ()
        self._load()

    def headers_of(self, message: Message, namespace: str, now_s: int) -> list[tuple[str, str]]:
        """The headers of a post at ``now_s``, seconds since 1970: one signature for each secret of the file.

        Raises:
          InvalidParameter: the file has changed, and is of no use now.
        """
        self._load()
        webhook_id = f"{namespace}:{message.topic}:{message.id}"
        signed = f"{webhook_id}.{now_s}.".encode() + message.payload
        signatures = (b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in self._secrets)
        return [
            ("webhook-id", webhook_id),
            ("webhook-timestamp", str(now_s)),
            ("webhook-signature", " ".join(f"v1,{signature}" for signature in signatures)),
        ]

    def _load(self) -> None:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                version = (found.st_mtime_ns, found.st_size, found.st_ino)
                if version == self._read_at:
                    return
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidParameter(f"cannot read the secrets in {self._path}: {error.strerror}", hint=_HINT) from None
        lines = [line.strip() for line in data.splitlines() if line.strip()]
        if len(data) > MAX_FILE_BYTES or not 1 <= len(lines) <= MAX_SECRETS:
            raise InvalidParameter(f"{self._path} has not one or two secrets", hint=_HINT)
        self._secrets = tuple(self._secret(number, line) for number, line in enumerate(lines, 1))
        self._read_at = version

    def _secret(self, number: int, line: bytes) -> bytes:
        # The line is not quoted: it may be a secret all the same.
        prefix = PREFIX.encode()
        text = line.removeprefix(prefix).rstrip(b"=")
        try:
            secret = b64decode(text + b"=" * (-len(text) % 4), validate=True)
        except binascii.Error:
            secret = b""
        if not line.startswith(prefix) or not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise InvalidParameter(f"line {number} of {self._path} is no secret", hint=_HINT)
        return secret
