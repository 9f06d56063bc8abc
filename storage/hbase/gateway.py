"""One connection to HBase's Thrift gateway: framed calls on a trio stream, and aiohappybase on top of them.

aiohappybase provides the interface (its IDL) and functions for tables. Its own clients are for asyncio, assume that
answers arrive in order, and decode in Python. The client here fits ``Connection.THRIFT_CLIENTS``: it needs no other
event loop, uses the compiled codec, and closes the connection if an answer does not belong to the request.

The gateway must be started with ``-f`` (framed).
"""

from __future__ import annotations

import ssl
import struct
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import trio
from thriftpy2.protocol.cybin import TCyBinaryProtocol  # type: ignore[attr-defined]
from thriftpy2.thrift import TApplicationException, TMessageType
from thriftpy2.transport import TCyMemoryBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE = struct.Struct("!i")
#: A call of an unknown function: a Thrift server refuses it at once, whether or not HBase runs.
GREETING = b"\x80\x01\x00\x01" + _SIZE.pack(9) + b"plainsong" + _SIZE.pack(0) + b"\x00"
GREETED = b"\x80\x01\x00\x03"
_RECEIVE_BYTES = 1 << 18
#: An answer may be a list of cells; a larger frame cannot answer the store's requests.
_MAX_ANSWER_BYTES = 256 << 20


def _import_aiohappybase() -> ModuleType:
    """Import aiohappybase 1.4 with a stand-in for pkg_resources, which it needs and setuptools has dropped."""
    name = "pkg_resources"
    if name in sys.modules or find_spec(name) is not None:
        return import_module("aiohappybase")
    stand_in = ModuleType(name)
    stand_in.resource_filename = lambda package, file: str(Path(_origin(package)).parent / file)  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    try:
        return import_module("aiohappybase")
    finally:
        del sys.modules[name]


def _origin(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None  # the module is being imported
    assert spec.origin is not None  # modules come from files
    return spec.origin


aiohappybase = _import_aiohappybase()
#: The module that thriftpy2 generates from the IDL: the service and its types.
thrift: Any = import_module("Hbase_thrift")
#: Errors with which the gateway answers; the connection remains usable.
REFUSALS: tuple[type[Exception], ...] = (
    thrift.IOError,
    thrift.IllegalArgument,
    thrift.AlreadyExists,
    TApplicationException,
)
#: Host and port.
Address = tuple[str, int]


class OutOfStep(OSError):
    """The received frame does not answer the request."""


class AnswerTooLarge(OutOfStep):
    """The answer exceeds the size limit. The gateway works, but the connection must be closed."""


class Gateway:
    """A framed connection for one call at a time."""

    def __init__(self, stream: trio.abc.Stream, address: Address = ("", 0)) -> None:
        self.address = address
        self._stream = stream
        self._sequence = 0
        self._buffer = bytearray()
        #: True once a whole frame has arrived, which shows that the gateway is framed.
        self._is_framed = False
        #: Calls to send with the next one, and those whose answers must be skipped.
        self._deferred = b""
        self._unread_answers: list[tuple[int, str]] = []

    @classmethod
    async def open(cls, address: Address, tls: Callable[[], ssl.SSLContext] | None = None) -> Gateway:
        """Connect to a gateway that answers, even if its HBase does not; over TLS if ``tls`` provides a context.

        Raises:
          OSError, trio.BrokenResourceError: there is no answer, or the answer is not that of a gateway.
        """
        gateway = cls(await connect(address, tls), address)
        try:
            await gateway._greet()
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await gateway.aclose()
            # With TLS 1.3 a certificate is refused after the handshake.
            if isinstance(error, trio.BrokenResourceError) and isinstance(error.__cause__, ssl.SSLError):
                raise OSError(_tls_failure(error.__cause__)) from error
            raise
        return gateway

    async def call(self, name: str, *args: object) -> Any:
        """Call the service's function ``name`` with all its arguments, in the order of the IDL.

        A cancelled call leaves its answer in the stream: the caller must close the connection.

        Raises:
          OSError, trio.BrokenResourceError: the outcome is unknown.
          one of ``REFUSALS``: the gateway answered with it.
        """
        deferred, self._deferred = self._deferred, b""
        await self._stream.send_all(deferred + self._request(name, args))
        unread, self._unread_answers = self._unread_answers, []
        for sequence, deferred_name in unread:
            with suppress(*REFUSALS):
                self._answer(deferred_name, await self._frame(), sequence)
        return self._answer(name, await self._frame(), self._sequence)

    def call_later(self, name: str, *args: object) -> None:
        """Send a call along with the next one, and ignore its answer. For cleanup that no caller waits for."""
        self._deferred += self._request(name, args)
        self._unread_answers.append((self._sequence, name))

    async def aclose(self) -> None:
        """Close the connection, even during a call."""
        await trio.aclose_forcefully(self._stream)

    async def _greet(self) -> None:
        await self._stream.send_all(_SIZE.pack(len(GREETING)) + GREETING)
        self._buffer += await self._stream.receive_some(_RECEIVE_BYTES)
        if not self._buffer:
            tls = "" if isinstance(self._stream, trio.SSLStream) else "; if it expects TLS, set storage.hbase.tls"
            raise OSError(f"it closed the connection{tls}")
        if not (await self._frame()).startswith(GREETED):
            raise OutOfStep("the server is not a Thrift gateway")

    async def _frame(self) -> bytes:
        (size,) = _SIZE.unpack(await self._exactly(_SIZE.size))
        if self._is_framed and size > _MAX_ANSWER_BYTES:
            raise AnswerTooLarge(f"an answer of {size} bytes exceeds the limit of {_MAX_ANSWER_BYTES >> 20} MiB")
        if not 0 < size <= _MAX_ANSWER_BYTES:
            raise OutOfStep(f"an answer of {size} bytes{'' if self._is_framed else ': is the gateway framed (-f)?'}")
        frame = await self._exactly(size)
        self._is_framed = True
        return frame

    def _request(self, name: str, args: tuple[object, ...]) -> bytes:
        self._sequence = (self._sequence + 1) & 0x7FFFFFFF
        request = getattr(thrift.Hbase, f"{name}_args")()
        for (_, field), value in zip(sorted(request.thrift_spec.items()), args, strict=True):
            setattr(request, field[1], value)
        out = TCyMemoryBuffer()
        codec = TCyBinaryProtocol(out, decode_response=False)
        codec.write_message_begin(name, TMessageType.CALL, self._sequence)
        codec.write_struct(request)
        codec.write_message_end()
        body: bytes = out.getvalue()
        return _SIZE.pack(len(body)) + body

    def _answer(self, name: str, body: bytes, expected: int) -> Any:
        codec = TCyBinaryProtocol(TCyMemoryBuffer(body), decode_response=False)
        try:
            _, kind, sequence = codec.read_message_begin()
            failed = kind == TMessageType.EXCEPTION
            answer = TApplicationException() if failed else getattr(thrift.Hbase, f"{name}_result")()
            codec.read_struct(answer)
        except Exception as error:  # the codec may raise anything for bytes that are not an answer
            raise OutOfStep(f"an unreadable answer: {error!r}") from error
        if sequence != expected:
            raise OutOfStep(f"answer {sequence} to request {expected}")
        if failed:
            raise answer
        for field, value in vars(answer).items():
            if field != "success" and value is not None:
                raise value
        return getattr(answer, "success", None)

    async def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            received = await self._stream.receive_some(_RECEIVE_BYTES)
            if not received:
                raise OSError("the gateway closed the connection")
            self._buffer += received
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


async def connect(address: Address, tls: Callable[[], ssl.SSLContext] | None) -> trio.abc.Stream:
    """Connect to ``address``; with ``tls``, verify that the certificate matches the host. Raises OSError."""
    stream = await trio.open_tcp_stream(*address)
    if tls is None:
        return stream
    try:
        by_tls = trio.SSLStream(stream, tls(), server_hostname=address[0], https_compatible=True)
        await by_tls.do_handshake()
    except BaseException as error:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)
        if isinstance(error, trio.BrokenResourceError):
            raise OSError(_tls_failure(error.__cause__)) from error
        raise
    return by_tls


def _tls_failure(cause: BaseException | None) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {cause.verify_message}"
    ended = isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError)  # which of them depends on Python's version
    if ended or not isinstance(cause, ssl.SSLError):
        return "it closed the connection during the TLS handshake; perhaps it does not use TLS"
    return f"TLS failed: {(cause.reason or str(cause)).replace('_', ' ').lower()}"


class TrioClient:
    """The service's functions as aiohappybase calls them, on a gateway that the caller opens and closes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def __getattr__(self, name: str) -> Any:
        spec = getattr(thrift.Hbase, f"{name}_args").thrift_spec
        fields = [field[1] for _, field in sorted(spec.items())]

        def call(*args: object, **named: object) -> Any:
            return self._gateway.call(name, *args, *(named.get(field) for field in fields[len(args) :]))

        return call

    def close(self) -> None:
        """Do nothing: the gateway's owner closes it."""


class TrioConnection(aiohappybase.Connection):  # type: ignore[misc, name-defined]
    """aiohappybase's connection, used for its table functions."""

    @classmethod
    def on(cls, gateway: Gateway) -> TrioConnection:
        """Return a connection that calls through ``gateway``."""
        connection = cls()
        connection.client = TrioClient(gateway)
        return connection


def refusal_text(error: BaseException) -> str:
    """Return the first line of a gateway's message, which is bytes with a Java stack trace."""
    message = getattr(error, "message", None)
    text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message or repr(error))
    return text.partition("\n")[0][:300]
