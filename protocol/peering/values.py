"""Values as bytes: msgpack, and what is told apart in it as extensions, each holding msgpack again.

    1  tuple        [items]                          4  record   [name, {field: value}]     a registered class
    2  set          [items]                          5  choice   [name, member's name]      a registered Enum
    3  frozenset    [items]                          6  error    [class, code, detail, hint, outcome, retry, {more}]

Only what is registered by name is made from bytes, and by its own constructor: nothing here can run what was sent.
A field that has its default is left out, so that a class may gain fields while old and new programs run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack

from protocol.errors import BY_CODE, Internal, MalformedBody, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable

_TUPLE, _SET, _FROZENSET, _RECORD, _CHOICE, _ERROR = range(1, 7)
#: Extensions within extensions. Each takes some 40 KiB of the C stack while it is read.
MAX_DEPTH = 24

_SERIES: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_MADE_OF: dict[int, Callable[[Any], Any]] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}


class Vocabulary:
    """What may travel: msgpack's own values, and classes that are registered here."""

    def __init__(self) -> None:
        self._names: dict[type, str] = {}
        self._classes: dict[str, type] = {}
        self._apart: dict[type, Callable[[Any], dict[str, Any]]] = {}
        self._together: dict[str, Callable[[dict[str, Any]], Any]] = {}
        #: What reads extensions within so many others. Nothing here changes while values are read, so threads may.
        self._hooks = [partial(self._met, depth) for depth in range(MAX_DEPTH + 1)]

    # --- who is known --------------------------------------------------------------------------

    def register(self, *classes: type) -> None:
        """Lets dataclasses, named tuples and enums travel, under the names of their classes.

        Raises:
          TypeError: a class is none of these, or another one has its name.
        """
        for cls in classes:
            if issubclass(cls, Enum):
                self._know(cls)
            elif is_dataclass(cls):
                self.register_as(cls, _fields_of(cls), lambda given, cls=cls: cls(**given))  # type: ignore[misc]
            elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
                self.register_as(cls, lambda value: value._asdict(), lambda given, cls=cls: cls(**given))  # type: ignore[misc]
            else:
                raise TypeError(f"{cls.__name__} is no dataclass, named tuple or enum")

    def register_as(
        self, cls: type, apart: Callable[[Any], dict[str, Any]], together: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Lets a class travel that is taken apart and put together by functions of its own. Raises TypeError."""
        self._know(cls)
        self._apart[cls] = apart
        self._together[cls.__name__] = together

    def __contains__(self, cls: type) -> bool:
        return cls in self._names

    def _know(self, cls: type) -> None:
        if self._classes.setdefault(cls.__name__, cls) is not cls:
            raise TypeError(f"two classes are called {cls.__name__}")
        self._names[cls] = cls.__name__

    # --- out -----------------------------------------------------------------------------------

    def pack(self, value: Any) -> bytes:
        """``value`` as bytes.

        Raises:
          TypeError: it, or something in it, is of a class that is not registered.
          ValueError: a number beyond 64 bits, or values within values without end.
        """
        packed: bytes = msgpack.packb(value, default=self._extended, strict_types=True, unicode_errors="surrogatepass")
        return packed

    def packer(self) -> Callable[[Any], bytes]:
        """What packs as ``pack`` does, at a fifth of the price, for one user: it keeps its buffer.

        After it has raised, it is of no use any more.
        """
        pack: Callable[[Any], bytes] = msgpack.Packer(
            default=self._extended, strict_types=True, unicode_errors="surrogatepass"
        ).pack
        return pack

    def _extended(self, value: Any) -> Any:
        cls = type(value)
        series = _SERIES.get(cls)
        if series is not None:
            return msgpack.ExtType(series, self.pack(list(value)))
        if cls in self._apart:
            return msgpack.ExtType(_RECORD, self.pack([self._names[cls], self._apart[cls](value)]))
        if cls in self._names:
            return msgpack.ExtType(_CHOICE, self.pack([self._names[cls], value.name]))
        if isinstance(value, PlainsongError):
            return msgpack.ExtType(_ERROR, self.pack(self._told(value)))
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, bytes | memoryview):
            return bytes(value)
        raise TypeError(f"a {cls.__name__} does not travel: it is not registered")

    def _told(self, error: PlainsongError) -> list[Any]:
        more = {}
        for name, value in vars(error).items():
            if name in ("detail", "hint", "outcome", "retry_after_s") or name.startswith("_"):
                continue
            try:
                self.pack(value)
            except (TypeError, ValueError):
                continue  # what cannot travel is for this side's log
            more[name] = value
        known = type(error).__name__, error.code, error.detail, error.hint, error.outcome, error.retry_after_s
        return [*known, more]

    # --- in ------------------------------------------------------------------------------------

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value that ``pack`` made these bytes of.

        Raises:
          MalformedBody: they are no such bytes, or speak of what is not registered here.
        """
        try:
            return self._unpacked(data, 0)
        except (ValueError, TypeError, KeyError, RecursionError, msgpack.exceptions.UnpackException) as broken:
            raise MalformedBody("a value of a link cannot be read", hint=f"{type(broken).__name__}: {broken}") from None

    def _unpacked(self, data: bytes | memoryview, depth: int) -> Any:
        return msgpack.unpackb(
            data, ext_hook=self._hooks[depth], strict_map_key=False, unicode_errors="surrogatepass", use_list=True
        )

    def _met(self, depth: int, code: int, data: bytes) -> Any:
        if depth >= MAX_DEPTH:
            raise MalformedBody(f"more than {MAX_DEPTH} values within each other")
        inner = self._unpacked(data, depth + 1)
        made_of = _MADE_OF.get(code)
        if made_of is not None:
            return made_of(inner)
        if code == _RECORD:
            name, given = inner
            return self._together[name](given)
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

    def apart(value: Any) -> dict[str, Any]:
        given = {}
        for name, default in known:
            held = getattr(value, name)
            if default is MISSING or held is not default:
                given[name] = held
        return given

    return apart


# --- errors ----------------------------------------------------------------------------------------


def error_of(
    cls_name: str, code: str, detail: str, hint: str, outcome: Any, retry_after_s: int | None, more: dict[str, Any]
) -> PlainsongError:
    """The error that was raised afar: of the same class where that is known here, else the nearest by its code.

    What counts, whether it happened, is as it was there in any case.
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
    """Every class of errors there is by now; floors above this one have some of their own."""
    found: dict[str, type[PlainsongError]] = {}
    waiting: list[type[PlainsongError]] = [PlainsongError]
    while waiting:
        cls = waiting.pop()
        found.setdefault(cls.__name__, cls)
        waiting.extend(cls.__subclasses__())
    return found
