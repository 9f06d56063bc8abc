# Written by scripts/unasync.py from plainsong/_async/delivery.py: change that, and run it (make sync).
"""Delivers one request of a producer: it is stored once, or certainly not, or the client reports an unknown outcome.

A request with an unknown outcome is never simply sent again. The delivery first queries the producer's state: if
another client has opened the name since, it gives up rather than fence that client off. If the state proves that the
request was stored, it is done. Otherwise it opens a new session, so that the old request can no longer take effect, and
checks the state again; if that proves nothing, it sends the same request under the new epoch, and the daemon
deduplicates it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import TYPE_CHECKING, NoReturn

from plainsong import calls, tracing
from plainsong.errors import DeadlineExceeded, TransactionOutcomeUnknown
from plainsong.producer_queue import (
    FINAL,
    Session,
    as_answered,
    as_found,
    check_name,
    checked_sequence_id,
    refusal,
)
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import (
    DeduplicationDisabled,
    GenerationChanged,
    Gone,
    InvalidParameter,
    OutcomeUnknown,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
    ProducerNotFound,
    TopicNotFound,
)
from plainsong.publisher_queue import TooSlow, made
from plainsong.retry import PAUSES_S, may_repeat, pause_after

if TYPE_CHECKING:
    from plainsong._sync.retry import Channel
    from plainsong.calls import Known
    from plainsong.messages import Receipt
    from plainsong.producer_queue import Delivered
    from plainsong.protocol.requests import PublishRequest

#: Seconds for finding out the outcome of a request, even after its own deadline.
FIND_OUT_S = 5.0


def begin(
    channel: Channel,
    topic: str,
    name: str | None,
    *,
    initial_sequence_id: int | None,
    optional: bool,
    retention_s: int | None,
    deadline_s: float | None,
) -> Session:
    """Opens a session, which ends any older one of that name.

    Raises:
      InvalidParameter, InvalidSequenceIds: nothing was sent.
      DeduplicationDisabled: it is switched off there, and not ``optional``. TopicNotFound, TooManyProducers, and
      other errors of the daemon: opening again is harmless.
    """
    if name is not None:
        check_name(name)
    if initial_sequence_id is not None:
        checked_sequence_id(initial_sequence_id)
    if retention_s is not None and not (isinstance(retention_s, int) and retention_s > 0):
        raise InvalidParameter(f"retention_s is {retention_s!r}", hint="use a whole number of seconds above 0")
    limit_s = channel.settings.deadline_s if deadline_s is None else deadline_s
    try:
        known, _ = opened(channel, topic, name, retention_s=retention_s, limit_s=limit_s)
    except DeduplicationDisabled:
        if not optional:
            raise
        return Session(topic, name or os.urandom(16).hex(), None, 0, -1, optional)
    return Session(topic, known.producer, known.epoch, known.generation, known.last_sequence_id, optional)


def opened(
    channel: Channel,
    topic: str,
    name: str | None,
    *,
    limit_s: float,
    retention_s: int | None = None,
    generation: int | None = None,
) -> tuple[Known, int]:
    """Opens a session, and returns the producer's state and how many sessions this may have opened.

    It repeats an opening if the response was lost, so it may open a session that is never used.
    """
    count = 1

    def again(error: PlainsongError) -> None:
        nonlocal count
        count += error.outcome == "unknown"

    call = calls.open_session(channel.namespace, topic, name, retention_s=retention_s, generation=generation)
    known = channel.call(call._replace(repeat="harmless", again=again), max(0.001, limit_s))
    return known, count


class Delivery:
    """Delivers one request and finds out its outcome.

    Args:
      request: with its messages and ``sequence_ids``; the delivery adds the session's fields.
      until_s: no attempt begins later.
      may_split: whether its messages may go in smaller requests, if it gets no answer in time and is not stored.
    """

    def __init__(
        self,
        channel: Channel,
        session: Session,
        request: PublishRequest,
        until_s: float,
        *,
        may_split: bool = False,
    ) -> None:
        self._channel = channel
        self._session = session
        self._request = request
        self._until_s = until_s
        self._may_split = may_split
        self._ids = request.sequence_ids = list(request.sequence_ids or ())
        self._before = session.last_sequence_id
        self._doubted = session.doubted
        self._in_doubt = False
        self._backoff = Backoff(PAUSES_S, channel.random)

    def run(self) -> Delivered:
        """Returns when the request is durable.

        Raises:
          OutcomeUnknown: the outcome cannot be found out (TransactionOutcomeUnknown of an atomic request).
          DeadlineExceeded, and refusals of the daemon: nothing happened.
          ProducerFenced, ProducerExpired, GenerationChanged: nothing happened, and the session is over.
          TooSlow: nothing happened; send less at once.
        """
        if self._session.over is not None:
            raise refusal(self._session.over)
        self._session.doubted = max(self._doubted, self._ids[-1])  # before sending: an interruption leaves it in doubt
        try:
            delivered = self._attempts()
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
                "deduplication was turned off while the producer was in use",
                hint="its messages are stored, but not protected against duplicates; open it with optional=True to "
                "continue",
            )
        return delivered

    def _attempts(self) -> Delivered:
        while True:
            receipt, error = self._attempt()
            if error is None:
                assert receipt is not None
                return as_answered(receipt, self._ids)
            if error.outcome != "not-applied":
                delivered = self._find_out(error)
                if delivered is not None:
                    return delivered
                if not self._channel.settings.retry:
                    self._check_certain("it must not be sent again", error)
                    error.outcome = "not-applied"
                    raise error
                if self._may_split and isinstance(error, DeadlineExceeded):
                    self._pause(error)
                    if self._session.last_sequence_id < self._ids[0]:  # no message has these ids, or ever will
                        raise TooSlow(error.detail, hint=error.hint) from error
                    continue
            elif not (may_repeat("twice", error) and self._channel.settings.retry):
                raise error
            self._pause(error)

    def _attempt(self) -> tuple[Receipt | None, PlainsongError | None]:
        channel, session, request = self._channel, self._session, self._request
        request.producer = session.name
        request.producer_epoch = session.epoch
        request.generation = session.generation or None
        try:
            call = made(lambda: calls.publish_in_session(channel.namespace, session.topic, request))
        except PlainsongError as refused:
            return None, refused
        with tracing.sending(channel.namespace, session.topic, len(request.messages), request.attributes) as span:
            receipt, error = channel.attempt(span.carried(call), max(0.001, self._until_s - channel.now()))
            span.sent(receipt)
        return receipt, error

    def _pause(self, error: PlainsongError) -> None:
        pause_s = pause_after(error, self._backoff)
        now_s = self._channel.now()
        if now_s + pause_s >= self._until_s:
            self._check_certain("it timed out before the daemon could process it", error)
            late = DeadlineExceeded(f"not delivered in time; the last attempt: {error.detail}", hint=error.hint)
            late.__cause__ = error
            raise late
        self._channel.sleep(pause_s)

    # --- finding the outcome ----------------------------------------------------------------------

    def _find_out(self, doubt: PlainsongError) -> Delivered | None:
        """The delivered request, if it was stored; None: send it again. The old attempt can no longer take effect."""
        session = self._session
        if session.epoch is None:
            self._raise_unknown("there is no session to query, because deduplication is off", doubt)
        try:
            known = self._query()
        except (ProducerNotFound, Gone):
            self._raise_expired(doubt)
        except PlainsongError as error:
            self._raise_unknown(f"the outcome is unknown: {error.detail}", doubt)
        self._check_holder(known, 0, doubt)
        if self._was_stored(known):
            return as_found(known, self._ids, self._before)
        try:
            left_s = self._left_s()
            known, openings = opened(
                self._channel, session.topic, session.name, limit_s=left_s, generation=session.generation
            )
        except (GenerationChanged, TopicNotFound) as gone:
            return self._find_out_in_deleted_topic(gone, doubt)
        except PlainsongError as error:
            self._raise_unknown(f"the outcome is unknown: {error.detail}", doubt)
        self._check_holder(known, openings, doubt)
        session.epoch = known.epoch
        session.passed(known.last_sequence_id)
        return as_found(known, self._ids, self._before) if self._was_stored(known) else None

    def _was_stored(self, known: Known) -> bool:
        """True if it certainly was stored. Sets ``_in_doubt`` if an earlier request may have used its ids."""
        ids, pointer = self._ids, self._request.write_pointer
        self._in_doubt = False
        if known.last_sequence_id < ids[-1]:
            return False
        alone = self._doubted < ids[0]  # no earlier request of unknown outcome can have used these ids
        new = bisect_right(ids, self._before) if alone else 0
        low = ids[new if new < len(ids) else 0]
        for each in known.recent:
            if each.first <= low and ids[-1] <= each.last:
                return each.pointer == pointer
        stored_since = self._before < ids[-1]
        if stored_since and alone and pointer is None:
            return True
        self._in_doubt = stored_since
        return False

    def _query(self) -> Known:
        session, channel = self._session, self._channel
        call = calls.ask_producer(channel.namespace, session.topic, session.name, session.generation)
        left_s = self._left_s()
        return channel.call(call, left_s)

    def _find_out_in_deleted_topic(self, gone: GenerationChanged | TopicNotFound, doubt: PlainsongError) -> Delivered:
        """The topic was deleted, and perhaps created again. The old generation accepts nothing more, but may still be queried.

        Raises:
          GenerationChanged, TopicNotFound: it was not stored. OutcomeUnknown: the old generation is gone.
        """
        if isinstance(gone, GenerationChanged):
            self._session.over = gone
        try:
            known = self._query()
        except PlainsongError as error:
            self._raise_unknown(f"the topic was deleted, so the outcome is unknown: {error.detail}", doubt)
        if not self._was_stored(known):
            self._check_certain("the topic was deleted", doubt)
            gone.outcome = "not-applied"
            raise gone
        return as_found(known, self._ids, self._before)

    def _check_holder(self, known: Known, openings: int, doubt: PlainsongError) -> None:
        """Raises ProducerFenced if another client has opened the name since, OutcomeUnknown if the topic forgot the name."""
        epoch = self._session.epoch
        assert epoch is not None
        if known.epoch < epoch + bool(openings):
            self._raise_expired(doubt)
        if known.epoch > epoch + openings:
            fenced = ProducerFenced(
                f"another program has opened producer {self._session.name!r}",
                hint=("use a name for one producer at a time"),
            )
            if known.last_sequence_id >= self._ids[0]:
                self._session.over = fenced
                self._raise_unknown(
                    ("another program has opened the producer, and has used this sequence id or a higher one"), doubt
                )
            raise fenced from doubt

    def _check_certain(self, why: str, doubt: PlainsongError) -> None:
        """Raises OutcomeUnknown if its ids are used, perhaps by an earlier request."""
        if self._in_doubt:
            self._raise_unknown(f"its sequence ids are already used, perhaps by an earlier request; {why}", doubt)

    def _raise_expired(self, doubt: PlainsongError) -> NoReturn:
        self._session.over = ProducerExpired(
            f"producer {self._session.name!r} was forgotten by the topic",
            hint=("open it again, if you know its last sequence id"),
        )
        self._raise_unknown("the topic no longer remembers the producer", doubt)

    def _raise_unknown(self, why: str, doubt: PlainsongError) -> NoReturn:
        kind = TransactionOutcomeUnknown if self._request.atomic else OutcomeUnknown
        raise kind(
            f"{doubt.detail}; {why}",
            hint=("check the topic before you send it again; the client has not retried it"),
        ) from doubt

    def _left_s(self) -> float:
        return max(FIND_OUT_S, self._until_s - self._channel.now())
