"""`doctor --ready` and `--live`: asks each daemon whether it is ready, its version, and how long a ping takes."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from plainsong.calls import Failure, Request, Send
from plainsong.cli.command import CommandFailed, Exit, one_line
from plainsong.cli.output import echo_json, show_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from plainsong.calls import Answer
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


#: Sends a GET for a path to one of the URLs.
Ask: TypeAlias = "Callable[[str, str], Answer | Failure]"


@contextmanager
def asking(where: Where, timeout_s: float) -> Iterator[tuple[Sequence[str], Ask]]:
    """Yields the URLs of ``where``, and a function that asks one of them.

    Raises:
      InvalidParameter: a URL or the token file is invalid.
    """
    from plainsong._sync._pool import Pool
    from plainsong.settings import Settings  # here, so that help needs no HTTP

    settings = Settings.checked(
        where.urls,
        namespace=where.namespace,
        **where.access,
        connect_timeout_s=min(timeout_s, TIMEOUT_S),
        request_timeout_s=timeout_s,
        deadline_s=timeout_s,
        retry=False,
        max_connections=1,
    )
    wire = Pool(settings)

    def ask_one(url: str, path: str) -> Answer | Failure:
        return wire.carry(Send(url, Request("GET", path), min(timeout_s, TIMEOUT_S), timeout_s))

    try:
        yield settings.urls, ask_one
    finally:
        wire.close()


def ask(where: Where, *, count: int = 5, live: bool = False) -> list[ProbeResult]:
    """Asks every daemon of ``where``, and pings each ``count`` times; with ``live``, asks only whether it is alive.

    Raises:
      InvalidParameter: a URL or the token file is invalid.
    """
    with asking(where, TIMEOUT_S) as (urls, ask_one):
        return [_living(ask_one, url) if live else _one(ask_one, url, count) for url in urls]


def _living(ask_one: Ask, url: str) -> ProbeResult:
    found = ProbeResult(url)
    began = time.perf_counter()
    alive = _get(ask_one, url, "/livez", found)
    found.seconds.append(time.perf_counter() - began)
    found.answers = isinstance(alive, dict) and alive.get("alive") is True
    found.detail = found.detail or ("" if found.answers else "not a plainsong daemon")
    return found


def _one(ask_one: Ask, url: str, count: int) -> ProbeResult:
    found = ProbeResult(url)
    version = _get(ask_one, url, "/version", found)
    if version is None:
        return found
    if not isinstance(version, dict) or not version.keys() & {"version", "code"}:
        found.detail = "not a plainsong daemon"
        return found
    found.answers = True
    # A daemon may show these only to authenticated clients (401, 403); it shows to all clients whether it is ready.
    found.version, found.store = str(version.get("version", "")), str(version.get("store", ""))
    for _ in range(count):
        began = time.perf_counter()
        _get(ask_one, url, "/ping", found)
        found.seconds.append(time.perf_counter() - began)
    ready = _get(ask_one, url, "/readyz", found)
    if isinstance(ready, dict):
        found.ready = ready.get("ready") is True
        found.reasons = [str(each.get("detail", each)) for each in ready.get("reasons", [])]
        if "cluster" in ready:
            found.unreached = _unreached(_get(ask_one, url, "/v1/cluster", found))
    return found


def _unreached(cluster: Any) -> list[str]:
    """The instances that did not answer the daemon."""
    instances = cluster.get("instances") if isinstance(cluster, dict) else None
    if not isinstance(instances, list):
        return []
    return [f"{each.get('name')} at {each.get('address')}" for each in instances if each.get("topicsOpen") is None]


def _get(ask_one: Ask, url: str, path: str, found: ProbeResult) -> Any:
    """Returns the answer as JSON, or as text; None when there is none, with the reason in ``found``."""
    answer = ask_one(url, path)
    if isinstance(answer, Failure):
        found.detail = answer.detail
        return None
    try:
        return json.loads(answer.body)
    except ValueError:
        return answer.body.decode("utf-8", "replace")


def show_probes(where: Where, *, count: int, live: bool, as_json: bool) -> None:
    """Prints a line for each daemon.

    Raises:
      CommandFailed: none is ready, or with ``live`` none is alive.
      InvalidParameter: a URL or the token file is invalid.
    """
    found = ask(where, count=count, live=live)
    if as_json:
        echo_json([each.as_json() for each in found])
    else:
        for each in found:
            click.echo(_line(each, live=live))
    if not any(each.answers if live else each.ready for each in found):
        if any(each.answers for each in found):
            hint = (
                "it is running, and reports above why it is not ready; plainsong doctor --live checks only that it runs"
            )
        else:
            hint = "start one with plainsong serve; plainsong doctor checks more"
        raise CommandFailed("no daemon answers" if live else "no daemon is ready", hint=hint, code=Exit.UNAVAILABLE)


def _line(found: ProbeResult, *, live: bool = False) -> str:
    if not found.answers:
        return f"{found.url}  no answer: {one_line(found.detail)}"
    if live:
        return f"{found.url}  {show_seconds(min(found.seconds))}  alive"
    ready = "ready" if found.ready else "NOT READY: " + one_line("; ".join(found.reasons))
    version = one_line(found.version) or "(shows its version only to authenticated clients)"
    return f"{found.url}  {show_seconds(min(found.seconds))}  plainsong {version}  {ready}"
