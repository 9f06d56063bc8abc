"""Which gateway is connected to next: each in its turn, those that failed a moment ago only when there is no other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.hbase.gateway import Address

log = logging.getLogger(__name__)

#: How long a gateway that failed is left alone, where there are others.
_AVOIDED_S = 2.0


class Turns:
    """The gateways, and which of them do not answer."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.addresses = tuple(addresses)
        self._next = 0
        #: Until when those that failed are avoided.
        self._failed: dict[Address, float] = {}

    def next(self) -> Address:
        """The next one."""
        order = [self.addresses[(self._next + step) % len(self.addresses)] for step in range(len(self.addresses))]
        now_s = trio.current_time()
        chosen = next((each for each in order if self._failed.get(each, now_s) <= now_s), order[0])
        self._next = self.addresses.index(chosen) + 1
        return chosen

    def failed(self, address: Address, why: str) -> None:
        """It cannot be connected to, broke a connection, or did not answer. Said once, until it answers."""
        if address not in self._failed:
            log.warning("an HBase gateway does not answer", extra={"gateway": self.named(address), "why": why})
        self._failed[address] = trio.current_time() + _AVOIDED_S

    def answered(self, address: Address) -> None:
        """It was connected to, and said something."""
        if self._failed.pop(address, None) is not None:
            log.info("an HBase gateway answers again", extra={"gateway": self.named(address)})

    def named(self, address: Address) -> str:
        """As it is written in a setting."""
        host, port = address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __str__(self) -> str:
        return ", ".join(map(self.named, self.addresses))
