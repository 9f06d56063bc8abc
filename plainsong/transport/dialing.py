"""Opens TCP connections within a time limit, name resolution included.

``getaddrinfo`` has no time-out and cannot be cancelled: a resolver that does not answer blocks it for ten seconds or
more. So a thread calls it, and callers wait for the thread with a time-out.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeAlias

#: Address family and address, as ``socket.connect`` takes it.
Address: TypeAlias = "tuple[socket.AddressFamily, Any]"
#: The minimum time-out of a socket; 0 would make it non-blocking.
MIN_TIMEOUT_S = 0.001


class NotResolved(TimeoutError):
    """The resolver has not answered in time."""


class Dialing:
    """A connection that is being opened. ``close`` ends that, from any thread or signal handler."""

    def __init__(self) -> None:
        #: Receives the addresses, the resolver's error, or None after ``close``.
        self.mailbox: SimpleQueue[list[Address] | OSError | None] = SimpleQueue()
        self.socket: socket.socket | None = None
        self.is_closed = False

    def close(self) -> None:
        """Make the opening fail at once."""
        self.is_closed = True
        self.mailbox.put(None)
        raw = self.socket
        if raw is not None:
            with suppress(OSError):  # it is not connected yet, or closed by now
                raw.shutdown(socket.SHUT_RDWR)


def dial(host: str, port: int, timeout_s: float, dialing: Dialing | None = None) -> socket.socket:
    """A connection to the first address that answers. Raises OSError, which includes TimeoutError."""
    dialing = dialing or Dialing()
    until_s = monotonic() + timeout_s
    addresses = look_up(host, port, timeout_s, dialing)
    failed: OSError | None = None
    for place, (family, address) in enumerate(addresses):
        raw = dialing.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if dialing.is_closed:
                raise ConnectionAbortedError("the connection was given up")
            # One address that does not answer leaves time for the others.
            raw.settimeout(max(MIN_TIMEOUT_S, (until_s - monotonic()) / (len(addresses) - place)))
            raw.connect(address)
        except OSError as error:
            raw.close()
            failed = error
        except BaseException:
            raw.close()
            raise
        else:
            raw.settimeout(max(MIN_TIMEOUT_S, until_s - monotonic()))
            return raw
    assert failed is not None  # getaddrinfo returns an address, or raises
    raise failed


# --- names ---------------------------------------------------------------------------------------


def look_up(host: str, port: int, timeout_s: float, dialing: Dialing | None = None) -> list[Address]:
    """The addresses of ``host``. Raises OSError, which includes TimeoutError."""
    numeric = numeric_addresses(host, port)
    if numeric is not None:
        return numeric
    mailbox = (dialing or Dialing()).mailbox
    _Lookup.of(host, port).tell(mailbox)
    try:
        found = mailbox.get(timeout=max(0.0, timeout_s))
    except Empty:
        raise NotResolved(f"the name {host} was not resolved within {timeout_s:g} s") from None
    if found is None:
        raise ConnectionAbortedError("the connection was given up")
    if isinstance(found, OSError):
        raise type(found)(*found.args)
    return found


def no_thread(host: str, error: RuntimeError) -> OSError:
    """The error if no thread could be started to resolve ``host``. The next attempt may succeed."""
    return OSError(f"the name {host} was not resolved: {error}; a URL with an IP address needs no thread")


def numeric_addresses(host: str, port: int) -> list[Address] | None:
    """The address that ``host`` is; None if it is a name."""
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except OSError:
        return None


def _addresses(host: str, port: int, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


class _Lookup:
    """A thread that resolves one name. Callers that arrive while it runs wait for the same answer.

    So names that are never resolved cost one thread each, however often they are tried.
    """

    #: By process, host and port: a forked child has none of its parent's threads.
    _under_way: dict[tuple[int, str, int], _Lookup] = {}  # noqa: RUF012 - shared by all

    def __init__(self, key: tuple[int, str, int]) -> None:
        self._key = key
        self._mailboxes: SimpleQueue[SimpleQueue[Any]] = SimpleQueue()
        self._outcome: list[Address] | OSError | None = None

    @classmethod
    def of(cls, host: str, port: int) -> _Lookup:
        """The one under way, or a new one."""
        key = (os.getpid(), host, port)
        made = cls(key)
        found = cls._under_way.setdefault(key, made)
        if found is made:
            try:
                threading.Thread(target=made._run, name="plainsong-resolver", daemon=True).start()
            except RuntimeError as error:  # the system refuses a thread; resolving here would exceed any deadline
                made._end(no_thread(host, error))
        return found

    def tell(self, mailbox: SimpleQueue[Any]) -> None:
        """Puts the outcome into ``mailbox``, now or later."""
        self._mailboxes.put(mailbox)
        if self._outcome is not None:
            self._notify_all()

    def _run(self) -> None:
        outcome: list[Address] | OSError
        try:
            outcome = _addresses(*self._key[1:])
        except OSError as error:
            outcome = error
        except ValueError as error:  # a label is too long
            outcome = OSError(str(error))
        except BaseException:
            self._under_way.pop(self._key, None)
            raise
        self._end(outcome)

    def _end(self, outcome: list[Address] | OSError) -> None:
        self._under_way.pop(self._key, None)
        self._outcome = outcome
        self._notify_all()

    def _notify_all(self) -> None:
        while True:
            try:
                self._mailboxes.get_nowait().put(self._outcome)
            except Empty:
                return
