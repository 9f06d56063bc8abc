"""The requests of ``plainsong replica takeover`` and ``switch``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.calls import Call, Request, object_of
from plainsong.cli.connection import run_call

if TYPE_CHECKING:
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.service import HandedOver, TakenOver

_PATH = "/v1/replication"
#: How long a standby may need to end the log of the primary.
_TAKE_OVER_S = 60.0


def take_over(where: Where) -> TakenOver:
    """Make a standby the primary; return the epoch that has begun. Raises PlainsongError."""
    call: Call[TakenOver] = Call(Request("POST", f"{_PATH}/takeover"), object_of, "twice", wait_s=_TAKE_OVER_S)
    with where.client() as client:
        return run_call(client, call)


def switch_primary(where: Where) -> HandedOver:
    """End a primary cleanly; return its epoch and last commit. Raises PlainsongError."""
    call: Call[HandedOver] = Call(Request("POST", f"{_PATH}/switch"), object_of, "twice")
    with where.client() as client:
        return run_call(client, call)
