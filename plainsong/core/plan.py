"""What a reader reads, and where it stands in each topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from plainsong.messages import Held, Origin
    from plainsong.protocol.requests import Isolation
    from plainsong.serializers import Serializer
    from plainsong.starts import Start

#: What makes a name a pattern.
WILD = frozenset("*?[")


def checked_isolation(isolation: object) -> None:
    """Raises InvalidParameter unless it is one, or None."""
    if isolation not in (None, "committed", "uncommitted"):
        raise InvalidParameter(f"isolation is {isolation!r}", hint="use committed or uncommitted")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be read."""

    topics: tuple[str, ...]
    """Names and patterns."""
    start: Start
    until: Start
    follow: bool
    limit: int | None
    serializer: Serializer
    page_messages: int
    save_every: int
    save_interval_s: float
    isolation: Isolation | None = None

    def __post_init__(self) -> None:
        if not self.topics:
            raise InvalidParameter("no topic is named")
        if self.follow and self.until is not None:
            raise InvalidParameter("follow and until exclude each other", hint="without follow, reading ends there")
        for name, number in (
            ("limit", self.limit),
            ("page_messages", self.page_messages),
            ("save_every", self.save_every),
        ):
            if number is not None and number < 1:
                raise InvalidParameter(f"{name} is {number}", hint="use 1 or more")
        checked_isolation(self.isolation)

    @property
    def patterns(self) -> list[str]:
        """Those that name topics by their looks."""
        return [topic for topic in self.topics if WILD & set(topic)]


@dataclass(slots=True, eq=False)
class Track:
    """One topic of a reader."""

    origin: Origin
    start: bytes | int | None
    """Where the next poll starts: exclusively at an id, inclusively at a time."""
    until: bytes | None
    at_end: bool = False
    held: Held | None = None
    """Who holds it up, if somebody does."""
