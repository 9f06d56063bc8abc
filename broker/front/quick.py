"""Small plain publishes without a task each: those that a front end sends in one go are one ask of each topic.

As with the requests of a stream, a run of singles is stored as one and answered one by one: neither their order nor
their answers can tell. So what a publish costs the owning process is reading its frame and writing its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import trio

from broker.http.status import status_of
from broker.peering.answers import Reply
from protocol.codec.stream import MAX_RUN
from protocol.errors import NoOwner, PlainsongError
from protocol.ids import consecutive_ids
from protocol.names import TopicName
from protocol.requests import Receipt
from protocol.topic.asks import PublishEach

if TYPE_CHECKING:
    from broker.peering.serving import Answer, Call
    from broker.service import Service

#: What the topic says of a run: the receipt of all of it, or of each, or why there is none.
Told: TypeAlias = "Receipt | list[Receipt | PlainsongError] | PlainsongError"


@dataclass(slots=True)
class _Run:
    """Singles for one topic."""

    payloads: list[bytes] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    size: int = 0


class QuickPublishes:
    """The ``Quick`` of one link to a front end."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._runs: dict[tuple[str, str], _Run] = {}
        self._begun_s = 0.0

    def take(self, call: Call, answer: Answer) -> bool:
        """As ``Quick.take`` says."""
        if call.kind != "publish" or self._service.access.enabled:  # a line names its request, and so needs its task
            return False
        namespace, topic, messages, size, _ = call.value
        if len(messages) != 1:
            return False
        run = self._runs.get((namespace, topic))
        if run is None:
            if not self._runs:
                self._begun_s = perf_counter()
            run = self._runs[namespace, topic] = _Run()
        run.payloads.append(messages[0])
        run.answers.append(answer)
        run.size += size
        if len(run.payloads) >= MAX_RUN:
            self.taken()
        return True

    def taken(self) -> None:
        """Puts what was gathered into the mailboxes of its topics."""
        if not self._runs:
            return
        runs, self._runs = self._runs, {}
        for name, run in runs.items():
            self._put(TopicName(*name), run, self._begun_s)

    def _put(self, name: TopicName, run: _Run, begun_s: float) -> None:
        def settled(told: Told) -> None:
            self._answer(name, run, told, perf_counter() - begun_s)

        try:
            ticket = self._service.directory.put(name, PublishEach(run.payloads, run.size))
        except PlainsongError as error:
            settled(error)
        else:
            ticket.on_settled(settled)

    def _answer(self, name: TopicName, run: _Run, told: Told, seconds: float) -> None:
        service, answers = self._service, run.answers
        if isinstance(told, Receipt):
            assert told.first_id is not None  # singles are nobody's duplicates
            generation = told.generation
            for answer, first_id in zip(answers, consecutive_ids(told.first_id, len(answers)), strict=True):
                answer(Reply([first_id, first_id, generation]), at_once=answer is answers[-1])
            _account(service, name, told, len(answers), seconds)
            return
        each = told if isinstance(told, list) else [told] * len(answers)
        for answer, one in zip(answers, each, strict=True):
            answer(Reply([one.first_id, one.last_id, one.generation]) if isinstance(one, Receipt) else one)
            _account(service, name, one, 1, seconds)


def _account(service: Service, name: TopicName, told: Receipt | PlainsongError, requests: int, seconds: float) -> None:
    """Counts publishes of one message that are answered; one that finds its way to another owner is counted there."""
    if isinstance(told, Receipt):
        service.metrics.requested("publish", 200, seconds, requests)
        service.rates.published(name, requests, trio.current_time())
    elif not isinstance(told, NoOwner):
        service.metrics.requested("publish", status_of(told), seconds, requests)
