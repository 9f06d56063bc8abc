"""Small answers to polls that are kept, for readers that ask for the same: side by side, or again while nothing is new.

Consumers of a topic that are up to date ask for the same messages one after the other, and until something new comes
each of them asks again for what it was told is not there. To make such an answer takes three times as long as to find
out that it is still the right one. So small answers that were made in one turn (``Polling.poll``) are kept from the
second time on that a reader asks for them.

A page that a limit ended stays as it is for as long as its first message lives, whatever is published meanwhile; one
that went on to the end of the topic does until something is published. A roll-back ends both, and so do messages that
are set aside. Where a message behind the start of a page has a time to live of its own, no answer is kept.
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

#: Bytes that all kept answers may take. They are for readers that ask at the same time, hence few; and a single one.
MAX_BYTES, MAX_ANSWER_BYTES = 1 << 20, 128 << 10
#: Memory of an answer beside its body and the request's.
OVERHEAD_BYTES = 1500
#: A longer request is not compared with others.
REQUEST_BYTES = 1 << 10
#: Questions of which it is known that they were asked: a slot for each, the last one that fell into it.
_SLOTS = 1 << 10


class Question(NamedTuple):
    """All of a request that decides what the page has and how it is written."""

    namespace: str
    topic: str
    query: str
    content_type: str | None
    accept: str | None
    body: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, without what every question does."""
        return len(self.body) + len(self.query) + len(self.content_type or "") + len(self.accept or "")


def question_of(request: Request) -> Question | None:
    """What a poll asks; None: it is too long to be compared."""
    path, headers = request.path, request.headers
    question = Question(
        path["namespace"],
        path["topic"],
        request.query,
        headers.get("content-type"),
        headers.get("accept"),
        request.body,
    )
    return question if question.size <= REQUEST_BYTES else None


@dataclass(slots=True)
class KeptAnswer:
    """An answer, and of which spans it is the right one."""

    name: TopicName
    look: Look
    """Finds the span that it is compared with."""
    span: Span
    """What it was made from."""
    revision: int
    """``TopicCache.revision`` when it was made."""
    first: bytes | None
    """The id of its first message; None: it has none."""
    is_cut: bool
    """A limit ended the page, not the end of the span."""
    content: bytes
    content_type: str
    headers: Sequence[tuple[str, str]]
    count: int
    """Messages."""
    last_id: bytes | None
    """Where its page ends."""

    def answers(self, span: Span, revision: int) -> bool:
        """Whether a poll that found ``span`` would be told the same."""
        was = self.span
        return (
            revision == self.revision
            and span.prefix == was.prefix
            and span.set_aside == was.set_aside
            and (span.until == was.until or (self.is_cut and span.until > was.until))
            and (self.first is None or span.start <= self.first)
        )

    def answer(self) -> Answer:
        """A new answer each time, since the listener compresses it where it stands."""
        return Answer(200, self.content, self.content_type, list(self.headers))


class KeptAnswers:
    """The answers that are kept; beyond ``MAX_BYTES`` the oldest go."""

    def __init__(self) -> None:
        self.bytes = 0
        self._answers: OrderedDict[Question, KeptAnswer] = OrderedDict()
        self._asked = [0] * _SLOTS

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, question: Question) -> KeptAnswer | None:
        """The answer to a question that was kept last; it may be outdated."""
        return self._answers.get(question)

    def is_asked_again(self, question: Question) -> bool:
        """Whether a question was asked before, lately; it is remembered."""
        number = hash(question)
        slot = number % _SLOTS
        if self._asked[slot] == number:
            return True
        self._asked[slot] = number
        return False

    def keep(self, question: Question, kept: KeptAnswer) -> None:
        """Keep an answer, in the place of the one before, unless it is too large."""
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
