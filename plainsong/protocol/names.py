"""Names of namespaces, topics, readers and instances: which are allowed, and the pair that addresses a topic."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from plainsong.protocol.errors import InvalidName
from plainsong.protocol.masking import holds_credential, masked

#: The maximum number of bytes in a name: the longest path segment that is accepted everywhere.
MAX_NAME_BYTES = 255
#: A shorter text is accepted as a name even if it begins like a token.
_SHORTEST_TOKEN = 40
_NAMESPACE = re.compile(r"[a-zA-Z0-9_]{1,255}\Z")
_TOPIC = re.compile(r"[a-zA-Z0-9_-]{1,255}\Z")
_INSTANCE = re.compile(r"[a-zA-Z0-9_.-]{1,100}\Z")


class TopicName(NamedTuple):
    """A topic's address: its namespace and its own name. Two are equal when both parts are."""

    namespace: str
    topic: str

    def __str__(self) -> str:
        return f"{self.namespace}:{self.topic}"


def namespace_name(text: str) -> str:
    """Return ``text`` if it may name a namespace.

    Raises:
      InvalidName: it is empty, longer than 255 bytes, or has a character other than letters, digits and ``_``.
    """
    if _NAMESPACE.match(text):
        return refuse_credential(text)
    raise InvalidName(f"namespace {_shown(text)}", hint="use 1 to 255 letters, digits and underscores")


@lru_cache(maxsize=4096)  # every request checks a topic's name, and most requests are for the same few topics
def topic_name(namespace: str, topic: str) -> TopicName:
    """Return the address of ``topic`` in ``namespace``.

    Raises:
      InvalidName: either part has a character that is not allowed, or a wrong length.
    """
    namespace_name(namespace)
    if _TOPIC.match(topic):
        return TopicName(namespace, refuse_credential(topic))
    raise InvalidName(f"topic {_shown(topic)}", hint="use 1 to 255 letters, digits, underscores and hyphens")


def reader_name(text: str) -> str:
    """Return ``text`` if it may name a reader: the rules are those of a topic's name. Raises InvalidName."""
    if _TOPIC.match(text):
        return refuse_credential(text)
    raise InvalidName(f"reader {_shown(text)}", hint="use 1 to 255 letters, digits, underscores and hyphens")


def instance_name(text: str) -> str:
    """Return ``text`` if it may name an instance. Raises InvalidName."""
    if _INSTANCE.match(text):
        return text
    raise InvalidName(f"instance {text[:80]!r} is not allowed", hint="use 1 to 100 letters, digits, _, - and .")


def refuse_credential(text: str) -> str:
    """Return ``text``. Raises InvalidName: it is a token, and names are shown in lists, logs and metrics."""
    if len(text) >= _SHORTEST_TOKEN and holds_credential(text):
        raise InvalidName("this looks like a token, and names are not secret", hint="replace it with a new one")
    return text


def _shown(text: str) -> str:
    shown = masked(text)
    return repr(shown if len(shown) <= 80 else shown[:77] + "...") + " is not allowed"
