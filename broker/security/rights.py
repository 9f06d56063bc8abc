"""What one name may: its grants, ready to be asked about any topic. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from broker.security.grants import Grant, parse_pattern
from broker.security.identity import VERBS, Verb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from broker.security.grants import Pattern

#: A set of verbs is a number with a bit for each.
BIT: dict[str, int] = {verb: 1 << at for at, verb in enumerate(VERBS)}
ALL_BITS = (1 << len(VERBS)) - 1
#: Answers about topics that are remembered, of all names together; beyond, they are worked out again.
MAX_REMEMBERED = 100_000
#: Longer namespaces and topics than these are none, and not worth remembering.
MAX_PART = 255
#: What was answered about a topic, by the rights that were asked, the namespace and the topic.
Decisions: TypeAlias = "dict[tuple[Rights, str, str], int]"


def bits_of(verbs: Iterable[Verb]) -> int:
    """The verbs as a number."""
    bits = 0
    for verb in verbs:
        bits |= BIT[verb]
    return bits


class Rights:
    """What a name may. There is one of it for a name and its groups, until the grants file changes.

    Args:
      decisions: what all names together remember; None: this one remembers by itself.
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

    @property
    def remembered(self) -> int:
        """How many answers it remembers."""
        return len(self._remembered)

    def topic_bits(self, namespace: str, topic: str) -> int:
        """The verbs on a topic, whether it is there or not."""
        key = self, namespace, topic
        found = self._remembered.get(key)
        if found is None:
            found = self._topic_bits(namespace, topic)
            if len(namespace) > MAX_PART or len(topic) > MAX_PART:
                return found  # whoever has a token, and may nothing, could fill the memory with them
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
        """Whether it has the verb on a topic."""
        return bool(self.topic_bits(namespace, topic) & BIT[verb])

    def any_on_topic(self, namespace: str, topic: str) -> bool:
        """Whether it has any verb on a topic."""
        return bool(self.topic_bits(namespace, topic))

    def namespace_bits(self, namespace: str) -> int:
        """The verbs on a whole namespace: of patterns whose topic part is ``*``."""
        return self._bits_where(lambda pattern: pattern.topic == "*" and pattern.matches_namespace(namespace))

    def on_namespace(self, verb: Verb, namespace: str) -> bool:
        """Whether it has the verb on all topics of a namespace."""
        return bool(self.namespace_bits(namespace) & BIT[verb])

    def within(self, namespace: str) -> bool:
        """Whether it has any verb on something in a namespace."""
        if any(each == namespace for each, _ in self._exact):
            return True
        return bool(self._bits_where(lambda pattern: pattern.matches_namespace(namespace)))

    def on_service(self, verb: Verb) -> bool:
        """Whether it has the verb on the service."""
        return bool(self._service & BIT[verb])

    @property
    def service_bits(self) -> int:
        """The verbs on the service."""
        return self._service

    def _bits_where(self, chosen: Callable[[Pattern], bool]) -> int:
        found = 0
        for pattern, bits in self._patterns:
            if chosen(pattern):
                found |= bits
        return found


class _Everything(Rights):
    """Of everybody while authentication is off."""

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
