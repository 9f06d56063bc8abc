"""Notifies systemd of the daemon's state: ready, stopping, alive. Without systemd every call does nothing."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Notifier:
    """Notifies a ``Type=notify`` unit, through ``NOTIFY_SOCKET`` and ``WATCHDOG_USEC`` in its environment.

    A message that cannot be sent is dropped: the daemon does not depend on systemd.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        # A leading @ means an abstract socket, whose name starts with a zero byte.
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        #: Interval at which to call ``alive``: half of the unit's limit. None if there is no watchdog.
        self.watchdog_interval_s = _watchdog_interval_s(environ) if self._address else None

    def ready(self) -> None:
        """Report that the daemon accepts connections."""
        self._send(b"READY=1")

    def stopping(self) -> None:
        """Report that the daemon is shutting down."""
        self._send(b"STOPPING=1")

    def alive(self) -> None:
        """Report that the event loop is running."""
        self._send(b"WATCHDOG=1")

    def _send(self, message: bytes) -> None:
        if self._address[:1] not in ("/", "\0"):
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as end:
                end.sendto(message, self._address)
        except OSError:
            pass


def _watchdog_interval_s(environ: Mapping[str, str]) -> float | None:
    allowed_us = environ.get("WATCHDOG_USEC", "")
    # WATCHDOG_PID is the process that must notify; children inherit the environment, and must not.
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (allowed_us.isascii() and allowed_us.isdigit() and int(allowed_us)):
        return None
    return int(allowed_us) / 2_000_000
