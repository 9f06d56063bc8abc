"""The rights of one name: its grants, indexed for checks of any topic. Free of I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from broker.security.grants import Grant, parse_pattern
from broker.security.identity import VERBS, Verb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from broker.security.grants import Pattern

#: A set of verbs is an integer with one bit for each verb.
BIT: dict[str, int] = {verb: 1 << at for at, verb in enumerate(VERBS)}
ALL_BITS = (1 << len(VERBS)) - 1
#: Cached decisions about topics, of all names together; the cache is cleared when it is full.
MAX_REMEMBERED = 100_000
#: No namespace or topic is longer than this; decisions about longer ones are not cached.
MAX_PART = 255
#: The verbs on a topic, by rights, namespace and topic.
Decisions: TypeAlias = "dict[tuple[Rights, str, str], int]"


def bits_of(verbs: Iterable[Verb]) -> int:
    """Return the bit set of these verbs."""
    bits = 0
    for verb in verbs:
        bits |= BIT[verb]
    return bits


class Rights:
    """The rights of a name. There is one object for a name and its groups, until the grants file changes.

    Args:
      decisions: the cache shared by all names; None: use a separate one.
    """

    __slots__ = ("_exact", "_patterns", "_remembered", "_service", "grants")

    def __init__(self, grants: Iterable[Grant], decisions: Decisions | None = None) -> None:
        self.grants = tuple(grants)
        self._service = 0
        self._exact: dict[tuple[str, str], int] = {}
        self._patterns: list[tuple[Pattern, int]] = []
        for grant in self.grants:
            bits = bits_of(grant.verbs)
            for pattern in grant.on:
                if pattern.is_service:
                    self._service |= bits
                elif "*" in pattern.namespace or "*" in pattern.topic:
                    self._patterns.append((pattern, bits))
                else:
                    key = pattern.namespace, pattern.topic
                    self._exact[key] = self._exact.get(key, 0) | bits
        self._remembered: Decisions = {} if decisions is None else decisions

    def topic_bits(self, namespace: str, topic: str) -> int:
        """Return the verbs on a topic, whether or not it exists."""
        key = self, namespace, topic
        found = self._remembered.get(key)
        if found is None:
            found = self._topic_bits(namespace, topic)
            if len(namespace) > MAX_PART or len(topic) > MAX_PART:
                return found  # caching these would let a client without rights fill the memory
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = found
        return found

    def _topic_bits(self, namespace: str, topic: str) -> int:
        found = self._exact.get((namespace, topic), 0)
        for pattern, bits in self._patterns:
            if pattern.matches(namespace, topic):
                found |= bits
        return found

    def on_topic(self, verb: Verb, namespace: str, topic: str) -> bool:
        """True if the name has the verb on a topic."""
        return bool(self.topic_bits(namespace, topic) & BIT[verb])

    def any_on_topic(self, namespace: str, topic: str) -> bool:
        """True if the name has any verb on a topic."""
        return bool(self.topic_bits(namespace, topic))

    def namespace_bits(self, namespace: str) -> int:
        """Return the verbs on a whole namespace: those of patterns whose topic part is ``*``."""
        return self._bits_where(lambda pattern: pattern.topic == "*" and pattern.matches_namespace(namespace))

    def on_namespace(self, verb: Verb, namespace: str) -> bool:
        """True if the name has the verb on all topics of a namespace."""
        return bool(self.namespace_bits(namespace) & BIT[verb])

    def within(self, namespace: str) -> bool:
        """True if the name has any verb on anything in a namespace."""
        if any(each == namespace for each, _ in self._exact):
            return True
        return bool(self._bits_where(lambda pattern: pattern.matches_namespace(namespace)))

    def on_service(self, verb: Verb) -> bool:
        """True if the name has the verb on the service."""
        return bool(self._service & BIT[verb])

    @property
    def service_bits(self) -> int:
        """The bit set of the verbs on the service."""
        return self._service

    def _bits_where(self, chosen: Callable[[Pattern], bool]) -> int:
        found = 0
        for pattern, bits in self._patterns:
            if chosen(pattern):
                found |= bits
        return found


class _Everything(Rights):
    """The rights of every client while authentication is off."""

    __slots__ = ()

    def __init__(self) -> None:
        everything = tuple(map(parse_pattern, ("*:*", "system:*", "service")))
        super().__init__((Grant(("*",), VERBS, everything, 0),))

    def topic_bits(self, namespace: str, topic: str) -> int:
        return ALL_BITS

    def namespace_bits(self, namespace: str) -> int:
        return ALL_BITS

    def within(self, namespace: str) -> bool:
        return True


EVERYTHING: Rights = _Everything()
NOTHING = Rights(())
