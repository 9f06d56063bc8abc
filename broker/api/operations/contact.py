"""The contact for security reports: ``/.well-known/security.txt`` (RFC 9116)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.http.messages import Answer
from broker.security.tokens import time_text
from plainsong.protocol.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.http.messages import Request

#: Validity of an answer. It is generated from a setting on each request.
GOOD_FOR_MS = 30 * 86_400_000


@dataclass(frozen=True, slots=True)
class Contact:
    """The route of the file. It requires no authentication: a reporter has no credential."""

    contact: str
    """``security.contact``."""
    now_ms: Callable[[], int]

    async def show(self, request: Request) -> Answer:
        """Return the addresses of the setting, in the same order. Raises NotFound if there are none."""
        request.parameters()
        addresses = [each.strip() for each in self.contact.split(",") if each.strip()]
        if not addresses:
            raise NotFound("this daemon has no contact for security reports", hint="set security.contact")
        expires = time_text((self.now_ms() + GOOD_FOR_MS) // 1000 * 1000)
        lines = [*(f"Contact: {address}" for address in addresses), f"Expires: {expires}"]
        return Answer(200, "\n".join([*lines, ""]).encode(), "text/plain; charset=utf-8")
