"""A model of the end of a transaction over topics that change hands, small enough to explore every order of events.

Ownership of a topic moves between two instances, while earlier owners continue as if they still owned it; the same
holds for the transaction service. Questions, grants and writes may be in flight for any length of time, and any owner
may ask any current or former owner. No row of the transaction may become durable after its end. The end is a commit; an
abort takes the same steps under other names.

``Rules`` lists the parts of the protocol; each can be left out, to show why it is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from tests.storage.ownership_model import no_collection

if TYPE_CHECKING:
    from collections.abc import Iterator

WRONG = "a row came behind the end"


@dataclass(frozen=True)
class Rules:
    """The parts of the protocol."""

    enlisted_durably: bool = True
    """A topic is durably enlisted in the service's rows before it may write, so that the next owner finds it there."""
    grants_checked: bool = True
    """A grant that needs no new row is issued only by the current owner of the service."""
    frozen: bool = True
    """No topic is enlisted while topics are asked to close."""
    terms: bool = True
    """A grant counts only for the owner that asked, not for a later one at the same instance."""
    voided: bool = True
    """A grant requested before the topic closed does not count."""
    closed: bool = True
    """Topics are asked to close before the end is decided."""
    in_turn: bool = True
    """A topic closes only when its writes are durable or can never be."""
    closings_checked: bool = True
    """An owner answers that the topic is closed only while it still owns it."""
    closed_anew: bool = True
    """The answers of an abandoned attempt to close do not count for the next attempt."""
    fenced: bool = True
    """The store rejects rows of an owner that was replaced."""


class Term(NamedTuple):
    """One owner of a topic."""

    topic: int
    epoch: int
    instance: int
    held: bool = False
    asking: int = 0
    """Number of the question whose answer counts; 0: none."""
    writing: bool = False


class Owner(NamedTuple):
    """One owner of the service."""

    epoch: int
    enlisted: frozenset[int] = frozenset()
    closing: bool = False
    closed: frozenset[int] = frozenset()


class Message(NamedTuple):
    """A topic owner's question, or the grant that answers it."""

    topic: int
    epoch: int
    instance: int
    number: int


class State(NamedTuple):
    """The whole state."""

    terms: frozenset[Term]
    owners: frozenset[Owner]
    epochs: tuple[int, ...]
    """The epoch of each topic, as in the store."""
    epoch: int = 0
    """The epoch of the service, as in the store."""
    rows: frozenset[int] = frozenset()
    """Topics enlisted in the store."""
    questions: frozenset[Message] = frozenset()
    grants: frozenset[Message] = frozenset()
    asked: int = 0
    ended: bool = False
    late: bool = False


class Model:
    """Every reachable state."""

    def __init__(self, rules: Rules, *, topics: int = 1, claims: int = 3, owners: int = 2, questions: int = 2) -> None:
        self.rules = rules
        self.topics = topics
        self.claims = claims
        self.owners = owners
        self.questions = questions

    def explore(self) -> tuple[int, str | None]:
        """Return the number of states, and the violation in the first bad state, if any."""
        with no_collection():
            return self._explore()

    def _explore(self) -> tuple[int, str | None]:
        start = State(frozenset(), frozenset(), (0,) * self.topics)
        seen, queue = {start}, deque([start])
        while queue:
            for state in self.following(queue.popleft()):
                if state.late:
                    return len(seen), WRONG
                if state not in seen:
                    seen.add(state)
                    queue.append(state)
        return len(seen), None

    def following(self, state: State) -> Iterator[State]:
        """Yield the possible next states."""
        if state.epoch < self.owners:
            yield self.begin_service(state)
        if sum(state.epochs) < self.claims:
            # Until the first claim all topics are alike, and so are both instances.
            for topic, instance in product(range(self.topics), (0, 1)) if any(state.epochs) else [(0, 0)]:
                yield self.claim(state, topic, instance)
        for term in state.terms:
            yield from self.of_term(state, term)
        for owner in state.owners:
            yield from self.of_owner(state, owner)
        for grant in state.grants:
            yield self.arrive(state, grant)

    # --- topics ---

    def claim(self, state: State, topic: int, instance: int) -> State:
        epochs = (*state.epochs[:topic], state.epochs[topic] + 1, *state.epochs[topic + 1 :])
        before = [each for each in state.terms if (each.topic, each.instance) == (topic, instance)]
        kept = not self.rules.terms and any(each.held for each in before)
        # An instance is a topic's owner at most once at a time, but writes of an earlier term may still be in flight.
        terms = state.terms - {each for each in before if not each.writing}
        stopped = {each for each in before if each.writing}
        terms = (terms - stopped) | {each._replace(held=False, asking=0) for each in stopped}
        return state._replace(epochs=epochs, terms=terms | {Term(topic, epochs[topic], instance, kept)})

    def of_term(self, state: State, term: Term) -> Iterator[State]:
        if not (term.held or term.asking or term.writing) and state.asked < self.questions and not state.ended:
            number = state.asked + 1
            question = Message(term.topic, term.epoch, term.instance, number)
            asking = self.with_term(state, term, term._replace(asking=number))
            yield asking._replace(questions=state.questions | {question}, asked=number)
        if term.held and not term.writing:
            yield self.with_term(state, term, term._replace(writing=True))
        if term.writing:
            lands = term.epoch == state.epochs[term.topic] or not self.rules.fenced
            after = self.with_term(state, term, term._replace(writing=False) if lands else None)
            yield after._replace(late=lands and state.ended)

    @staticmethod
    def with_term(state: State, before: Term, after: Term | None) -> State:
        return state._replace(terms=(state.terms - {before}) | (set() if after is None else {after}))

    def arrive(self, state: State, grant: Message) -> State:
        state = state._replace(grants=state.grants - {grant})
        for term in state.terms:
            if (term.topic, term.instance) != (grant.topic, grant.instance):
                continue
            if self.rules.terms and term.epoch != grant.epoch:
                continue
            if term.asking == grant.number or not self.rules.voided or not self.rules.terms:
                return self.with_term(state, term, term._replace(held=True, asking=0))
        return state

    # --- the service ---

    def begin_service(self, state: State) -> State:
        owner = Owner(state.epoch + 1, state.rows)
        return state._replace(epoch=owner.epoch, owners=state.owners | {owner})

    @staticmethod
    def with_owner(state: State, before: Owner, after: Owner | None) -> State:
        return state._replace(owners=(state.owners - {before}) | (set() if after is None else {after}))

    def of_owner(self, state: State, owner: Owner) -> Iterator[State]:
        is_owner = owner.epoch == state.epoch
        if not (is_owner and state.ended):
            for question in state.questions:
                yield self.answer(state, owner, question)
        if not state.ended and not owner.closing:
            yield self.with_owner(state, owner, owner._replace(closing=True))
        if not owner.closing:
            return
        for term in state.terms:
            if term.topic in owner.enlisted - owner.closed:
                yield self.close(state, owner, term)
        kept = frozenset() if self.rules.closed_anew else owner.closed
        yield self.with_owner(state, owner, owner._replace(closing=False, closed=kept))
        if owner.enlisted <= owner.closed or not self.rules.closed:
            ended = self.with_owner(state, owner, owner._replace(closing=False) if is_owner else None)
            yield ended._replace(ended=state.ended or is_owner)

    def answer(self, state: State, owner: Owner, question: Message) -> State:
        state = state._replace(questions=state.questions - {question})
        if owner.closing and self.rules.frozen:
            return state
        is_owner = owner.epoch == state.epoch
        if question.topic in owner.enlisted:
            if self.rules.grants_checked and not is_owner:
                return self.with_owner(state, owner, None)
        elif not is_owner:
            return self.with_owner(state, owner, None)
        elif self.rules.enlisted_durably:
            state = state._replace(rows=state.rows | {question.topic})
        state = self.with_owner(state, owner, owner._replace(enlisted=owner.enlisted | {question.topic}))
        return state._replace(grants=state.grants | {question})

    def close(self, state: State, owner: Owner, term: Term) -> State:
        """Ask one owner of the topic, current or former."""
        if term.writing and self.rules.in_turn:
            return state  # it answers later
        if self.rules.closings_checked and term.epoch != state.epochs[term.topic]:
            return self.with_term(state, term, None)
        asking = 0 if self.rules.voided else term.asking
        state = self.with_term(state, term, term._replace(held=False, asking=asking))
        return self.with_owner(state, owner, owner._replace(closed=owner.closed | {term.topic}))
