"""The verb `ping`: asks each daemon whether it is ready, which version it is, and how long a ping takes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from plainsong.calls import Failure, Request, Send
from plainsong.cli.command import CommandFailed, Exit, Verb, json_option, one_line
from plainsong.cli.connection import where_options
from plainsong.cli.output import echo_json, show_seconds

if TYPE_CHECKING:
    from plainsong._sync._pool import Pool
    from plainsong.cli.connection import Where

TIMEOUT_S = 5.0


@dataclass(slots=True)
class ProbeResult:
    """The answers of one daemon."""

    url: str
    answers: bool = False
    detail: str = ""
    """Why it does not answer, or is not a Plainsong daemon."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each ping."""
    version: str = ""
    store: str = ""
    ready: bool = False
    reasons: list[str] = field(default_factory=list)
    """Why it is not ready."""
    unreached: list[str] = field(default_factory=list)
    """Instances of its cluster that it cannot reach, as ``name at host:port``."""

    def as_json(self) -> dict[str, Any]:
        fields = {"url": self.url, "answers": self.answers, "ready": self.ready, "reasons": self.reasons}
        fields |= {"version": self.version or None, "store": self.store or None, "detail": self.detail or None}
        return {**fields, "seconds": [round(each, 6) for each in self.seconds]}


def ask(where: Where, *, count: int = 5) -> list[ProbeResult]:
    """Asks every daemon of ``where``, and pings each ``count`` times.

    Raises:
      InvalidParameter: a URL or the token file is invalid.
    """
    from plainsong._sync._pool import Pool
    from plainsong.settings import Settings  # here, so that help needs no HTTP

    settings = Settings.checked(
        where.urls,
        namespace=where.namespace,
        **where.access,
        connect_timeout_s=TIMEOUT_S,
        request_timeout_s=TIMEOUT_S,
        deadline_s=TIMEOUT_S,
        retry=False,
        max_connections=1,
    )
    wire = Pool(settings)
    try:
        return [_one(wire, url, count) for url in settings.urls]
    finally:
        wire.close()


def _one(wire: Pool, url: str, count: int) -> ProbeResult:
    found = ProbeResult(url)
    version = _get(wire, url, "/version", found)
    if version is None:
        return found
    if not isinstance(version, dict) or not version.keys() & {"version", "code"}:
        found.detail = "not a plainsong daemon"
        return found
    found.answers = True
    # A daemon may show these to names alone (401, 403); that it is there and ready it shows to all.
    found.version, found.store = str(version.get("version", "")), str(version.get("store", ""))
    for _ in range(count):
        began = time.perf_counter()
        _get(wire, url, "/ping", found)
        found.seconds.append(time.perf_counter() - began)
    ready = _get(wire, url, "/readyz", found)
    if isinstance(ready, dict):
        found.ready = ready.get("ready") is True
        found.reasons = [str(each.get("detail", each)) for each in ready.get("reasons", [])]
        if "cluster" in ready:
            found.unreached = _unreached(_get(wire, url, "/v1/cluster", found))
    return found


def _unreached(cluster: Any) -> list[str]:
    """The instances that did not answer the daemon."""
    instances = cluster.get("instances") if isinstance(cluster, dict) else None
    if not isinstance(instances, list):
        return []
    return [f"{each.get('name')} at {each.get('address')}" for each in instances if each.get("topicsOpen") is None]


def _get(wire: Pool, url: str, path: str, found: ProbeResult) -> Any:
    """Returns the answer as JSON, or as text; None when there is none, with the reason in ``found``."""
    answer = wire.carry(Send(url, Request("GET", path), TIMEOUT_S, TIMEOUT_S))
    if isinstance(answer, Failure):
        found.detail = answer.detail
        return None
    try:
        return json.loads(answer.body)
    except ValueError:
        return answer.body.decode("utf-8", "replace")


@click.command(
    cls=Verb,
    examples=[
        "plainsong ping",
        "plainsong ping --url http://a.example:7420,http://b.example:7420",
        "plainsong ping --json",
    ],
)
@click.option("--count", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N", help="Pings to each.")
@json_option
@where_options
def ping(count: int, as_json: bool, where: Where) -> None:
    """Check whether daemons are reachable and ready.

    Asks each URL. Ends with 0 when at least one daemon is ready, with 5 when
    none is.
    """
    found = ask(where, count=count)
    if as_json:
        echo_json([each.as_json() for each in found])
    else:
        for each in found:
            click.echo(_line(each))
    if not any(each.ready for each in found):
        hint = "is it running? plainsong serve starts one; plainsong doctor checks more"
        raise CommandFailed("no daemon is ready", hint=hint, code=Exit.UNAVAILABLE)


def _line(found: ProbeResult) -> str:
    if not found.answers:
        return f"{found.url}  no answer: {one_line(found.detail)}"
    ready = "ready" if found.ready else "NOT READY: " + one_line("; ".join(found.reasons))
    version = one_line(found.version) or "(shows its version to names alone)"
    return f"{found.url}  {show_seconds(min(found.seconds))}  plainsong {version}  {ready}"
