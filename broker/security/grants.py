"""The grants file: rights of names on topics, and quotas. Free of I/O: text in, tables out.

Any error rejects the whole file, with its line and column: half of a grants file would be a different policy.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.security.identity import VERBS, Verb
from broker.security.tokens import NAME
from broker.security.toml_places import Places
from plainsong.protocol.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMAT = 1
MAX_LINES = 100_000
MAX_FILE_BYTES = 64 << 20
#: The namespace that no ``*`` matches.
SYSTEM = "system"
SERVICE = "service"
EVERYBODY = "*"
_GROUP, _OIDC_GROUP = "group:", "oidc-group:"
_PATTERN = re.compile(r"([A-Za-z0-9_]{1,255}|[A-Za-z0-9_]{0,255}\*):([A-Za-z0-9_-]{1,255}|[A-Za-z0-9_-]{0,255}\*)")
_GROUP_NAME = re.compile(r"[A-Za-z0-9_.@/+=-]{1,255}")
_CLAIM = re.compile(r"[^\x00-\x1f\x7f]{1,255}")

#: Limits on rates, as token buckets; and limits on numbers.
RATES = (
    "requests_per_s",
    "publish_requests_per_s",
    "publish_messages_per_s",
    "publish_bytes_per_s",
    "poll_bytes_per_s",
)
COUNTS = ("connections", "parked_polls", "open_transactions", "topics")
BURST_S = 2.0
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)")
MAX_LIMIT = 1 << 50


class BadGrantsFile(ValueError):
    """A grants file that cannot be used."""

    def __init__(self, detail: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line}, column {column}: {detail}" if line else detail)
        self.detail = detail
        self.line = line
        self.column = column


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of topics: namespace and topic, each exact or a prefix and ``*``; or ``service``."""

    namespace: str
    topic: str

    def __str__(self) -> str:
        return f"{self.namespace}:{self.topic}" if self.topic else SERVICE

    @property
    def is_service(self) -> bool:
        return not self.topic

    def matches_namespace(self, namespace: str) -> bool:
        """True if topics of that namespace may match. ``system`` must be spelled out."""
        if self.namespace.endswith("*"):
            return namespace != SYSTEM and namespace.startswith(self.namespace[:-1])
        return namespace == self.namespace

    def matches(self, namespace: str, topic: str) -> bool:
        """True if the topic matches."""
        if not self.topic or not self.matches_namespace(namespace):
            return False
        return topic.startswith(self.topic[:-1]) if self.topic.endswith("*") else topic == self.topic


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern. Raises ValueError."""
    if text == SERVICE:
        return Pattern(SERVICE, "")
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text[:80]!r} is neither service nor namespace:topic, each part a name or a prefix followed by *"
        )
    return Pattern(found[1], found[2])


@dataclass(frozen=True, slots=True)
class Grant:
    """One ``[[grant]]``: names, their verbs, and the patterns."""

    to: tuple[str, ...]
    verbs: tuple[Verb, ...]
    on: tuple[Pattern, ...]
    line: int
    """Its line in the file."""


@dataclass(frozen=True, slots=True)
class Quota:
    """One ``[[quota]]``: limits for each of several names, or for each of several topics."""

    to: tuple[str, ...]
    on: tuple[Pattern, ...]
    limits: Mapping[str, float]
    """Keys are from ``RATES`` and ``COUNTS``."""
    line: int
    burst_s: float = BURST_S


@dataclass(frozen=True, slots=True)
class GrantTable:
    """The content of a grants file."""

    groups: Mapping[str, frozenset[str]]
    grants: tuple[Grant, ...]
    quotas: tuple[Quota, ...] = ()

    def applies(self, to: Iterable[str], name: str, claimed: Iterable[str]) -> bool:
        """True if ``to`` includes the name, or one of the groups ``claimed`` by its provider."""
        claimed = frozenset(claimed)
        for each in to:
            # A name that looks like a group, which a provider's prefix could produce, is not one.
            if each.startswith(_GROUP):
                found = name in self.groups.get(each.removeprefix(_GROUP), ())
            elif each.startswith(_OIDC_GROUP):
                found = each.removeprefix(_OIDC_GROUP) in claimed
            else:
                found = each in (EVERYBODY, name)
            if found:
                return True
        return False

    def granted(self, name: str, claimed: Iterable[str], *, proven: bool = True) -> tuple[Grant, ...]:
        """Return the grants of a name; without ``proven``, not those to every name."""
        claimed = frozenset(claimed)
        return tuple(
            grant
            for grant in self.grants
            if self.applies(grant.to if proven else [to for to in grant.to if to != EVERYBODY], name, claimed)
        )

    def groups_of(self, name: str) -> tuple[str, ...]:
        """Return the groups of this file that a name is in."""
        return tuple(sorted(group for group, members in self.groups.items() if name in members))


NO_GRANTS = GrantTable({}, ())


# --- reading ---------------------------------------------------------------------------------------


def parse_grants(data: bytes) -> GrantTable:
    """Parse a grants file. Raises BadGrantsFile: use nothing of it."""
    text = _text_of(data)
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_fault(error, text) from None
    except (ValueError, RecursionError) as error:  # an impossible date; nested too deeply
        raise BadGrantsFile(f"it is not valid TOML: {error}"[:200]) from None
    return _Reader(text, given).table()


def _text_of(data: bytes) -> str:
    if len(data) > MAX_FILE_BYTES:
        raise BadGrantsFile(f"it is larger than {MAX_FILE_BYTES} bytes")
    if data.count(b"\n") > MAX_LINES:
        raise BadGrantsFile(f"it has more than {MAX_LINES} lines", MAX_LINES + 1, 1)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadGrantsFile("this is not UTF-8", line, error.start - data.rfind(b"\n", 0, error.start)) from None


_AT = re.compile(r"\(at line (\d+), column (\d+)\)$")


def _syntax_fault(error: tomllib.TOMLDecodeError, text: str) -> BadGrantsFile:
    found = _AT.search(str(error))
    if found is None:
        return BadGrantsFile(str(error).removesuffix(" (at end of document)"), text.count("\n") + 1, 1)
    return BadGrantsFile(_AT.sub("", str(error)).strip(), int(found[1]), int(found[2]))


class _Reader:
    """Checks the content of a file, and reports errors with their positions."""

    def __init__(self, text: str, given: dict[str, Any]) -> None:
        self._given = given
        self._places = Places(text)

    def table(self) -> GrantTable:
        self._keys("", 0, self._given, ("format", "groups", "grant", "quota"))
        form = self._given.get("format")
        if type(form) is not int or form != FORMAT:
            raise self._fault(f"format is not {FORMAT}, the only one that this version reads", "", 0, "format")
        groups = self._groups()
        grants = tuple(self._grant(at, each, groups) for at, each in enumerate(self._tables("grant")))
        quotas = tuple(self._quota(at, each, groups) for at, each in enumerate(self._tables("quota")))
        return GrantTable(groups, grants, quotas)

    def _groups(self) -> dict[str, frozenset[str]]:
        given = self._given.get("groups", {})
        if not isinstance(given, dict):
            raise self._fault("groups is not a table", "", 0, "groups")
        groups = {}
        for group, members in given.items():
            if not _GROUP_NAME.fullmatch(group):
                raise self._fault(f"{group[:80]!r} is not the name of a group", "groups", 0, group)
            for member in self._texts(members, "groups", 0, group):
                if member.startswith((_GROUP, _OIDC_GROUP)):
                    raise self._fault(
                        f"{member[:80]!r}: a group cannot be a member of a group", "groups", 0, group, member
                    )
                self._name(member, "groups", 0, group)
            groups[group] = frozenset(members)
        return groups

    def _tables(self, key: str) -> list[dict[str, Any]]:
        given = self._given.get(key, [])
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise self._fault(f"write a table [[{key}]] for each", "", 0, key)
        return given

    def _grant(self, at: int, given: dict[str, Any], groups: Mapping[str, frozenset[str]]) -> Grant:
        self._keys("grant", at, given, ("to", "verbs", "on"), every=True)
        verbs: list[Verb] = []
        for word in self._texts(given["verbs"], "grant", at, "verbs"):
            if word != "all" and word not in VERBS:
                detail = f"unknown verb {word[:80]!r}, {nearest(word, (*VERBS, 'all'))}"
                raise self._fault(detail, "grant", at, "verbs", word)
            verbs += VERBS if word == "all" else [verb for verb in VERBS if verb == word]
        to, on = self._to(given, "grant", at, groups), self._on(given, "grant", at)
        return Grant(to, tuple(dict.fromkeys(verbs)), on, self._places.table("grant", at).line)

    def _quota(self, at: int, given: dict[str, Any], groups: Mapping[str, frozenset[str]]) -> Quota:
        self._keys("quota", at, given, ("to", "on", *RATES, *COUNTS, "burst_s"))
        if ("to" in given) == ("on" in given):
            raise self._fault("a quota is either for names or for topics", "quota", at, "to" if "to" in given else "")
        to = self._to(given, "quota", at, groups) if "to" in given else ()
        on = self._on(given, "quota", at) if "on" in given else ()
        for pattern in on:
            if pattern.is_service:
                raise self._fault("a quota for topics must name topics", "quota", at, "on", SERVICE)
        limits = {key: self._limit(given[key], key, at) for key in (*RATES, *COUNTS) if key in given}
        if not limits:
            raise self._fault("a quota must set at least one of " + ", ".join((*RATES, *COUNTS)), "quota", at, "")
        if on and set(limits) & {"connections", "open_transactions", "topics", "requests_per_s"}:
            key = next(key for key in limits if key not in ("parked_polls", *RATES[1:]))
            raise self._fault(f"{key} is not counted per topic; set it for names", "quota", at, key)
        burst_s = given.get("burst_s", BURST_S)
        if isinstance(burst_s, bool) or not isinstance(burst_s, int | float) or not 0.1 <= burst_s <= 3600:
            raise self._fault("burst_s is a number of seconds, 0.1 to 3600", "quota", at, "burst_s")
        return Quota(to, on, limits, self._places.table("quota", at).line, float(burst_s))

    def _limit(self, value: Any, key: str, at: int) -> float:
        limit = value
        if isinstance(value, str) and key.endswith("bytes_per_s"):
            found = _SIZE.fullmatch(value.strip())
            unit = _UNITS.get(found[2].upper()) if found is not None else None
            limit = None if found is None or unit is None else float(found[1]) * unit
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= MAX_LIMIT:
            what = 'a number above 0, or text like "10 MiB"' if key.endswith("bytes_per_s") else "a number above 0"
            raise self._fault(f"{key} is {what}", "quota", at, key)
        if key in COUNTS and limit != int(limit):
            raise self._fault(f"{key} is a whole number", "quota", at, key)
        return float(limit)

    def _to(self, given: dict[str, Any], table: str, at: int, groups: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
        to = self._texts(given["to"], table, at, "to")
        for each in to:
            if each.startswith(_GROUP):
                group = each.removeprefix(_GROUP)
                if group not in groups:
                    near = nearest(group, groups) if groups else "the file defines no group"
                    raise self._fault(f"unknown group {group[:80]!r}, {near}", table, at, "to", each)
            elif each.startswith(_OIDC_GROUP):
                if not _CLAIM.fullmatch(each.removeprefix(_OIDC_GROUP)):
                    raise self._fault(f"{each[:80]!r} does not name a group", table, at, "to", each)
            elif each != EVERYBODY:
                self._name(each, table, at, "to")
        return tuple(to)

    def _on(self, given: dict[str, Any], table: str, at: int) -> tuple[Pattern, ...]:
        patterns = []
        for each in self._texts(given["on"], table, at, "on"):
            try:
                patterns.append(parse_pattern(each))
            except ValueError as error:
                raise self._fault(str(error), table, at, "on", each) from None
        return tuple(patterns)

    def _name(self, name: str, table: str, at: int, key: str) -> None:
        if name == "anonymous":
            raise self._fault("anonymous is a reserved name", table, at, key, name)
        if not NAME.fullmatch(name):
            raise self._fault(f"{name[:80]!r} is not a name: use A-Z a-z 0-9 _ . @ : / + = -", table, at, key, name)

    def _texts(self, value: Any, table: str, at: int, key: str) -> list[str]:
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            raise self._fault(f"{key} is a non-empty list of strings", table, at, key)
        return value

    def _keys(self, table: str, at: int, given: dict[str, Any], known: tuple[str, ...], *, every: bool = False) -> None:
        for key in given:
            if key not in known:
                raise self._fault(f"unknown key {key[:80]!r}, {nearest(key, known)}", table, at, key)
        for key in known:
            if every and key not in given:
                raise self._fault(f"{key} is missing", table, at, "")

    def _fault(self, detail: str, table: str, at: int, key: str, value: str | None = None) -> BadGrantsFile:
        place = self._places.of(table, at, key, value)
        return BadGrantsFile(detail, place.line, place.column)
