"""Options as Spark hands them over, lower-cased names and text, taken for what they mean or refused by name."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Spark passes these on; they are not ours.
SPARKS_OWN = frozenset({"checkpointlocation", "path"})
#: What users of other connectors write, and what it is here.
ELSEWHERE = {
    "kafka.bootstrap.servers": "url",
    "service.url": "url",
    "admin.url": "url",
    "topics": "subscribe",
    "topicspattern": "subscribePattern",
    "assign": "subscribe",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "kafka.isolation.level": "isolation",
    "kafkaconsumer.polltimeoutms": "pollTimeoutMs",
    "fetchoffset.numretries": "numRetries",
    "fetchoffset.retryintervalms": "retryIntervalMs",
}
#: Words for yes and no.
TRUTH = {"true": True, "1": True, "false": False, "0": False}


class BadOption(ValueError):
    """An option that is unknown, ill-typed, missing, or at odds with another; nothing happened."""


class OptionText:
    """The options given for one use, such as reading a stream.

    Args:
      known: the options of this use, as they are documented.
      others: those of other uses → which use.
    Raises:
      BadOption: one is not of this use; the nearest one that is, is named.
    """

    def __init__(self, given: Mapping[str, str], use: str, known: Iterable[str], others: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items() if name.lower() not in SPARKS_OWN}
        self._spelling = {name.lower(): name for name in known}
        for name in self._given:
            if name not in self._spelling:
                raise BadOption(self._why_not(name, use, others))

    def _why_not(self, name: str, use: str, others: Mapping[str, str]) -> str:
        if name == "includeheaders":
            return "option includeHeaders is not needed: headers are the column headers, routing_key another"
        for other, other_use in others.items():
            if other.lower() == name:
                near = " (its topics are in subscribe)" if other == "topic" else ""
                return f"option {other} is for {other_use}, not for {use}{near}"
        near = ELSEWHERE.get(name, "")
        if near.lower() not in self._spelling:
            close = get_close_matches(name, self._spelling, 1, cutoff=0.5)
            near = self._spelling[close[0]] if close else ""
        if near:
            return f"unknown option {name}: is {near} meant?"
        return f"unknown option {name}; those for {use} are {', '.join(self._spelling.values())}"

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def exclude(self, one: str, *others: str) -> None:
        """Refuse ``one`` together with any of ``others``."""
        for other in others:
            if one in self and other in self:
                raise BadOption(f"options {one} and {other} exclude each other")

    def text(self, name: str, *, why: str = "") -> str | None:
        """The text; None when it is missing, unless ``why`` says what it is needed for."""
        value = self._given.get(name.lower())
        value = None if value is None else value.strip()
        if value == "":
            raise BadOption(f"option {name} is empty")
        if value is None and why:
            raise BadOption(f"option {name} is missing: {why}")
        return value

    def number(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**63 - 1) -> int | None:
        """A whole number."""
        value = self.text(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            upto = f" to {most}" if most < 2**63 - 1 else " or more"
            raise BadOption(f"option {name} is {value!r}: a whole number, {least}{upto}, is expected")
        return number

    def count(self, name: str, default: int, *, least: int = 1, most: int = 2**63 - 1) -> int:
        """A whole number that has a default."""
        number = self.number(name, least=least, most=most)
        return default if number is None else number

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in TRUTH:
            raise BadOption(f"option {name} is {value!r}: true or false is expected")
        return TRUTH[value.lower()]

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """One of some words, the first when it is missing."""
        value = self.text(name)
        if value is None:
            return allowed[0]
        if value.lower() not in allowed:
            raise BadOption(f"option {name} is {value!r}: one of {', '.join(allowed)} is expected")
        return value.lower()

    def time_ms(self, name: str) -> int | None:
        """Milliseconds since 1970, given as such or as ISO-8601, which is UTC unless it says otherwise."""
        value = self.text(name)
        if value is None:
            return None
        if value.isascii() and value.isdigit():
            return int(value)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise BadOption(
                f"option {name} is {value!r}: milliseconds since 1970 or ISO-8601 are expected, "
                "such as 2026-01-31T12:00:00Z"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        # Both bounds ask for what is not before this moment, and ids know milliseconds.
        return max(0, math.ceil(moment.timestamp() * 1000))
