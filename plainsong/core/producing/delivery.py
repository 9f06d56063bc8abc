"""One request of a producer, brought to its end: stored once, or certainly not, or nobody can know and it is said.

A request whose outcome is in doubt is never simply sent again. First the producer's session is opened anew, so that
what is still on its way can take no more; then it is asked whether it took, and only what cannot have been there
before is believed. Otherwise exactly the same is sent under the new epoch, and the daemon judges it. Before that the
topic is asked who holds the name now: a session that somebody else has opened since is not taken back from him.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NoReturn

from plainsong.core.attempts import Backoff, may_repeat, read_answer
from plainsong.core.effects import Now, Pause, Send
from plainsong.core.producing import calls
from plainsong.core.producing.receipts import found, told
from plainsong.core.producing.session import opened
from plainsong.errors import DeadlineExceeded, TransactionOutcomeUnknown
from plainsong.protocol.errors import (
    BadRequest,
    DeduplicationDisabled,
    GenerationChanged,
    Gone,
    OutcomeUnknown,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
    ProducerNotFound,
    TooLarge,
    TopicNotFound,
)

if TYPE_CHECKING:
    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.core.producing.calls import Known
    from plainsong.core.producing.receipts import Delivered
    from plainsong.core.producing.session import Session
    from plainsong.messages import Receipt
    from plainsong.protocol.requests import PublishRequest

#: Seconds for finding out what became of a request, also when its own time is over.
FIND_OUT_S = 5.0
#: After these the session is over: another one has to be opened, by somebody who knows what that means.
FINAL = (ProducerFenced, ProducerExpired, GenerationChanged)


class Delivery:
    """The course of one request.

    Args:
      request: with its messages and ``sequence_ids``; the session's part is added here.
      until_s: no attempt begins after it.
    """

    def __init__(self, operations: Operations, session: Session, request: PublishRequest, until_s: float) -> None:
        self._operations = operations
        self._session = session
        self._request = request
        self._until_s = until_s
        self._ids = request.sequence_ids = list(request.sequence_ids or ())
        self._before = session.last_sequence_id
        self._doubted = session.doubted
        self._in_doubt = False
        self._backoff = Backoff(operations.random)

    def steps(self) -> Steps[Delivered]:
        """What became of it.

        Raises:
          OutcomeUnknown: nobody can know (TransactionOutcomeUnknown of an atomic one).
          DeadlineExceeded, and what the daemon refuses it with: nothing happened.
          ProducerFenced, ProducerExpired, GenerationChanged: nothing happened, and the session is over.
        """
        if self._session.over is not None:
            raise refusal(self._session.over)
        self._session.doubted = max(self._doubted, self._ids[-1])  # also when whoever waits for it goes away
        try:
            delivered = yield from self._attempts()
        except PlainsongError as error:
            if error.outcome == "not-applied":
                self._session.doubted = self._doubted
            if isinstance(error, FINAL):
                self._session.over = error
            raise
        self._session.doubted = self._doubted
        if delivered.last_sequence_id is not None:
            self._session.passed(delivered.last_sequence_id)
        if not delivered.deduplicated and not self._session.optional and self._request.write_pointer is None:
            self._session.over = DeduplicationDisabled(
                "deduplication was switched off while the producer was at work",
                hint="its messages are stored, but not protected; open it with optional=True to go on",
            )
        return delivered

    def _attempts(self) -> Steps[Delivered]:
        while True:
            receipt, error = yield from self._attempt()
            if error is None:
                assert receipt is not None
                return told(receipt, self._ids)
            if error.outcome != "not-applied":
                delivered = yield from self._find_out(error)
                if delivered is not None:
                    return delivered
                if not self._operations.settings.retry:
                    self._check_certain("it was not to be sent again", error)
                    error.outcome = "not-applied"
                    raise error
            elif not (may_repeat("twice", error) and self._operations.settings.retry):
                raise error
            yield from self._pause(error)

    def _attempt(self) -> Steps[tuple[Receipt | None, PlainsongError | None]]:
        operations, session, request = self._operations, self._session, self._request
        request.producer = session.name
        request.producer_epoch = session.epoch
        request.generation = session.generation or None
        call = calls.publish(operations.namespace, session.topic, request)
        now_s: float = yield Now()
        timeout_s = min(operations.settings.request_timeout_s, max(0.001, self._until_s - now_s))
        places, path = operations.places, call.request.path
        url = places.where(path)
        connect_s = places.connect_s(url, min(operations.settings.connect_timeout_s, timeout_s))
        answer = yield Send(url, call.request, connect_s, timeout_s)
        receipt, error = read_answer(call, answer, url)
        places.heard(path, url, answer, error)
        return receipt, error

    def _pause(self, error: PlainsongError) -> Steps[None]:
        pause_s = self._backoff.next_s(error)
        now_s: float = yield Now()
        if now_s + pause_s >= self._until_s:
            self._check_certain("its time was over before the daemon could judge it", error)
            late = DeadlineExceeded(f"not delivered in time; the last attempt: {error.detail}", hint=error.hint)
            late.__cause__ = error
            raise late
        yield Pause(pause_s)

    # --- what became of it -----------------------------------------------------------------------

    def _find_out(self, doubt: PlainsongError) -> Steps[Delivered | None]:
        """Where it is, if it took; None: it did not, or that is for the daemon to judge. It cannot take any more."""
        session = self._session
        if session.epoch is None:
            self._unknown("there is no session to ask, since deduplication is switched off", doubt)
        try:
            known = yield from self._asked()
        except (ProducerNotFound, Gone):
            self._forgotten(doubt)
        except PlainsongError as error:
            self._unknown(f"it cannot be found out: {error.detail}", doubt)
        self._check_holder(known, 0, doubt)
        if self._took(known):
            return found(known, self._ids, self._before)
        try:
            left_s = yield from self._left_s()
            known, openings = yield from opened(
                self._operations, session.topic, session.name, limit_s=left_s, generation=session.generation
            )
        except (GenerationChanged, TopicNotFound) as gone:
            return (yield from self._of_one_that_is_gone(gone, doubt))
        except PlainsongError as error:
            self._unknown(f"it cannot be found out: {error.detail}", doubt)
        self._check_holder(known, openings, doubt)
        session.epoch = known.epoch
        session.passed(known.last_sequence_id)
        return found(known, self._ids, self._before) if self._took(known) else None

    def _took(self, known: Known) -> bool:
        """Whether it is there for certain; what may be an earlier request's, perhaps undone, is left in doubt."""
        ids, pointer = self._ids, self._request.write_pointer
        self._in_doubt = False
        if known.last_sequence_id < ids[-1]:
            return False
        alone = self._doubted < ids[0]  # no request of unknown outcome can have used these ids
        new = bisect_right(ids, self._before) if alone else 0
        low = ids[new if new < len(ids) else 0]
        for each in known.recent:
            if each.first <= low and ids[-1] <= each.last:
                return each.pointer == pointer
        came_since = self._before < ids[-1]
        if came_since and alone and pointer is None:
            return True
        self._in_doubt = came_since
        return False

    def _asked(self) -> Steps[Known]:
        session, operations = self._session, self._operations
        call = calls.ask(operations.namespace, session.topic, session.name, session.generation)
        left_s = yield from self._left_s()
        return (yield from operations.call(call, left_s))

    def _of_one_that_is_gone(self, gone: GenerationChanged | TopicNotFound, doubt: PlainsongError) -> Steps[Delivered]:
        """The topic was deleted, perhaps made anew. Nothing can take in the old one, which tells as long as it can.

        Raises:
          GenerationChanged, TopicNotFound: it did not take. OutcomeUnknown: the old one tells no more.
        """
        if isinstance(gone, GenerationChanged):
            self._session.over = gone
        try:
            known = yield from self._asked()
        except PlainsongError as error:
            self._unknown(f"the topic was deleted, and tells no more: {error.detail}", doubt)
        if not self._took(known):
            self._check_certain("the topic was deleted", doubt)
            gone.outcome = "not-applied"
            raise gone
        return found(known, self._ids, self._before)

    def _check_holder(self, known: Known, openings: int, doubt: PlainsongError) -> None:
        """Raises ProducerFenced when somebody else has opened the name since, OutcomeUnknown when it began anew."""
        epoch = self._session.epoch
        assert epoch is not None
        if known.epoch < epoch + bool(openings):
            self._forgotten(doubt)
        if known.epoch > epoch + openings:
            fenced = ProducerFenced(
                f"somebody else has opened producer {self._session.name!r}", hint="one name, one producer at a time"
            )
            if known.last_sequence_id >= self._ids[0]:
                self._session.over = fenced
                self._unknown("somebody else has opened the producer, and came as far as this or further", doubt)
            raise fenced from doubt

    def _check_certain(self, why: str, doubt: PlainsongError) -> None:
        """Raises OutcomeUnknown when its ids are taken, and whether by itself is not known."""
        if self._in_doubt:
            self._unknown(f"its sequence ids are taken, perhaps by an earlier request; {why}", doubt)

    def _forgotten(self, doubt: PlainsongError) -> NoReturn:
        self._session.over = ProducerExpired(
            f"producer {self._session.name!r} was forgotten by the topic", hint="open it anew, if you know where it was"
        )
        self._unknown("the topic remembers the producer no more", doubt)

    def _unknown(self, why: str, doubt: PlainsongError) -> NoReturn:
        kind = TransactionOutcomeUnknown if self._request.atomic else OutcomeUnknown
        raise kind(
            f"{doubt.detail}; {why}", hint="look into the topic before you send it again: it was not sent again here"
        ) from doubt

    def _left_s(self) -> Steps[float]:
        now_s: float = yield Now()
        return max(FIND_OUT_S, self._until_s - now_s)


def refusal(over: PlainsongError) -> PlainsongError:
    """What whoever comes after the end of a session is told: nothing happened."""
    error = type(over)(f"the producer's session is over: {over.detail}", hint=over.hint)
    error.outcome = "not-applied"
    error.__cause__ = over
    return error


def is_own_fault(error: PlainsongError) -> bool:
    """Whether a message is refused for what it is, and its neighbours may do better."""
    return error.outcome == "not-applied" and isinstance(error, (BadRequest, TooLarge))
