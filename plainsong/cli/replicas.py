"""The requests of ``plainsong replica takeover`` and ``switch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.calls import Call, Request, effect_of
from plainsong.cli.connection import run_call

if TYPE_CHECKING:
    from plainsong.cli.connection import Where

_PATH = "/v1/replication"
#: How long a standby may need to end the log of the primary.
_TAKE_OVER_S = 60.0


def take_over(where: Where) -> dict[str, Any]:
    """Make a standby the primary; return the epoch that has begun. Raises PlainsongError."""
    with where.client() as client:
        return run_call(client, Call(Request("POST", f"{_PATH}/takeover"), effect_of, "twice", wait_s=_TAKE_OVER_S))


def switch_primary(where: Where) -> dict[str, Any]:
    """End a primary cleanly; return its epoch and last commit. Raises PlainsongError."""
    with where.client() as client:
        return run_call(client, Call(Request("POST", f"{_PATH}/switch"), effect_of, "twice"))
