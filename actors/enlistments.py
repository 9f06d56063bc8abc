"""What the topics of this instance are enlisted for with the transaction service, each as long as it has this owner.

    term      one owner of one topic, from its claim to its end: a later one begins with nothing
    enlist    asked of the service within a term; the answer counts for that term alone, and only if the topic has
              not closed the pointer meanwhile
    close     what the service asks before it decides: nothing is held any more, and no answer under way counts

So of two things one is certain when a topic has answered: it is this owner's turn, and it will write nothing; or the
store has given the topic to somebody else, who holds nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from protocol.topic.enlisted import NotEnlisted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from protocol.names import TopicName

    #: The service's answer to ``Enlist``; raises as ``TransactionService.enlist`` does.
    AskService = Callable[[int, TopicName], Awaitable[bool]]

A = TypeVar("A")

#: Pointers one topic holds at most; the one used longest ago has to be enlisted again.
MAX_HELD = 65_536
#: How often a request is tried whose pointer is closed again between its enlistment and its turn.
ATTEMPTS = 5


class Term:
    """Implements ``protocol.topic.enlisted.Enlistment`` for one owner of one topic."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        self._held: OrderedDict[int, None] = OrderedDict()
        self._asking: dict[int, set[object]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, pointer: int) -> bool:
        """Whether the topic may write under a pointer."""
        if pointer not in self._held:
            return False
        self._held.move_to_end(pointer)
        return True

    def close(self, pointers: Iterable[int]) -> None:
        """It may not any more; answers that are under way do not count."""
        for pointer in pointers:
            self._held.pop(pointer, None)
            self._asking.pop(pointer, None)

    async def enlist(self, pointer: int, name: TopicName, ask: AskService) -> None:
        """Have the topic enlisted, unless it is closed meanwhile. Raises what ``ask`` does."""
        question = object()
        self._asking.setdefault(pointer, set()).add(question)
        try:
            await ask(pointer, name)
            if question in self._asking.get(pointer, ()):
                self._held[pointer] = None
                if len(self._held) > self._max_held:
                    self._held.popitem(last=False)
        finally:
            asking = self._asking.get(pointer)
            if asking is not None:
                asking.discard(question)
                if not asking:
                    del self._asking[pointer]


class Enlistments:
    """The terms of all topics that are open here."""

    def __init__(self, ask: AskService) -> None:
        self._ask = ask
        self._terms: dict[TopicName, Term] = {}

    def __len__(self) -> int:
        return sum(map(len, self._terms.values()))

    def begin(self, name: TopicName) -> Term:
        """A topic has just been claimed: whatever it held before is void."""
        term = self._terms[name] = Term()
        return term

    def end(self, name: TopicName, term: Term) -> None:
        """That owner is no more."""
        if self._terms.get(name) is term:
            del self._terms[name]

    def is_open(self, name: TopicName) -> bool:
        """Whether a topic is here, so that it can be enlisted."""
        return name in self._terms

    async def enlist(self, name: TopicName, pointer: int) -> None:
        """See that the topic may write under a pointer, if it is open; else its own answer says that it may not.

        Raises:
          TransactionNotInProgress, TransactionsUnavailable, Overloaded: nothing happened.
        """
        term = self._terms.get(name)
        if term is not None and not term.holds(pointer):
            await term.enlist(pointer, name, self._ask)

    async def enlisted(self, name: TopicName, pointer: int, ask: Callable[[], Awaitable[A]]) -> A:
        """What the topic answers once it is enlisted for the pointer. Raises as ``enlist`` and ``ask`` do."""
        for _ in range(ATTEMPTS - 1):
            await self.enlist(name, pointer)
            try:
                return await ask()
            except NotEnlisted:
                continue  # it was not open yet, or the pointer was closed, or another owner came: nothing happened
        await self.enlist(name, pointer)
        return await ask()
