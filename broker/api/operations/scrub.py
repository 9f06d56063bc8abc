"""The scrub over HTTP: start a round, and show its findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from broker.api.answers import json_answer
from broker.finding import Finding
from plainsong.protocol.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.scrub import Scrub, ScrubFinding
    from broker.http.messages import Answer, Request
    from plainsong.protocol.answers.service import StartedScrub

#: Damaged places that are listed individually in ``attention``; the rest is counted.
MAX_REPORTED = 10


@dataclass(frozen=True, slots=True)
class ScrubRoutes:
    """The routes of this instance's scrub."""

    scrub: Scrub

    async def start(self, request: Request) -> Answer:
        """Start a round, unless one is running."""
        request.parameters()
        started = self.scrub.start_now()
        await trio.lowlevel.checkpoint()
        answer: StartedScrub = {"started": started, **self.scrub.report.shown()}
        return json_answer(answer)

    async def show(self, request: Request) -> Answer:
        """Return the progress of the current round, or the findings of the last one."""
        request.parameters()
        await trio.lowlevel.checkpoint()
        return json_answer(self.scrub.report.shown())


def damaged(scrub: Scrub) -> Sequence[Finding]:
    """Report the scrub's findings, for ``broker.attention``."""
    report = scrub.report
    told = [_finding(each, report.started_ms) for each in report.findings[:MAX_REPORTED]]
    left = len(report.findings) - len(told) + report.more
    if left:
        text = f"{counted(left, 'more damaged place')}; GET /v1/scrub lists them"
        told.append(Finding("damaged", "critical", "service", text, report.started_ms))
    if report.unread:
        first, why = next(iter(report.unread.items()))
        text = f"the scrub could not read {counted(len(report.unread), 'topic')} (first {first}): {why}"
        told.append(Finding("unread", "warning", "service", text, report.started_ms))
    return told


def _finding(found: ScrubFinding, since_ms: int | None) -> Finding:
    shown = found.shown()
    topic = "" if found.name is None else str(found.name)
    rows = "rows" if found.rows is None else counted(found.rows, "row")
    text = f"{rows} of the {shown['table']} table from {shown['from']} to {shown['to']} cannot be read: {found.why}"
    return Finding("damaged", "critical", topic or "service", text, since_ms, topic=topic)
