"""The access log: a line for every request if it is on, none if it is off."""

from __future__ import annotations

import logging
from contextvars import copy_context
from typing import TYPE_CHECKING

from broker.logs import AccessLog, request_id

if TYPE_CHECKING:
    import pytest


def test_the_access_log_has_one_line_for_each_answered_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="plainsong.access")

    def serve_one() -> str:
        access = AccessLog(enabled=True)
        access.begin("id-1")
        access.answered("publish", "demo:greetings", 200, 0.00123)
        return request_id.get()

    assert copy_context().run(serve_one) == "id-1"
    [line] = caplog.records
    assert (line.getMessage(), line.route, line.target, line.status, line.ms) == (  # type: ignore[attr-defined]
        "answered",
        "publish",
        "demo:greetings",
        200,
        1.23,
    )


def test_nothing_is_written_when_the_access_log_is_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="plainsong.access")
    AccessLog(enabled=False).answered("publish", "demo:greetings", 200, 0.001)
    assert caplog.records == []
