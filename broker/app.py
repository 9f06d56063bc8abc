"""The application: the route table, bound to what serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.http.application import Application, build_application
from broker.views.table import ROUTES

if TYPE_CHECKING:
    from broker.http.exchange import HotHandlers
    from broker.http.settings import HttpSettings
    from broker.service import Service


def create_app(service: Service, settings: HttpSettings, handlers: HotHandlers) -> Application:
    """Every route of this version as an ASGI application.

    The hot ones are those the lane serves itself; here they are for HTTP/2, and for ``http.lane = false``.
    """
    routes = ROUTES if service.cluster is None else service.cluster.routes()
    return build_application(service, routes, handlers, settings)
