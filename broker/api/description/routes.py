"""Routes that describe the API: errors, and the topics as channels."""

from __future__ import annotations

from typing import Any

from broker.api.description.asyncapi import AsyncApi
from broker.api.description.problems import Problems
from broker.api.schemas import ANY
from broker.http.route import JSON_TYPE, Route
from plainsong.protocol.answers.problems import ErrorType

ROUTES: tuple[Route[Any], ...] = (
    Route(
        "explain_error",
        "GET",
        "/errors/{code}",
        Problems,
        Problems.explain,
        verb=None,
        on="name",
        tag="daemon",
        doc="Explain an error code and what to do about it, as JSON or text; the type of a problem is this path.",
        answer=ErrorType,
        answer_types=(JSON_TYPE, "text/plain"),
        errors=(*ANY, "not_found"),
    ),
    Route(
        "asyncapi",
        "GET",
        "/asyncapi.json",
        AsyncApi,
        AsyncApi.describe,
        verb=None,
        on="name",
        tag="daemon",
        doc="The topics that the caller may see, up to 1000, as channels of AsyncAPI 3.0.",
        parameters=("match",),
        answer=dict[str, Any],
        errors=(*ANY, "storage_failed", "replication_unavailable"),
    ),
)
