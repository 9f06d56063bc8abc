"""Counting a hot route's answers, whatever they are."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from broker.http.status import only_plain, status_of

if TYPE_CHECKING:
    from broker.http.exchange import HotHandler, HotRequest, HttpAnswer, Verb
    from broker.metrics import Metrics


def measured(verb: Verb, metrics: Metrics, handler: HotHandler) -> HotHandler:
    """``handler``, with each answer's status and time counted under ``verb``."""

    async def counted(request: HotRequest) -> HttpAnswer:
        begun_s = perf_counter()
        try:
            answer = await handler(request)
        except Exception as error:
            plain = only_plain(error)
            metrics.requested(verb, 500 if plain is None else status_of(plain), perf_counter() - begun_s)
            raise
        metrics.requested(verb, answer.status, perf_counter() - begun_s)
        return answer

    return counted
