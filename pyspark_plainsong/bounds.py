"""Where reading starts and ends, as options say it: for all topics, or for each of some."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pyspark_plainsong.option_text import BadOption

if TYPE_CHECKING:
    from collections.abc import Mapping

#: An id, exactly so: 20 bytes. A time: milliseconds.
Bound = Literal["earliest", "latest"] | bytes | int

_ID = re.compile(r"[0-9a-fA-F]{40}\Z")


class TopicBound(NamedTuple):
    """One topic's."""

    bound: Bound
    generation: int | None = None
    """Of the topic the id is of, where that is known."""


@dataclass(frozen=True)
class Bounds:
    """Every topic's."""

    default: Bound
    by_topic: Mapping[str, TopicBound] = field(default_factory=dict)

    def of(self, topic: str) -> TopicBound:
        """One topic's."""
        return self.by_topic.get(topic, TopicBound(self.default))

    def check_topics(self, name: str, topics: tuple[str, ...] | None, pattern: str) -> None:
        """Refuse topics that are not subscribed to. Raises BadOption."""
        for topic in self.by_topic:
            if topics is not None and topic not in topics:
                raise BadOption(f"option {name} names the topic {topic}, which subscribe does not")
            if topics is None and not re.fullmatch(pattern, topic):
                raise BadOption(f"option {name} names the topic {topic}, which subscribePattern does not match")


def parse_bounds(name: str, text: str, default: Bound, namespace: str) -> Bounds:
    """The bounds of an option's text: a word, an id, or JSON of these by topic, or a checkpoint's offset.

    Raises:
      BadOption: it is none of these.
    """
    if not text.startswith("{"):
        return Bounds(_bound(name, text))
    try:
        given = json.loads(text)
    except ValueError as error:
        raise BadOption(f"option {name} is no JSON: {error}") from None
    if isinstance(given.get("topics"), dict) and given.get("v") == 1:
        given = given["topics"]
    return Bounds(default, {_topic(name, topic, namespace): _topic_bound(name, each) for topic, each in given.items()})


def _topic(name: str, topic: str, namespace: str) -> str:
    of, colon, rest = topic.partition(":")
    if colon and of != namespace:
        raise BadOption(f"option {name} names {topic}, which is not of the namespace {namespace}")
    return rest if colon else topic


def _topic_bound(name: str, given: Any) -> TopicBound:
    if isinstance(given, dict) and set(given) == {"gen", "next"} and type(given["gen"]) is int:
        return TopicBound(_bound(name, given["next"]), given["gen"])
    return TopicBound(_bound(name, given))


def _bound(name: str, given: Any) -> Bound:
    if isinstance(given, str):
        if given.lower() == "earliest":
            return "earliest"
        if given.lower() == "latest":
            return "latest"
        if _ID.match(given):
            return bytes.fromhex(given)
    raise BadOption(
        f"option {name} has {given!r}: earliest, latest, a message id of 40 hex digits, or a JSON object of these "
        "by topic is expected; a time has an option of its own"
    )
