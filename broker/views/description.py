"""The description of the API, served by the API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.openapi import description
from broker.views.route import json_answer

if TYPE_CHECKING:
    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest


async def describe_api(service: Service, request: ViewRequest) -> HttpAnswer:
    """OpenAPI, of this very version."""
    return json_answer(description(service.version))
