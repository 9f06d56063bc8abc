"""Counting a hot route's answers, whatever they are, and logging them when asked to."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from broker.http.status import only_plain, status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.http.exchange import HotHandler, HotRequest, HttpAnswer, Verb
    from broker.service import Service

    Headers = Sequence[tuple[str, str]]


def measured(verb: Verb, service: Service, handler: HotHandler) -> HotHandler:
    """``handler``, with each answer's status and time counted under ``verb``."""
    requested, access = service.metrics.requested, service.access

    def account(request: HotRequest, status: int, seconds: float, headers: Headers = ()) -> None:
        requested(verb, status, seconds)
        access.answered(verb, _target(request), status, seconds, headers)

    async def counted(request: HotRequest) -> HttpAnswer:
        begun_s = perf_counter()
        access.begin(request.request_id)
        try:
            answer = await handler(request)
        except Exception as error:
            plain = only_plain(error)
            account(request, 500 if plain is None else status_of(plain), perf_counter() - begun_s)
            raise
        account(request, answer.status, perf_counter() - begun_s, answer.headers)
        return answer

    return counted


def _target(request: HotRequest) -> str:
    return f"{request.namespace}:{request.topic}" if request.topic else request.transaction
