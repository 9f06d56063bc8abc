"""Which daemon a verb talks to: from options, the environment and contexts; and the client for it.

For each value the first that says something wins:

    --url, --namespace, --token-file
    the context of --context
    PLAINSONG_URL, PLAINSONG_NAMESPACE, PLAINSONG_TOKEN_FILE
    the context of PLAINSONG_CONTEXT, else the current one
    http://127.0.0.1:7420, default, no token

A context's token is for the context's own daemons: it is never sent to a URL from elsewhere.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plainsong.cli.contexts import Context, load_contexts
from plainsong.cli.verb import WhereOption, failure_of
from plainsong.settings import DEFAULT_URL, follows_owners
from protocol.errors import PlainsongError, TopicNotFound, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from plainsong import Client

F = TypeVar("F", bound="Callable[..., Any]")

#: How long one call may take, where the verb says nothing else.
DEADLINE_S = 15.0


@dataclass(frozen=True, slots=True)
class Where:
    """A daemon, or several that stand in for each other, and a namespace there."""

    urls: tuple[str, ...] = (DEFAULT_URL,)
    namespace: str = "default"
    token_file: str | None = None
    context: str | None = None
    """The context that the URLs are from."""

    @contextmanager
    def client(
        self, *topics: str, retry: bool = False, deadline_s: float = DEADLINE_S, **options: Any
    ) -> Iterator[Client]:
        """A client, closed at the end.

        Args:
          topics: that the verb speaks of: when one is missing, the error names the nearest.
          retry: whether a daemon that does not answer is asked again; somebody at a terminal does that better.
          deadline_s: for each call.
          options: of the client.
        Raises:
          CommandFailed: a topic is not there. PlainsongError: anything else.
        """
        from plainsong import Client  # here, so that help and completion need no HTTP

        options = {"namespace": self.namespace, "token_file": self.token_file, "retry": retry, **options}
        options.setdefault("follow_owners", follows_owners())
        with Client(self.urls, deadline_s=deadline_s, **options) as client:
            try:
                yield client
            except TopicNotFound as error:
                raise failure_of(error, hint=_what_to_do(client, topics)) from error


def where_of(given: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> Where:
    """The daemon that is meant.

    Args:
      given: the options ``url``, ``namespace``, ``token_file`` and ``context``; None where they were left out.
    Raises:
      CommandFailed: there is no such context, or the file of contexts cannot be read.
    """
    options = Context(_urls(given["url"]), given["namespace"], given["token_file"])
    env = {key: environ.get(f"PLAINSONG_{key.upper()}") or None for key in ("url", "namespace", "token_file")}
    environment = Context(_urls(env["url"]), env["namespace"], env["token_file"])
    named, name = _context(given["context"] or None, environ)
    order = [options, named, environment] if given["context"] else [options, environment, named]
    urls_from = next((each for each in order if each.urls), None)
    namespace = next((each.namespace for each in order if each.namespace is not None), "default")
    token_file = next(
        (
            each.token_file
            for each in order
            if each.token_file is not None and (each is not named or urls_from is named)
        ),
        None,
    )
    urls = urls_from.urls if urls_from is not None else (DEFAULT_URL,)
    return Where(urls, namespace, token_file, name if urls_from is named else None)


def _context(given: str | None, environ: Mapping[str, str]) -> tuple[Context, str | None]:
    contexts = load_contexts()
    name = given or environ.get("PLAINSONG_CONTEXT") or contexts.current
    return (Context(()), None) if name is None else (contexts.named(name), name)


def _urls(text: str | None) -> tuple[str, ...]:
    return tuple(each.strip() for each in (text or "").split(",") if each.strip())


def _what_to_do(client: Client, topics: Sequence[str]) -> str:
    """The next step when a topic is not there: the nearest one that is."""
    try:
        there = client.topics()
    except PlainsongError:
        return ""
    missing = next((topic for topic in topics if topic not in there), None)
    if missing is None:
        return "plainsong topic list shows those there are"
    create = f"plainsong topic create {missing}"
    if not there:
        return f"namespace {client.namespace} has no topic yet; {create} makes this one"
    near = nearest(missing, there)
    return f"{near} Or make it: {create}" if near.startswith("did") else f"{create}, or look with: plainsong topic list"


# --- options -----------------------------------------------------------------------------------------


def _complete_context(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in load_contexts().by_name if name.startswith(incomplete)]


_OPTIONS = (
    click.option(
        "--context", cls=WhereOption, metavar="NAME", shell_complete=_complete_context, help="A name from `context ls`."
    ),
    click.option(
        "--url", cls=WhereOption, metavar="URL", help="Its address; several with commas stand in for another."
    ),
    click.option("-n", "--namespace", cls=WhereOption, metavar="NAME", help="Of the topics; `default` by default."),
    click.option(
        "--token-file", cls=WhereOption, metavar="FILE", help="A file whose one line is sent as a bearer token."
    ),
)


def where_options(command: F) -> F:
    """Adds ``--context``, ``--url``, ``--namespace`` and ``--token-file``; they arrive as one ``where``."""

    @wraps(command)
    def with_where(*args: Any, **named: Any) -> Any:
        given = {key: named.pop(key) for key in ("context", "url", "namespace", "token_file")}
        return command(*args, where=where_of(given), **named)

    for option in reversed(_OPTIONS):
        with_where = option(with_where)
    return with_where  # type: ignore[return-value] # it takes what the command takes


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The topics that begin so, for the shell; none when the daemon does not answer at once."""
    try:
        where = where_of({key: ctx.params.get(key) for key in ("context", "url", "namespace", "token_file")})
        with where.client(deadline_s=1.0, request_timeout_s=1.0, connect_timeout_s=0.5) as client:
            return [name for name in client.topics() if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - whatever it is, a message would land in the middle of a command line
        return []
