"""Start positions of readers, and saved positions: in a file, or with the daemon.

A start takes these forms:

"oldest"  "newest"          the first message there is; only messages from now on
MessageId, 20 bytes, 40 hex digits     just after that message (or at it, where a call says inclusive)
datetime (with a zone), an int         publish time, inclusive; an int is milliseconds since 1970
timedelta, "-10m"                      that long before now, by this computer's clock: s, m, h, d, w
"2026-01-31T12:00:00Z"                 ISO 8601; without a zone it is local time

A position is the id of the last message that a loop has finished. It is saved some time after that, never before: after a
crash the messages since the last save are delivered again, and none is skipped.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from plainsong.errors import PositionNotSaved
from plainsong.messages import MessageId
from plainsong.protocol import ids
from plainsong.protocol.errors import InvalidParameter, NotFound, PositionChanged
from plainsong.protocol.names import reader_name
from plainsong.serializers import SerializerLike, serializer_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from plainsong import calls
    from plainsong.messages import Origin
    from plainsong.protocol.page import Held
    from plainsong.protocol.requests import Isolation
    from plainsong.serializers import Serializer

T = TypeVar("T")


def now_ms() -> int:
    """Return this computer's time, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


DEFAULT_PAGE_MESSAGES = 10_000


#: The values of ``start`` and ``until``; None is the same as "oldest".
Start: TypeAlias = "str | bytes | int | datetime | timedelta | None"


#: The values of ``as_of``: a moment, in the forms of a start at a time.
Moment: TypeAlias = "str | int | datetime | timedelta"


NEWEST: Final = "newest"


OLDEST: Final = "oldest"


_RELATIVE = re.compile(r"-\s*(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|w)\Z")


_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


_HINT = "use for example oldest, newest, -10m, 2026-01-31T12:00:00Z, or an id of 40 hex digits"


#: Other systems' words for these positions, for the hint in the error.
_OTHER_WORDS = {
    "now": NEWEST,
    "latest": NEWEST,
    "end": NEWEST,
    "earliest": OLDEST,
    "beginning": OLDEST,
    "start": OLDEST,
}


def parse_start(given: Start, now_ms: int) -> bytes | int | None:
    """``given`` as an id (20 bytes), a timestamp in milliseconds, or None for the oldest.

    Args:
      given: anything but "newest", which only the daemon can resolve.
      now_ms: this computer's time.
    Raises:
      InvalidParameter, InvalidMessageId: it is none of the forms above; nothing happened.
    """
    if given is None or given == OLDEST:
        return None
    if isinstance(given, str):
        return _parse_text(given.strip(), now_ms)
    if isinstance(given, bytes):
        return bytes(ids.checked_id(given))
    if isinstance(given, timedelta):
        return max(0, now_ms - abs(given) // timedelta(milliseconds=1))
    if isinstance(given, datetime):
        return _timestamp_ms(given)
    if isinstance(given, int) and not isinstance(given, bool):
        return _checked_ms(given)
    raise InvalidParameter(f"{given!r} is not a position", hint=_HINT)


def _parse_text(text: str, now_ms: int) -> bytes | int | None:
    relative = _RELATIVE.match(text)
    if relative:
        return max(0, now_ms - int(float(relative[1]) * _SECONDS[relative[2]] * 1000))
    if text.isascii() and text.isdigit() and len(text) < 20:
        return _checked_ms(int(text))
    if len(text) == 2 * ids.ID_BYTES and not any(mark in text for mark in ":-+. "):
        return ids.parse_id(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        other = _OTHER_WORDS.get(text.lower())
        hint = _HINT if other is None else f"say {other}"
        raise InvalidParameter(f"{text[:80]!r} is not a position", hint=hint) from None
    return _timestamp_ms(moment if moment.tzinfo else moment.astimezone())


def _timestamp_ms(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise InvalidParameter(f"{moment} has no zone", hint="use datetime.now(UTC) or moment.astimezone()")
    return _checked_ms((moment - _EPOCH) // timedelta(milliseconds=1))


def _checked_ms(timestamp_ms: int) -> int:
    if not 0 <= timestamp_ms <= ids.MAX_TIMESTAMP_MS:
        raise InvalidParameter(f"the time {timestamp_ms} ms is out of range", hint="use milliseconds since 1970")
    return timestamp_ms


def checked_as_of(
    as_of: Moment | None, isolation: Isolation | None, now_ms: int
) -> tuple[int | None, Isolation | None]:
    """The moment in milliseconds since 1970, and the isolation to read with.

    Raises InvalidParameter: it is not a moment, or the isolation is ``uncommitted``.
    """
    if as_of is None:
        return None, isolation
    is_place = isinstance(as_of, bytes) or (isinstance(as_of, str) and as_of.strip().lower() in _OTHER_WORDS)
    moment = None if is_place else parse_start(as_of, now_ms)
    if not isinstance(moment, int):
        raise InvalidParameter(
            f"as_of is {as_of!r}", hint="use a moment such as -10m, 2026-01-31T12:00:00Z or a datetime"
        )
    if isolation == "uncommitted":
        raise InvalidParameter(
            "as_of and uncommitted exclude each other", hint="as_of reads what was committed by then"
        )
    return moment, "committed"


def as_bound(position: bytes | int) -> bytes:
    """A position as an exclusive bound, the wire form of ``until``."""
    return position if isinstance(position, bytes) else ids.bound_at(position)


def is_inclusive(position: bytes | int | None, asked: bool | None) -> bool:
    """A time is inclusive and an id exclusive, unless the caller says otherwise."""
    return not isinstance(position, bytes) if asked is None else asked


# --- a reader's plan and its topics --------------------------------------------------------------


#: Characters that make a topic name a pattern.
WILD = frozenset("*?[")


def checked_isolation(isolation: object) -> None:
    """Raises InvalidParameter unless it is an isolation or None."""
    if isolation not in (None, "committed", "uncommitted"):
        raise InvalidParameter(f"isolation is {isolation!r}", hint="use committed or uncommitted")


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a reader."""

    topics: tuple[str, ...]
    """Names and patterns."""
    start: Start
    until: Start
    follow: bool
    limit: int | None
    serializer: Serializer[Any]
    page_messages: int
    save_every: int
    save_interval_s: float
    isolation: Isolation | None = None
    idle_timeout_s: float | None = None
    as_of_ms: int | None = None

    def __post_init__(self) -> None:
        if not self.topics:
            raise InvalidParameter("no topic is named")
        if self.follow and self.until is not None:
            raise InvalidParameter("follow and until exclude each other", hint="without follow, reading ends there")
        if self.follow and self.as_of_ms is not None:
            raise InvalidParameter("follow and as_of exclude each other", hint="a read as of a moment ends there")
        for name, number in (
            ("limit", self.limit),
            ("page_messages", self.page_messages),
            ("save_every", self.save_every),
        ):
            if number is not None and number < 1:
                raise InvalidParameter(f"{name} is {number}", hint="use 1 or more")
        checked_isolation(self.isolation)
        if self.idle_timeout_s is not None and not self.idle_timeout_s > 0:
            raise InvalidParameter(f"idle_timeout_s is {self.idle_timeout_s}", hint="use a number of seconds above 0")

    @property
    def patterns(self) -> list[str]:
        """The patterns among ``topics``."""
        return [topic for topic in self.topics if WILD & set(topic)]


@dataclass(slots=True, eq=False)
class Track:
    """One topic of a reader."""

    origin: Origin
    start: bytes | int | None
    """The start of the next poll: exclusive at an id, inclusive at a time."""
    until: bytes | None
    at_end: bool = False
    held: Held | None = None
    """The undecided transaction that blocks it, if any."""


def read_plan(
    topics: str | Iterable[str],
    start: Start,
    *,
    until: Start,
    follow: bool,
    limit: int | None,
    serializer: SerializerLike,
    page_messages: int,
    save_every: int,
    save_interval_s: float,
    isolation: Isolation | None = None,
    idle_timeout_s: float | None = None,
    as_of_ms: int | None = None,
) -> Plan:
    """Checks the options of a reader. Raises InvalidParameter."""
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    using = serializer_for(serializer)
    return Plan(
        names,
        start,
        until,
        follow,
        limit,
        using,
        page_messages,
        save_every,
        save_interval_s,
        isolation,
        idle_timeout_s,
        as_of_ms,
    )


class PageBytes:
    """The bound of a reader's pages, adapted to the connection: halved after a time-out, doubled after quick responses.

    Without it, a page that takes longer than the request time-out would be requested again forever.
    """

    #: The bound after the first time-out.
    FIRST = 1 << 20
    #: The smallest bound. Such a page, or a single larger message, may take any length of time while bytes arrive.
    LEAST = 1 << 16
    #: The daemon's own bound, unless its settings say otherwise.
    MOST = 1 << 24
    #: A response within this fraction of the time-out is quick: a page twice as large would take half of the time-out.
    QUICK = 0.25
    #: Maximum number of quick responses required before pages grow.
    MOST_ANSWERS = 64

    def __init__(self) -> None:
        #: None: the daemon's own bound.
        self.most: int | None = None
        self._answers = 0
        # Doubled whenever growing fails: if the cause is not a slow connection, each attempt costs a full time-out.
        self._answers_to_grow = 1
        self._has_grown = False

    @property
    def is_least(self) -> bool:
        """True if the bound is the smallest."""
        return self.most == self.LEAST

    def timed_out(self) -> None:
        """Shrink the bound after a time-out."""
        if self._has_grown:
            self._answers_to_grow = min(2 * self._answers_to_grow, self.MOST_ANSWERS)
        self._has_grown, self._answers = False, 0
        self.most = self.FIRST if self.most is None else max(self.LEAST, self.most // 2)

    def came(self, took_s: float, limit_s: float) -> None:
        """Count a response that took ``took_s`` of the time-out ``limit_s``; grow the bound after enough quick ones."""
        if self.most is None or took_s > self.QUICK * limit_s:
            return
        self._answers += 1
        if self._answers >= self._answers_to_grow:
            self.most = None if 2 * self.most >= self.MOST else 2 * self.most
            self._has_grown, self._answers = True, 0


# --- saved positions -----------------------------------------------------------------------------


class Daemon(Protocol):
    """The interface to the daemon that positions use. Each call blocks its thread until the answer arrives."""

    @property
    def namespace(self) -> str:
        """The topics' namespace."""
        ...

    def call(self, call: calls.Call[T]) -> T:
        """The answer, after as many attempts as the reader allows. Raises PlainsongError."""
        ...


class Position(Protocol):
    """Loads and saves a reader's positions. A ``Client`` calls both methods in the reading thread, an ``AsyncClient`` in a
    worker thread.

    A position whose ``save`` writes into the transaction around the reader's loop (a row that commits with the other
    rows or not at all) has the attribute ``transactional = True``. A transaction saves it before its participants
    commit. It saves any other position after the commit. If the transaction does not commit, no position is saved, and
    the messages are delivered again.
    """

    def load(self, daemon: Daemon, topics: Iterable[str]) -> dict[str, bytes]:
        """The saved positions of ``topics``, by topic."""
        ...

    def save(self, daemon: Daemon, positions: Mapping[str, bytes]) -> None:
        """Saves the positions that changed."""
        ...


def checked_keeper(position: object) -> None:
    """Raises InvalidParameter unless it is None or can load and save positions."""
    if position is None or (callable(getattr(position, "load", None)) and callable(getattr(position, "save", None))):
        return
    raise InvalidParameter(
        f"position is {position!r}",
        hint="use FilePosition(path), ServerPosition(name), or an object with load and save",
    )


class FilePosition:
    """Positions in a JSON file, which each save replaces atomically and syncs.

    One reader at a time may use a file, for topics in any number of namespaces.

    Args:
      path: the file; its directory must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._known: dict[str, str] = {}

    def load(self, daemon: Daemon, topics: Iterable[str]) -> dict[str, bytes]:
        """Raises PositionNotSaved if the file exists and cannot be read."""
        self._known = self._read()
        found = {}
        for topic in topics:
            text = self._known.get(f"{daemon.namespace}:{topic}")
            if text is not None:
                found[topic] = bytes(MessageId(text))
        return found

    def save(self, daemon: Daemon, positions: Mapping[str, bytes]) -> None:
        """Raises PositionNotSaved: the file is unchanged, unless only a last sync failed."""
        self._known.update({f"{daemon.namespace}:{topic}": at.hex() for topic, at in positions.items()})
        self._write()

    def _read(self) -> dict[str, str]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(key): str(MessageId(text)) for key, text in content["positions"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            detail = f"{self.path} cannot be read: {error}"
            raise PositionNotSaved(detail, hint="move the file away to start over") from error
        except Exception as error:
            detail = f"{self.path} does not hold a position: {error}"
            raise PositionNotSaved(detail, hint="move the file away to start over") from error

    def _write(self) -> None:
        text = json.dumps({"version": 1, "positions": self._known}, indent=1, sort_keys=True) + "\n"
        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            raise PositionNotSaved(f"{self.path} cannot be written: {error}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically and durably. Raises OSError: the file is unchanged, unless only a last sync failed."""
    import tempfile  # here, since most programs keep no position in a file

    handle, name = tempfile.mkstemp(prefix=path.name + ".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class ServerPosition:
    """Positions that the daemon keeps under a reader's name, one for each topic.

    Each save is a compare-and-set: if another reader of that name has moved the position, the loop raises
    ``PositionChanged`` and changes nothing.

    Args:
      name: the reader's name: letters, digits, underscores and hyphens.
    Raises:
      InvalidName: it has other characters.
    """

    def __init__(self, name: str) -> None:
        self.name = reader_name(name)
        self._known: dict[str, bytes] = {}
        #: By topic: positions sent after the last known one, without an answer; each may have been stored.
        self._in_doubt: dict[str, set[bytes]] = {}

    def load(self, daemon: Daemon, topics: Iterable[str]) -> dict[str, bytes]:
        """Raises TopicNotFound, and errors of the connection."""
        found = {}
        for topic in topics:
            position = self._shown(daemon, topic)
            if position is not None:
                found[topic] = position
        self._known.update(found)
        return found

    def save(self, daemon: Daemon, positions: Mapping[str, bytes]) -> None:
        """Raises PositionChanged: another reader uses the same name."""
        from plainsong import calls  # here, since it loads the codecs, and the command line's help needs none

        for topic, position in positions.items():
            if self._known.get(topic) == position:
                continue  # saved already, by an earlier attempt that was cut off
            in_doubt = self._in_doubt.setdefault(topic, set())
            for is_last in (False, True):
                expected = self._known.get(topic)
                call = calls.set_reader(daemon.namespace, topic, self.name, position, compare=True, expected=expected)
                try:
                    daemon.call(call)
                except PositionChanged as error:
                    if error.outcome != "not-applied":
                        in_doubt.add(position)
                    # The position is ours if an earlier attempt succeeded and its answer was lost.
                    there = self._shown(daemon, topic)
                    if there == position:
                        break
                    # So it is if it was set by an attempt of an earlier save, after which the loop has continued.
                    if is_last or there is None or there not in in_doubt:
                        raise
                    self._known[topic] = there
                except BaseException as error:  # including a cancellation: its outcome is unknown
                    if getattr(error, "outcome", "unknown") != "not-applied":
                        in_doubt.add(position)
                    raise
                else:
                    break
            self._known[topic] = position
            in_doubt.clear()

    def _shown(self, daemon: Daemon, topic: str) -> bytes | None:
        from plainsong import calls

        try:
            shown = daemon.call(calls.show_reader(daemon.namespace, topic, self.name))
        except NotFound as error:
            if calls.is_missing_reader(error):
                return None
            raise
        return bytes(calls.position_of(shown))
