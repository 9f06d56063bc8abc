"""The hot routes' handlers by verb: as they answer here, and as the doors call them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from broker.handlers.measured import measured
from broker.handlers.poll import poll
from broker.handlers.publish import publish
from broker.handlers.store import rollback, store
from broker.handlers.transactions import abort, begin, commit, prepare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.http.exchange import HotHandlers, HotRequest, HttpAnswer, Verb
    from broker.service import Service


def local_handlers(service: Service) -> HotHandlers:
    """The functions that answer the hot routes, at the owner of what they are about."""
    handlers: dict[Verb, Callable[[Service, HotRequest], Awaitable[HttpAnswer]]] = {
        "publish": publish,
        "poll": poll,
        "store": store,
        "rollback": rollback,
        "begin": begin,
        "prepare": prepare,
        "commit": commit,
        "abort": abort,
    }
    return {verb: partial(handler, service) for verb, handler in handlers.items()}


def hot_handlers(service: Service) -> HotHandlers:
    """The functions behind both doors: they answer wherever the owner is, and are counted here."""
    handlers, cluster = local_handlers(service), service.cluster
    if cluster is not None:
        handlers = {verb: cluster.forwarding.hot(handler) for verb, handler in handlers.items()}
    return {verb: measured(verb, service, handler) for verb, handler in handlers.items()}
