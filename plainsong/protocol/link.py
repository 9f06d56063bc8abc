"""The format of a link, over which instances and front ends of one service call each other: values, errors and frames.

A value is msgpack; types that msgpack does not have are extensions, each holding msgpack again:

    1  tuple        [items]                          4  record   [name, {field: value}]     a registered class
    2  set          [items]                          5  choice   [name, member's name]      a registered Enum
    3  frozenset    [items]                          6  error    [class, code, detail, hint, outcome, retry, {more}]

Only classes registered by name are constructed from bytes, by their own constructors: nothing that was sent can run.
A field that has its default is left out, so that a class may gain fields while old and new programs run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum, IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack

from plainsong.protocol import page, properties, records, requests
from plainsong.protocol.errors import BY_CODE, Internal, MalformedBody, PlainsongError
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic import asks as topic_asks
from plainsong.protocol.topic.producer_state import Effective, NamespacePolicy, Result
from plainsong.protocol.transactions import asks as transaction_asks
from plainsong.protocol.transactions.transaction import Transaction, TransactionType, VisibilityLevel
from plainsong.protocol.transactions.view import View

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_TUPLE, _SET, _FROZENSET, _RECORD, _CHOICE, _ERROR = range(1, 7)
#: The maximum depth of nested extensions. Each takes about 40 KiB of the C stack while it is read.
MAX_DEPTH = 24
_SERIES: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_MADE_OF: dict[int, Callable[[Any], Any]] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}


class Vocabulary:
    """The types that may travel: msgpack's own, and the classes that are registered."""

    def __init__(self) -> None:
        self._names: dict[type, str] = {}
        self._classes: dict[str, type] = {}
        self._to_fields: dict[type, Callable[[Any], dict[str, Any]]] = {}
        self._from_fields: dict[str, Callable[[dict[str, Any]], Any]] = {}
        #: By nesting depth, the reader of extensions. Reading changes nothing here, so threads may share it.
        self._hooks = [partial(self._decode_extension, depth) for depth in range(MAX_DEPTH + 1)]

    # --- registered classes --------------------------------------------------------------------

    def register(self, *classes: type) -> None:
        """Registers dataclasses, named tuples and enums, under the names of their classes.

        Raises:
          TypeError: a class is none of these, or another one has its name.
        """
        for cls in classes:
            if issubclass(cls, Enum):
                self._register_name(cls)
            elif is_dataclass(cls):
                self.register_as(cls, _fields_of(cls), lambda given, cls=cls: cls(**given))  # type: ignore[misc]
            elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
                self.register_as(cls, lambda value: value._asdict(), lambda given, cls=cls: cls(**given))  # type: ignore[misc]
            else:
                raise TypeError(f"{cls.__name__} is not a dataclass, named tuple or enum")

    def register_as(
        self, cls: type, to_fields: Callable[[Any], dict[str, Any]], from_fields: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Registers a class with functions that convert it to a map of fields and back. Raises TypeError."""
        self._register_name(cls)
        self._to_fields[cls] = to_fields
        self._from_fields[cls.__name__] = from_fields

    def __contains__(self, cls: type) -> bool:
        return cls in self._names

    def _register_name(self, cls: type) -> None:
        if self._classes.setdefault(cls.__name__, cls) is not cls:
            raise TypeError(f"two classes are called {cls.__name__}")
        self._names[cls] = cls.__name__

    # --- encoding ------------------------------------------------------------------------------

    def pack(self, value: Any) -> bytes:
        """``value`` as bytes.

        Raises:
          TypeError: it, or something in it, is of a class that is not registered.
          ValueError: a number beyond 64 bits, or values nested too deeply.
        """
        packed: bytes = msgpack.packb(
            value, default=self._encode_extension, strict_types=True, unicode_errors="surrogatepass"
        )
        return packed

    def packer(self) -> Callable[[Any], bytes]:
        """A function like ``pack`` at a fifth of the cost, since it keeps its buffer: for one caller at a time.

        Once it has raised, get a new one.
        """
        pack: Callable[[Any], bytes] = msgpack.Packer(
            default=self._encode_extension, strict_types=True, unicode_errors="surrogatepass"
        ).pack
        return pack

    def _encode_extension(self, value: Any) -> Any:
        cls = type(value)
        series = _SERIES.get(cls)
        if series is not None:
            return msgpack.ExtType(series, self.pack(list(value)))
        if cls in self._to_fields:
            return msgpack.ExtType(_RECORD, self.pack([self._names[cls], self._to_fields[cls](value)]))
        if cls in self._names:
            return msgpack.ExtType(_CHOICE, self.pack([self._names[cls], value.name]))
        if isinstance(value, PlainsongError):
            return msgpack.ExtType(_ERROR, self.pack(self._error_fields(value)))
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, bytes | memoryview):
            return bytes(value)
        raise TypeError(f"a {cls.__name__} cannot be sent: it is not registered")

    def _error_fields(self, error: PlainsongError) -> list[Any]:
        more = {}
        for name, value in vars(error).items():
            if name in ("detail", "hint", "outcome", "retry_after_s") or name.startswith("_"):
                continue
            try:
                self.pack(value)
            except (TypeError, ValueError):
                continue  # it cannot travel; this side's log has it
            more[name] = value
        known = type(error).__name__, error.code, error.detail, error.hint, error.outcome, error.retry_after_s
        return [*known, more]

    # --- decoding ------------------------------------------------------------------------------

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value that ``pack`` encoded.

        Raises:
          MalformedBody: the bytes are not such an encoding, or name a class that is not registered here.
        """
        try:
            return self._unpacked(data, 0)
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, msgpack.UnpackException) as broken:
            raise MalformedBody("a value of a link cannot be read", hint=f"{type(broken).__name__}: {broken}") from None

    def _unpacked(self, data: bytes | memoryview, depth: int) -> Any:
        return msgpack.unpackb(
            data, ext_hook=self._hooks[depth], strict_map_key=False, unicode_errors="surrogatepass", use_list=True
        )

    def _decode_extension(self, depth: int, code: int, data: bytes) -> Any:
        if depth >= MAX_DEPTH:
            raise MalformedBody(f"values are nested more than {MAX_DEPTH} deep")
        inner = self._unpacked(data, depth + 1)
        made_of = _MADE_OF.get(code)
        if made_of is not None:
            return made_of(inner)
        if code == _RECORD:
            name, given = inner
            return self._from_fields[name](given)
        if code == _CHOICE:
            name, member = inner
            cls = self._classes[name]
            if not issubclass(cls, Enum):
                raise TypeError(f"{name} has no members")
            return cls[member]
        if code == _ERROR:
            return error_of(*inner)
        raise ValueError(f"there is no extension {code}")


def _fields_of(cls: type) -> Callable[[Any], dict[str, Any]]:
    known = [(each.name, each.default) for each in fields(cls) if each.init]

    def to_fields(value: Any) -> dict[str, Any]:
        given = {}
        for name, default in known:
            current = getattr(value, name)
            if default is MISSING or current is not default:
                given[name] = current
        return given

    return to_fields


# --- errors ----------------------------------------------------------------------------------------


def error_of(
    cls_name: str, code: str, detail: str, hint: str, outcome: Any, retry_after_s: int | None, more: dict[str, Any]
) -> PlainsongError:
    """The error that the other side raised: of the same class if that exists here, else of the class with its code.

    Its outcome is always preserved: whether the request happened matters most.
    """
    cls = _classes_by_name().get(cls_name) or BY_CODE.get(code, Internal)
    error = cls.__new__(cls)
    PlainsongError.__init__(error, str(detail), hint=str(hint))
    error.outcome = outcome if outcome in ("not-applied", "applied") else "unknown"
    error.retry_after_s = retry_after_s if isinstance(retry_after_s, int) else None
    for name, value in more.items():
        if isinstance(name, str) and name.isidentifier() and not name.startswith("_"):
            setattr(error, name, value)
    return error


def _classes_by_name() -> dict[str, type[PlainsongError]]:
    """Every error class defined so far; the packages above the protocol define more."""
    found: dict[str, type[PlainsongError]] = {}
    waiting: list[type[PlainsongError]] = [PlainsongError]
    while waiting:
        cls = waiting.pop()
        found.setdefault(cls.__name__, cls)
        waiting.extend(cls.__subclasses__())
    return found


# --- frames ----------------------------------------------------------------------------------------
#
# A link carries frames one after the other, each its length (4 bytes, big-endian) and a msgpack array.
#
#     [CALL, n, kind, value, body, s]     a call; s: seconds the caller waits, or nil
#     [BEGIN, n, kind, value, size, s]    a call whose body of that size follows in PIECEs
#     [OPEN, n, kind, value]              opens a conversation
#     [ANSWER, n, value, body]            the whole answer
#     [HEAD, n, value, whole]             the start of an answer; PIECEs follow, to be passed on whole or one by one
#     [OPENED, n]                         the conversation is open
#     [PIECE, n, bytes, more]             a part of a body, or of a conversation's message; more: it continues
#     [END, n]                            this side sends no more PIECEs
#     [FAILED, n, error]                  instead of an answer, or of the rest of one
#     [CREDIT, n, bytes]                  flow control: allows that many more bytes, since earlier ones were consumed
#     [CANCEL, n]                         the caller no longer waits
#     [PING, x], [PONG, x]                whether the other side is alive
#     [LEAVING, 0]                        make no further calls; calls under way are answered
#
# ``n`` is the caller's number for a call, never used twice on a link. The caller sends CALL, BEGIN, OPEN and CANCEL.


#: The first bytes of a connection that becomes a link; no HTTP method has this name.
PREFACE = b"PLAINSONG/1\r\n\r\n"
#: The maximum number of bytes in one frame, without its length.
MAX_FRAME_BYTES = 1 << 20


class FrameKind(IntEnum):
    """The first element of a frame."""

    CALL = 1
    BEGIN = 2
    OPEN = 3
    ANSWER = 4
    HEAD = 5
    OPENED = 6
    PIECE = 7
    END = 8
    FAILED = 9
    CREDIT = 10
    CANCEL = 11
    PING = 12
    PONG = 13
    LEAVING = 14


#: The number of elements of each kind.
_ELEMENTS: dict[int, int] = {
    kind.value: elements
    for elements, kinds in {
        2: (FrameKind.OPENED, FrameKind.END, FrameKind.CANCEL, FrameKind.PING, FrameKind.PONG, FrameKind.LEAVING),
        3: (FrameKind.FAILED, FrameKind.CREDIT),
        4: (FrameKind.OPEN, FrameKind.ANSWER, FrameKind.HEAD, FrameKind.PIECE),
        6: (FrameKind.CALL, FrameKind.BEGIN),
    }.items()
    for kind in kinds
}


class FrameTooLarge(MalformedBody):
    """A frame over the bound: an incoming one ends the link, an outgoing one is not sent."""


class FrameWriter:
    """Encodes the frames of one connection."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pack = VOCABULARY.packer()

    def encode(self, kind: FrameKind, *rest: Any) -> bytes:
        """A frame as bytes, its length first.

        Raises:
          FrameTooLarge: it exceeds the bound.
          TypeError, ValueError: as for ``Vocabulary.pack``.
        """
        try:
            packed = self._pack([+kind, *rest])
        except Exception:
            self._pack = VOCABULARY.packer()
            raise
        if len(packed) > self._max_bytes:
            raise FrameTooLarge(f"a frame would have {len(packed)} bytes, at most {self._max_bytes} are allowed")
        return len(packed).to_bytes(4, "big") + packed


class FrameReader:
    """Decodes the frames of one connection, in whatever pieces they arrive."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    @property
    def begun_bytes(self) -> int:
        """Bytes received of the frame that is not complete yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[list[Any]]:
        """The frames that ``data`` completes, in order.

        Raises:
          FrameTooLarge: a frame announces more bytes than allowed; nothing of it is kept.
          MalformedBody: a frame is malformed. Nothing can be read after either error; earlier frames are lost too.
        """
        buffer = self._rest + data if self._rest else data
        frames: list[list[Any]] = []
        at, end, unpack = 0, len(buffer), VOCABULARY.unpack
        while end - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "big")
            if size > self._max_bytes:
                raise FrameTooLarge(f"a frame of {size} bytes is announced, at most {self._max_bytes} are allowed")
            begin, stop = at + 4, at + 4 + size
            if stop > end:
                break
            frames.append(_checked(unpack(buffer[begin:stop])))
            at = stop
        self._rest = buffer[at:]
        return frames


def _checked(frame: Any) -> list[Any]:
    if type(frame) is list and len(frame) > 1 and type(frame[0]) is int and type(frame[1]) is int:
        if _ELEMENTS.get(frame[0]) == len(frame):
            return frame
        raise MalformedBody(f"a frame of kind {frame[0]} with {len(frame)} elements is not known")
    raise MalformedBody("a frame is an array of its kind, its number and more")


# --- vocabulary ------------------------------------------------------------------------------------
#
# The serializable classes: requests and answers of topics and of the transaction service, with all their parts. Their
# names and those of their fields are part of the format. A module that adds kinds of calls registers its classes with
# ``VOCABULARY.register``.


#: Modules with only serializable dataclasses and named tuples.
_WHOLE_MODULES = (topic_asks, transaction_asks, requests, page)
_SINGLE = (
    TopicName,
    NamespacePolicy,
    Effective,
    Result,
    Transaction,
    TransactionType,
    VisibilityLevel,
    properties.TopicProperties,
    records.Metadata,
    records.ChainEnd,
    records.SetAside,
    records.Reader,
    records.NamespaceProperties,
)
_VIEW_PARTS = ("read_pointer", "in_progress", "invalids", "own")


def _plain_classes(module: ModuleType) -> list[type]:
    """The dataclasses and named tuples that a module defines itself."""
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return [cls for cls in own if is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))]


def _view_fields(view: View) -> dict[str, Any]:
    return dict(zip(_VIEW_PARTS, view.parts, strict=True))


def _view_from(given: dict[str, Any]) -> View:
    return View(*(given[part] for part in _VIEW_PARTS))


def _range_from(given: dict[str, Any]) -> range:
    return range(given["start"], given["stop"])


def _held_fields(held: page.Held) -> dict[str, Any]:
    """Encode as version 0.1 does, so that both versions can forward each other's pages: a count above the bound means more."""
    hidden = page.HIDDEN_COUNTED + 1 if held.hidden_more else held.hidden_messages
    return {"pointer": held.write_pointer, "since_ms": held.since_ms, "hidden": hidden}


def _held_from(given: dict[str, Any]) -> page.Held:
    hidden = given.get("hidden")
    more = hidden is not None and hidden > page.HIDDEN_COUNTED
    return page.Held(given["pointer"], given.get("since_ms"), page.HIDDEN_COUNTED if more else hidden, more)


def new_vocabulary() -> Vocabulary:
    """Return a vocabulary of all serializable classes of this package."""
    words = Vocabulary()
    for module in _WHOLE_MODULES:
        words.register(*(cls for cls in _plain_classes(module) if cls is not page.Held))
    words.register_as(page.Held, _held_fields, _held_from)
    words.register(*_SINGLE)
    words.register_as(View, _view_fields, _view_from)
    words.register_as(range, lambda run: {"start": run.start, "stop": run.stop}, _range_from)  # of sequence ids
    return words


#: The vocabulary of this process.
VOCABULARY = new_vocabulary()
