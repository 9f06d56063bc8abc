"""One connection to HBase's Thrift gateway: framed calls on a trio stream, and aiohappybase on top of them.

aiohappybase brings the interface (its IDL) and the tables; its own clients are made for asyncio, trust that answers
come in order, and decode in Python. The client here is what ``Connection.THRIFT_CLIENTS`` is for: no other event loop,
the compiled codec, and an answer that is not the one to the request ends the connection.

The gateway has to be started with ``-f`` (framed).
"""

from __future__ import annotations

import struct
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import trio
from thriftpy2.protocol.cybin import TCyBinaryProtocol  # type: ignore[attr-defined]
from thriftpy2.thrift import TApplicationException, TMessageType
from thriftpy2.transport import TCyMemoryBuffer

_SIZE = struct.Struct("!i")
#: A call of a function that no service has: whoever speaks this protocol says so at once, with or without an HBase.
GREETING = b"\x80\x01\x00\x01" + _SIZE.pack(9) + b"plainsong" + _SIZE.pack(0) + b"\x00"
GREETED = b"\x80\x01\x00\x03"
_RECEIVE_BYTES = 1 << 18
#: An answer may be a list of cells; beyond this it is no answer of ours.
_MAX_ANSWER_BYTES = 256 << 20


def _import_aiohappybase() -> ModuleType:
    """aiohappybase 1.4 asks pkg_resources where its IDL is, and setuptools has dropped that: answer it here."""
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
    assert spec is not None  # it is being imported
    assert spec.origin is not None  # from a file
    return spec.origin


aiohappybase = _import_aiohappybase()
#: The module that thriftpy2 makes of the IDL: the service and its types.
thrift: Any = import_module("Hbase_thrift")
#: The gateway has understood, and says that it did not go well: the connection is in step.
REFUSALS: tuple[type[Exception], ...] = (
    thrift.IOError,
    thrift.IllegalArgument,
    thrift.AlreadyExists,
    TApplicationException,
)
#: Host and port.
Address = tuple[str, int]


class OutOfStep(OSError):
    """What came is not the answer to what was asked."""


class Gateway:
    """A framed connection on which one call at a time is under way."""

    def __init__(self, stream: trio.abc.Stream, address: Address = ("", 0)) -> None:
        self.address = address
        self._stream = stream
        self._sequence = 0
        self._buffer = bytearray()
        #: Calls that go out with the next one, and whose answers nobody waits for.
        self._held = b""
        self._unheard: list[tuple[int, str]] = []

    @classmethod
    async def open(cls, address: Address) -> Gateway:
        """Connect to a gateway that answers, whether or not its HBase does. Raises OSError, trio.BrokenResourceError."""
        gateway = cls(await trio.open_tcp_stream(*address), address)
        try:
            await gateway._greet()
        except BaseException:
            with trio.CancelScope(shield=True):
                await gateway.aclose()
            raise
        return gateway

    async def call(self, name: str, *args: object) -> Any:
        """Call the service's function ``name`` with all its arguments, in the order of the IDL.

        A call that was not awaited to its end leaves its answer in the stream: the connection is to be closed then.

        Raises:
          OSError, trio.BrokenResourceError: the outcome is unknown.
          one of ``REFUSALS``: the gateway's own answer.
        """
        held, self._held = self._held, b""
        await self._stream.send_all(held + self._request(name, args))
        unheard, self._unheard = self._unheard, []
        for sequence, held_name in unheard:
            with suppress(*REFUSALS):
                self._answer(held_name, await self._frame(), sequence)
        return self._answer(name, await self._frame(), self._sequence)

    def call_later(self, name: str, *args: object) -> None:
        """Call ``name`` along with the next call, whatever it answers: for what tidies up and nobody waits for."""
        self._held += self._request(name, args)
        self._unheard.append((self._sequence, name))

    async def aclose(self) -> None:
        """Close, whatever is under way."""
        await trio.aclose_forcefully(self._stream)

    async def _greet(self) -> None:
        await self._stream.send_all(_SIZE.pack(len(GREETING)) + GREETING)
        if not (await self._frame()).startswith(GREETED):
            raise OutOfStep("what answers is no Thrift gateway")

    async def _frame(self) -> bytes:
        (size,) = _SIZE.unpack(await self._exactly(_SIZE.size))
        if not 0 < size <= _MAX_ANSWER_BYTES:
            raise OutOfStep(f"an answer of {size} bytes: is the gateway framed (-f)?")
        return await self._exactly(size)

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
        except Exception as error:  # whatever the codec makes of bytes that are no answer
            raise OutOfStep(f"an answer that cannot be read: {error!r}") from error
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


class TrioClient:
    """The service's functions as aiohappybase calls them, on a gateway that somebody else opened and closes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def __getattr__(self, name: str) -> Any:
        spec = getattr(thrift.Hbase, f"{name}_args").thrift_spec
        fields = [field[1] for _, field in sorted(spec.items())]

        def call(*args: object, **named: object) -> Any:
            return self._gateway.call(name, *args, *(named.get(field) for field in fields[len(args) :]))

        return call

    def close(self) -> None:
        """Nothing: the gateway's owner closes it."""


class TrioConnection(aiohappybase.Connection):  # type: ignore[misc, name-defined]
    """aiohappybase's connection, for what it does with tables."""

    @classmethod
    def on(cls, gateway: Gateway) -> TrioConnection:
        """One that calls through ``gateway``."""
        connection = cls()
        connection.client = TrioClient(gateway)
        return connection


def refusal_text(error: BaseException) -> str:
    """The first line of what a gateway says: its messages are bytes, with a stack trace of Java behind."""
    message = getattr(error, "message", None)
    text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message or repr(error))
    return text.partition("\n")[0][:300]
