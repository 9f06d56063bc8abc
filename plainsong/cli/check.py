"""`doctor --check`: one line and an exit code for Nagios and other systems that run its plugins."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

import click

from plainsong.calls import Failure, topic_path
from plainsong.cli.cluster import security_differences
from plainsong.cli.command import one_line
from plainsong.cli.options import show_length
from plainsong.cli.output import counted, echo_json
from plainsong.cli.ping import asking
from plainsong.positions import now_ms
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.calls import Answer
    from plainsong.cli.connection import Where
    from plainsong.cli.ping import Ask
    from plainsong.protocol.answers.service import InstanceRow

OK, WARNING, CRITICAL, UNKNOWN = range(4)
_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
#: Time-out of one request: monitoring systems allow ten seconds for the whole check.
TIMEOUT_S = 5.0
DAY_S = 86_400
#: Kinds of attention items that have their own limits here.
_OWN_LIMITS = {"held-reader", "old-transaction", "certificate"}
_LAG = re.compile(r"([a-zA-Z0-9_]+):([a-zA-Z0-9_-]+)/([^=\s]+)=(\d{1,15})\Z")
#: A sample of Prometheus' text format; label values may contain any characters.
_SAMPLE = re.compile(r"^(plainsong_\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


class Lag(click.ParamType[tuple[str, str, str, int]]):
    """``ns:topic/reader=N``."""

    name = "lag"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str, str, int]:
        found = _LAG.match(str(value))
        if found is None:
            self.fail(f"{str(value)[:80]!r} is not namespace:topic/reader=N", param, ctx)
        return found[1], found[2], found[3], int(found[4])


def end_unknown(ctx: click.Context, text: str) -> None:
    """End the command with the status UNKNOWN: the plugin could not check."""
    click.echo(f"PLAINSONG {_WORDS[UNKNOWN]} - {one_line(text)}")
    ctx.exit(UNKNOWN)


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds; a value beyond one is a warning."""

    lags: Sequence[tuple[str, str, str, int]]
    """Namespace, topic and name of each reader, with the largest acceptable lag in messages."""
    transaction_s: int
    certificate_days: int
    backup_s: int | None
    """The largest acceptable age of the last backup. None: 26 hours, and a store without a backup causes no warning."""


@dataclass(slots=True)
class Report:
    """The findings, and figures for graphs."""

    findings: list[tuple[int, str]] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    figures: dict[str, tuple[str, float | None]] = field(default_factory=dict)
    """Name → its value with its unit, and the limit above which it is a warning."""

    def found(self, status: int, text: str) -> None:
        """Add a finding."""
        self.findings.append((status, one_line(text).replace("|", "/")))

    def figure(self, name: str, value: float, unit: str = "", limit: float | None = None) -> None:
        """Add a figure for graphs."""
        self.figures[name] = (f"{value:g}{unit}" if value < 1e6 else f"{value:.0f}{unit}", limit)

    @property
    def status(self) -> int:
        """The worst: critical, then warning, then unknown."""
        states = {status for status, _ in self.findings}
        return next((each for each in (CRITICAL, WARNING, UNKNOWN) if each in states), OK)

    @property
    def text(self) -> str:
        """The findings, worst first; the facts if there are none."""
        worst_first = sorted(self.findings, key=lambda each: (CRITICAL, WARNING, UNKNOWN).index(each[0]))
        return "; ".join(text for _, text in worst_first) or ", ".join(self.facts)

    @property
    def line(self) -> str:
        """The output line of a plugin."""
        figures = " ".join(
            f"{name}={value}" + ("" if limit is None else f";{limit:g}")
            for name, (value, limit) in self.figures.items()
        )
        return f"PLAINSONG {_WORDS[self.status]} - {self.text}" + (f" | {figures}" if figures else "")


def check_daemons(where: Where, limits: Limits, *, as_json: bool) -> int:
    """Check every URL of ``where``, print the report, and return the exit code of a plugin."""
    report = Report()
    timeout_s = where.timeout_s or TIMEOUT_S
    try:
        with asking(where, timeout_s) as (urls, ask):
            answering = [url for url in urls if _is_ready(ask, url, report)]
            if answering:
                looks = _Looks(ask, answering[0], report)
                looks.instances()
                looks.topics()
                looks.attention()
                looks.scrub(answering)
                looks.metrics(answering, limits.transaction_s, limits.certificate_days * DAY_S, limits.backup_s)
                for lag in limits.lags:
                    looks.lag(*lag)
    except PlainsongError as error:
        report.found(UNKNOWN, error.detail)
    if as_json:
        figures = {name: {"value": value, "warning": limit} for name, (value, limit) in report.figures.items()}
        findings = [{"status": _WORDS[status], "text": text} for status, text in report.findings]
        echo_json({"status": _WORDS[report.status], "findings": findings, "figures": figures})
    else:
        click.echo(report.line)
    return report.status


def _is_ready(ask: Ask, url: str, report: Report) -> bool:
    """True if a Plainsong answers at the URL, ready or not; anything else is reported."""
    answer = ask(url, "/readyz")
    if isinstance(answer, Failure):
        report.found(CRITICAL if _is_refused(answer) else UNKNOWN, f"{url}: {answer.detail}")
        return False
    shown = _json(answer)
    if not isinstance(shown, dict) or not isinstance(shown.get("ready"), bool):
        report.found(UNKNOWN, f"{url}: not a Plainsong daemon (status {answer.status})")
        return False
    if not shown["ready"]:
        reasons = [str(each.get("detail", "")) for each in shown.get("reasons", []) if isinstance(each, dict)]
        report.found(CRITICAL, f"{url} is not ready" + (": " + "; ".join(reasons) if reasons else ""))
    return True


@dataclass(slots=True)
class _Looks:
    """Checks of a service, through one of its URLs; each adds its findings to the report."""

    ask: Ask
    url: str
    report: Report

    def _asked(self, path: str, url: str | None = None) -> Any:
        """Return the answer as JSON; None if there is none, which is reported."""
        answer = self.ask(url or self.url, path)
        if isinstance(answer, Failure) or answer.status != 200:
            self._unanswered(path, url or self.url, answer)
            return None
        return _json(answer)

    def _unanswered(self, path: str, url: str, answer: Answer | Failure) -> None:
        if isinstance(answer, Failure):
            self.report.found(UNKNOWN, f"{url}: {answer.detail}")
            return
        shown = _json(answer)
        why = shown.get("detail") if isinstance(shown, dict) else None
        self.report.found(UNKNOWN, f"{path.partition('?')[0]}: {why or f'status {answer.status}'}")

    def instances(self) -> None:
        """Report the number of instances, silent ones, and differences of their grants and tokens."""
        shown = self._asked("/v1/cluster")
        if not isinstance(shown, dict):
            return
        instances = [each for each in shown.get("instances", []) if isinstance(each, dict)]
        self.report.facts.append(counted(len(instances), "instance"))
        self.report.figure("instances", len(instances))
        for each in instances:
            if each.get("topicsOpen") is None:
                self.report.found(CRITICAL, f"instance {each.get('name')} does not answer the others")
        for line in security_differences(cast("list[InstanceRow]", instances)):
            self.report.found(WARNING, line.removeprefix("warning: "))

    def topics(self) -> None:
        """Report the number of topics."""
        shown = self._asked("/v1/topics?limit=1")
        if isinstance(shown, dict):
            self.report.facts.append(counted(int(shown.get("total", 0)), "topic"))
            self.report.figure("topics", int(shown.get("total", 0)))

    def attention(self) -> None:
        """Report what any instance lists as needing attention, except kinds that have their own limits here."""
        for each in self._asked("/v1/attention") or ():
            if each.get("kind") in _OWN_LIMITS:
                continue
            # Damage can wait for working hours: readable data is still served, and a topic that cannot be served makes
            # the daemon unready.
            is_critical = each.get("severity") == "critical" and each.get("kind") != "damaged"
            subject = f"{each['subject']}: " if each.get("subject") else ""
            self.report.found(CRITICAL if is_critical else WARNING, f"{subject}{each.get('text', '')}")

    def scrub(self, urls: Sequence[str]) -> None:
        """Report the number of damaged places in the stores; ``attention`` has named them."""
        found = 0
        for url in urls:
            shown = self._asked("/v1/scrub", url)
            if isinstance(shown, dict):
                found += len(shown.get("findings", ())) + int(shown.get("moreFindings", 0))
        self.report.figure("scrub_findings", found, limit=0)

    def metrics(self, urls: Sequence[str], transaction_s: float, certificate_s: float, backup_s: float | None) -> None:
        """Report the ages of the oldest transaction and the last backup, and when the certificates expire."""
        answers = [each for url in urls if (each := self._samples(url)) is not None]
        if not answers:
            return
        samples: dict[str, list[float]] = {}
        for name, value in chain.from_iterable(answers):
            samples.setdefault(name, []).append(value)
        # Only the instance that runs the transaction service has this gauge, and it may not be one of these. Any
        # instance forwards a request to it.
        ages_s = samples.get("plainsong_transaction_oldest_age_seconds", ())
        oldest_s = max(*ages_s, self._oldest_transaction_s(), 0.0)
        self.report.figure("oldest_tx", round(oldest_s), "s", transaction_s)
        if oldest_s > transaction_s:
            self.report.found(WARNING, f"a transaction has been open for {show_length(oldest_s * 1000)}")
        self.report.figure("hidden", sum(samples.get("plainsong_hidden_messages", ())))
        if ends := samples.get("plainsong_tls_certificate_not_after_seconds"):
            left_s = min(ends) - time.time()
            self.report.figure("certificate", round(left_s), "s")
            if left_s < certificate_s:
                when = f"expires in {show_length(left_s * 1000)}" if left_s > 0 else "has expired"
                self.report.found(WARNING, f"the certificate {when}")
        self._backup(samples.get("plainsong_backup_last_success_timestamp_seconds", ()), backup_s)

    def _oldest_transaction_s(self) -> float:
        """Return the age of the oldest open transaction, on any instance, in seconds; 0 if there is none."""
        path = "/v1/transactions?state=in_progress&limit=1"
        answer = self.ask(self.url, path)
        shown = None if isinstance(answer, Failure) else _json(answer)
        if isinstance(answer, Failure) or answer.status != 200 or not isinstance(shown, list):
            # Without a transaction service of Plainsong's own there are no transactions to report.
            if not isinstance(shown, dict) or shown.get("code") != "transactions_unavailable":
                self._unanswered(path, self.url, answer)
            return 0.0
        try:
            # By the daemon's clock, not this machine's.
            said_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
        except (KeyError, ValueError):
            said_s = time.time()
        return max((said_s - each["startedMs"] / 1000 for each in shown if each.get("startedMs")), default=0.0)

    def _backup(self, made: Sequence[float], backup_s: float | None) -> None:
        limit_s = 26 * 3600 if backup_s is None else backup_s
        if not made:
            if backup_s is not None:
                self.report.found(WARNING, "no complete backup exists")
            return
        age_s = max(0.0, now_ms() / 1000 - max(made))
        self.report.figure("backup_age", round(age_s), "s", limit_s)
        if age_s > limit_s:
            self.report.found(WARNING, f"the last backup is {show_length(age_s * 1000)} old")

    def _samples(self, url: str) -> list[tuple[str, float]] | None:
        answer = self.ask(url, "/metrics")
        if isinstance(answer, Failure) or answer.status != 200:
            why = answer.detail if isinstance(answer, Failure) else f"status {answer.status}"
            self.report.found(UNKNOWN, f"{url}/metrics: {why}")
            return None
        return samples_in(answer.body.decode("utf-8", "replace"))

    def lag(self, namespace: str, topic: str, reader: str, most: int) -> None:
        """Report a reader's lag in messages."""
        try:
            path = topic_path(namespace, topic, "/lag?" + urlencode({"reader": reader}))
        except PlainsongError as error:
            self.report.found(UNKNOWN, error.detail)
            return
        shown = self._asked(path)
        if not isinstance(shown, dict):
            return
        visible = int(shown.get("visible", 0))
        self.report.figure(f"lag_{namespace}:{topic}/{reader}", visible, limit=most)
        if visible > most:
            self.report.found(
                WARNING, f"reader {reader} of {namespace}:{topic} is {counted(visible, 'message')} behind"
            )


def samples_in(text: str) -> list[tuple[str, float]]:
    """Return every sample of a page of metrics, with its name; one name has a sample for each of its label sets."""
    return [(name, float(value)) for name, value in _SAMPLE.findall(text) if value != "NaN"]


def _is_refused(failure: Failure) -> bool:
    """True if the connection was refused. An unknown or silent host proves nothing about a daemon."""
    error: BaseException | None = failure.cause
    while error is not None:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _json(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except ValueError:
        return None
