"""Request ids: the client's own if it is sane, else one that is unique among the daemons of a fleet."""

from __future__ import annotations

import re
import secrets
from itertools import count

#: Longer ones, and ones a log line could choke on, are replaced.
MAX_REQUEST_ID_CHARS = 128
_SANE = re.compile(r"[\x21-\x7e]{1,128}")

_process = secrets.token_hex(5)
_numbers = count(1)


def new_request_id() -> str:
    """A request id that no other request has: ten random digits of this process, and a number."""
    return f"{_process}-{next(_numbers):x}"


def sane_request_id(sent: str | None) -> str | None:
    """``sent`` if it is at most 128 visible ASCII characters, else None."""
    return sent if sent is not None and _SANE.fullmatch(sent) else None
