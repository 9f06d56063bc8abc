"""Calls to a Tephra over Thrift: one connection, one call at a time, a deadline for each."""

from __future__ import annotations

from typing import Any

import trio

from protocol.errors import TransactionsUnavailable
from protocol.transactions.tephra_idl import Declared
from protocol.transactions.tephra_rpc import ApplicationError, decode_reply, encode_call
from protocol.transactions.thrift import MalformedThrift
from protocol.transactions.thrift_frames import Frames, FrameTooLarge, framed

#: A state of that size has some seven million invalid pointers.
MAX_REPLY_BYTES = 64 << 20
_RECEIVE_BYTES = 256 << 10


class TephraClient:
    """Connects when it is called, and again after whatever went wrong."""

    def __init__(self, host: str, port: int, *, timeout_s: float, max_reply_bytes: int = MAX_REPLY_BYTES) -> None:
        self.address = f"{host}:{port}"
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._max_reply_bytes = max_reply_bytes
        self._stream: trio.SocketStream | None = None
        self._frames = Frames()
        self._sequence_id = 0

    async def call(self, method: str, *args: Any) -> Any:
        """What a method answers.

        Raises:
          TransactionsUnavailable: no connection, no answer in time, or none that can be read.
        """
        try:
            with trio.fail_after(self._timeout_s):
                return await self._call(method, *args)
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from None
        except trio.TooSlowError:
            raise self._unavailable(f"no answer to {method} within {self._timeout_s:g} s") from None
        except (trio.BrokenResourceError, EOFError):
            raise self._unavailable("it closed the connection") from None
        except (MalformedThrift, FrameTooLarge) as error:
            raise self._unavailable(f"what it answers is no Tephra's: {error}") from None
        except (Declared, ApplicationError) as error:
            raise self._unavailable(f"it answers {error.message!r}") from None

    async def aclose(self) -> None:
        """Leave; the next call connects again."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await trio.aclose_forcefully(stream)

    async def _call(self, method: str, *args: Any) -> Any:
        whole = False
        try:
            if self._stream is None:
                self._frames = Frames(self._max_reply_bytes)
                self._stream = await trio.open_tcp_stream(self._host, self._port)
            self._sequence_id = self._sequence_id + 1 & 0x7FFFFFFF
            await self._stream.send_all(framed(encode_call(method, self._sequence_id, *args)))
            while (reply := self._frames.take()) is None:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
                if not data:
                    raise EOFError
                self._frames.feed(data)
            result = decode_reply(reply, method, self._sequence_id)
            whole = True
            return result
        finally:
            # After anything else than an answer, nobody knows whose the next bytes are.
            if not whole:
                await self.aclose()

    def _unavailable(self, why: str) -> TransactionsUnavailable:
        return TransactionsUnavailable(
            f"the Tephra at {self.address} does not serve: {why}", hint="look after it, or correct transactions.tephra"
        )
