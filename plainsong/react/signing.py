"""Signs posts as Standard Webhooks 1.0 specifies, so that a receiver with the secret can verify origin and age."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.signatures import HINT, MAX_FILE_BYTES, NoSecret, secrets_in, signatures_of

if TYPE_CHECKING:
    from plainsong.messages import Message


class Signer:
    """Signs posts with the secrets in a file, which is reread when it changes.

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
          InvalidParameter: the file has changed, and cannot be used now.
        """
        self._load()
        webhook_id = f"{namespace}:{message.topic}:{message.id}"
        return [
            ("webhook-id", webhook_id),
            ("webhook-timestamp", str(now_s)),
            ("webhook-signature", signatures_of(self._secrets, webhook_id, now_s, message.payload)),
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
            raise InvalidParameter(f"cannot read the secrets in {self._path}: {error.strerror}", hint=HINT) from None
        try:
            self._secrets = secrets_in(data)
        except NoSecret as error:
            raise InvalidParameter(f"{self._path}: {error}", hint=HINT) from None
        self._read_at = version
