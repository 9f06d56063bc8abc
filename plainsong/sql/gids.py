"""Names of prepared transactions: whose service decides them, by which id, and which participant made them.

    plainsong:SERVICE:ID:TAG

SERVICE names the transaction service that was asked (``-`` when it has no name), ID is the transaction's there,
TAG is drawn anew for each participant, so that no name ever comes twice. All of it is safe inside quotes.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

#: What all names begin with.
PREFIX = "plainsong:"
#: Where the service has no name.
NAMELESS = "-"
_GID = re.compile(r"plainsong:(?P<service>[A-Za-z0-9_.-]{1,64}):(?P<id>[1-9][0-9]{0,18}):(?P<tag>[0-9a-f]{16})")


class Gid(NamedTuple):
    """The name of one prepared transaction; ``str`` of it is what the database knows."""

    service: str
    transaction_id: int
    tag: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.service}:{self.transaction_id}:{self.tag}"


def new_gid(service: str, transaction_id: int) -> Gid:
    """A name that nobody else has. Raises ValueError for a service or an id that cannot be part of one."""
    gid = Gid(service or NAMELESS, transaction_id, secrets.token_hex(8))
    if parse_gid(str(gid)) is None:
        raise ValueError(f"{gid} is no name for a prepared transaction")
    return gid


def parse_gid(text: str) -> Gid | None:
    """The parts of a name; None for one that is not ours."""
    found = _GID.fullmatch(text)
    return None if found is None else Gid(found["service"], int(found["id"]), found["tag"])
