"""Whether a topic remembers producers: its own property, else its namespace's, else the service's default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from protocol.names import TopicName
    from protocol.properties import Deduplication

Level = Literal["topic", "namespace", "service"]

#: The namespace that is ours: nothing is remembered there unless a topic of it says so.
SYSTEM_NAMESPACE = "system"


class NamespacePolicy(NamedTuple):
    """What a namespace says about its topics' producers."""

    enabled: bool | None = None
    """None: nothing, the service's default holds."""
    switched: int = 0
    """Grows whenever the namespace's topics went from remembering to forgetting."""


#: Of a namespace nobody has said anything about.
INHERITED = NamespacePolicy()


class Effective(NamedTuple):
    """What holds for a topic, and who said so."""

    enabled: bool
    level: Level


def effective(name: TopicName, own: Deduplication, policy: NamespacePolicy, *, default: bool) -> Effective:
    """What holds for the topic ``name`` whose property ``deduplication`` is ``own``."""
    if own != "inherit":
        return Effective(own == "enabled", "topic")
    if name.namespace == SYSTEM_NAMESPACE:
        return Effective(enabled=False, level="service")
    if policy.enabled is not None:
        return Effective(policy.enabled, "namespace")
    return Effective(default, "service")
