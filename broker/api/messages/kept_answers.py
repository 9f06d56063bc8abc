"""Small answers to polls, kept for readers that send the same poll concurrently, or repeat it before anything is new.

Up-to-date consumers of a topic ask for the same messages one after the other, then each polls again for messages that
do not exist yet. Building such an answer takes three times as long as checking that a kept one is still correct. So a
small answer that was built in one step (``Polling.poll``) is kept from its second request on.

A page that a limit ended is correct until its first message expires, whatever is published after it; a page that
reached the end of the topic is correct until something is published. A rollback invalidates both, and so does setting
messages aside. No answer is kept if any message from its start on has its own ttl.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from broker.http.messages import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.http.messages import Request
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import Look, Span

#: Bytes of all kept answers, and of the largest one. Readers that send the same poll do so at about the same time, so a
#: few answers are enough.
MAX_BYTES, MAX_ANSWER_BYTES = 1 << 20, 128 << 10
#: Memory of an answer in addition to its body and its request.
OVERHEAD_BYTES = 1500
#: Polls with longer requests are not kept.
REQUEST_BYTES = 1 << 10
#: Hash slots for recent polls; each has the last one that fell into it.
_SLOTS = 1 << 10


class Question(NamedTuple):
    """Everything in a request that determines the page and its encoding."""

    namespace: str
    topic: str
    query: str
    content_type: str | None
    accept: str | None
    body: bytes
    max_bytes: int
    """The largest page, by the settings and by the quotas of the sender."""

    @property
    def size(self) -> int:
        """Memory in bytes, without the part that is the same for every question."""
        return len(self.body) + len(self.query) + len(self.content_type or "") + len(self.accept or "")


def question_of(request: Request, max_bytes: int) -> Question | None:
    """Return the key of a poll whose page has ``max_bytes`` at most; None if it is too long."""
    path, headers = request.path, request.headers
    question = Question(
        path["namespace"],
        path["topic"],
        request.query,
        headers.get("content-type"),
        headers.get("accept"),
        request.body,
        max_bytes,
    )
    return question if question.size <= REQUEST_BYTES else None


@dataclass(slots=True)
class KeptAnswer:
    """An answer, and the conditions under which it is correct."""

    name: TopicName
    look: Look
    """Finds the current span, to compare with ``span``."""
    span: Span
    """The span of the page."""
    revision: int
    """``TopicCache.revision`` when it was built."""
    first: bytes | None
    """The id of its first message; None if it has none."""
    is_cut: bool
    """True if a limit ended the page, not the end of the span."""
    content: bytes
    content_type: str
    headers: Sequence[tuple[str, str]]
    count: int
    """Number of messages."""
    last_id: bytes | None
    """The end of its page."""

    def answers(self, span: Span, revision: int) -> bool:
        """True if a poll that found ``span`` would get the same answer."""
        was = self.span
        return (
            revision == self.revision
            and span.prefix == was.prefix
            and span.set_aside == was.set_aside
            and (span.until == was.until or (self.is_cut and span.until > was.until))
            and (self.first is None or span.start <= self.first)
        )

    def answer(self) -> Answer:
        """Return a new answer each time, since the listener compresses it in place."""
        return Answer(200, self.content, self.content_type, list(self.headers))


class KeptAnswers:
    """The kept answers; beyond ``MAX_BYTES`` the oldest are evicted."""

    def __init__(self) -> None:
        self.bytes = 0
        self._answers: OrderedDict[Question, KeptAnswer] = OrderedDict()
        self._asked = [0] * _SLOTS

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, question: Question) -> KeptAnswer | None:
        """Return the last answer kept for a question; it may be outdated."""
        return self._answers.get(question)

    def is_asked_again(self, question: Question) -> bool:
        """True if the question was asked recently; remembers it."""
        number = hash(question)
        slot = number % _SLOTS
        if self._asked[slot] == number:
            return True
        self._asked[slot] = number
        return False

    def keep(self, question: Question, kept: KeptAnswer) -> None:
        """Keep an answer, replacing the previous one, unless it is too large."""
        if len(kept.content) > MAX_ANSWER_BYTES:
            return
        old = self._answers.pop(question, None)
        if old is not None:
            self.bytes -= _cost(question, old)
        self._answers[question] = kept
        self.bytes += _cost(question, kept)
        while self.bytes > MAX_BYTES:
            self.bytes -= _cost(*self._answers.popitem(last=False))


def _cost(question: Question, kept: KeptAnswer) -> int:
    return len(kept.content) + question.size + OVERHEAD_BYTES
