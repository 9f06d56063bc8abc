"""The daemon that a verb talks to: found by options, the environment and named contexts; and the client for it.

Contexts name daemons in a file, ``$XDG_CONFIG_HOME/plainsong/contexts.toml``:

    current = "production"

    [contexts.production]
    url = ["http://a.example:7420", "http://b.example:7420"]
    namespace = "orders"
    token_file = "/run/secrets/plainsong"

The file never holds a token, only the name of the file that has it; no command prints tokens.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plainsong.cli.command import WHERE_OPTIONS, CommandFailed, Exit, WhereOption, failure_of, verbose_option
from plainsong.cli.options import Length
from plainsong.positions import replace_file
from plainsong.protocol.errors import PlainsongError, TopicNotFound, nearest
from plainsong.settings import DEFAULT_URL, MAX_S, follows_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from plainsong import Client
    from plainsong.calls import Call

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
#: The files that a context may name.
FILES = ("token_file", "ca_file", "certificate", "key")
_KEYS = ("url", "namespace", *FILES)


@dataclass(frozen=True, slots=True)
class Context:
    """The daemon and namespace that a name stands for; None where the file leaves a value out."""

    urls: tuple[str, ...]
    namespace: str | None = None
    token_file: str | None = None
    ca_file: str | None = None
    certificate: str | None = None
    key: str | None = None

    def files(self) -> dict[str, str | None]:
        """The files, by the names of ``FILES``."""
        return {name: getattr(self, name) for name in FILES}


@dataclass(slots=True)
class Contexts:
    """The content of the file."""

    path: Path
    current: str | None = None
    by_name: dict[str, Context] = field(default_factory=dict)

    def named(self, name: str) -> Context:
        """Returns the context. Raises CommandFailed with the nearest name."""
        if name in self.by_name:
            return self.by_name[name]
        hint = nearest(name, self.by_name) if self.by_name else f"create it with plainsong context add {name} --url URL"
        raise CommandFailed(f"there is no context {name!r}", hint=hint, code=Exit.NOT_FOUND)

    def save(self) -> None:
        """Replaces the file atomically. Raises CommandFailed: the file is unchanged."""
        lines = [] if self.current is None else [f"current = {_toml(self.current)}", ""]
        for name, context in sorted(self.by_name.items()):
            lines += [f"[contexts.{name}]", f"url = {_toml(list(context.urls))}"]
            if context.namespace is not None:
                lines.append(f"namespace = {_toml(context.namespace)}")
            lines += [f"{name} = {_toml(file)}" for name, file in context.files().items() if file is not None]
            lines.append("")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self.path, "\n".join(lines).encode())
        except OSError as error:
            raise CommandFailed(f"{self.path} cannot be written: {error.strerror}") from error


def checked_name(name: str) -> str:
    """Returns ``name`` if a context may have it. Raises CommandFailed."""
    if _NAME.match(name):
        return name
    hint = "use 1 to 64 letters, digits, underscores and hyphens"
    raise CommandFailed(f"invalid context name {name[:80]!r}", hint=hint, code=Exit.USAGE)


def contexts_path(environ: Mapping[str, str] = os.environ) -> Path:
    home = environ.get("XDG_CONFIG_HOME", "")
    try:
        base = Path(home) if home.startswith("/") else Path.home() / ".config"
    except RuntimeError:  # neither HOME nor the list of users has one: there is no such file
        base = Path("/nonexistent/.config")
    return base / "plainsong" / "contexts.toml"


def load_contexts() -> Contexts:
    """Reads the file; empty when there is none. Raises CommandFailed when the file is malformed."""
    path = contexts_path()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return _parsed(path, document)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts(path)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}", code=Exit.USAGE) from error
    except ValueError as error:
        hint = "correct the file, or move it away and add the contexts again"
        raise CommandFailed(f"{path}: {error}", hint=hint, code=Exit.USAGE) from error


def _parsed(path: Path, document: dict[str, Any]) -> Contexts:
    """Raises ValueError that says what is wrong."""
    current, contexts = document.pop("current", None), document.pop("contexts", {})
    if document:
        raise ValueError(f"unknown key {next(iter(document))!r}; known: contexts, current")
    if not isinstance(contexts, dict) or not isinstance(current, str | None):
        raise ValueError("current must be a name, contexts a table")
    found = Contexts(path, current)
    for name, context in contexts.items():
        found.by_name[name] = _parse_context(name, context)
    if current is not None and current not in found.by_name:
        raise ValueError(f"current names no context: {current!r}")
    return found


def _parse_context(name: str, document: object) -> Context:
    if not isinstance(document, dict) or not _NAME.match(name):
        raise ValueError(f"contexts.{name} must be a table")
    for key in document:
        if key not in _KEYS:
            raise ValueError(f"contexts.{name} has an unknown key {key!r}; {nearest(key, _KEYS)}")
    url, namespace, *files = (document.get(key) for key in _KEYS)
    urls = (url,) if isinstance(url, str) else tuple(url) if isinstance(url, list) else ()
    if not urls or not all(isinstance(each, str) for each in urls):
        raise ValueError(f"contexts.{name}.url must be a URL or a list of URLs")
    if not isinstance(namespace, str | None) or not all(isinstance(file, str | None) for file in files):
        raise ValueError(f"contexts.{name}: namespace and {', '.join(FILES)} must be strings")
    return Context(urls, namespace, *files)


def _toml(value: str | list[str]) -> str:
    """Writes a string or a list of strings in TOML, which has JSON's escapes."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


F = TypeVar("F", bound="Callable[..., Any]")


# --- which daemon ----------------------------------------------------------------------------------
#
# For each value the first of these that is set wins:
#
#     --url, --namespace, --token-file, --ca-file, --certificate and --key
#     the context of --context
#     PLAINSONG_URL, PLAINSONG_NAMESPACE, PLAINSONG_TOKEN_FILE, PLAINSONG_CA_FILE …
#     the context of PLAINSONG_CONTEXT, else the current one
#     http://127.0.0.1:7420, default, no token
#
# A context's token and certificate are sent to the context's own daemons only, never to a URL from elsewhere.


#: The parameters that select a daemon and the access to it.
GIVEN = ("context", "url", *_KEYS[1:], "insecure")
#: How long one call may take, unless the verb sets another deadline.
DEADLINE_S = 15.0
#: The longest time that connecting may take.
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Where:
    """The addresses of one daemon or of one cluster's instances, and a namespace there."""

    urls: tuple[str, ...] = (DEFAULT_URL,)
    namespace: str = "default"
    token_file: str | None = None
    ca_file: str | None = None
    certificate: str | None = None
    key: str | None = None
    insecure: bool = False
    context: str | None = None
    """The context that the URLs come from."""
    timeout_s: float | None = None
    """The deadline of each call; None: the verb's own."""

    @property
    def access(self) -> dict[str, Any]:
        """The same as arguments of a client. Raises CommandFailed: a certificate without its key."""
        if (self.certificate is None) != (self.key is None):
            raise CommandFailed("a certificate needs its key", hint="give --certificate and --key", code=Exit.USAGE)
        pair = None if self.certificate is None else (self.certificate, self.key)
        return {
            "token_file": self.token_file,
            "ca_file": self.ca_file,
            "certificate": pair,
            "insecure": self.insecure,
        }

    @contextmanager
    def client(
        self, *topics: str, retry: bool = False, deadline_s: float = DEADLINE_S, creates: bool = True, **options: Any
    ) -> Iterator[Client]:
        """Opens a client for the block.

        Args:
          topics: topics of the verb; when one does not exist, the error names the nearest.
          retry: retry a daemon that does not answer. Off by default: a person at a terminal decides that better.
          deadline_s: for each call.
          creates: whether creating a missing topic would help the verb; the error says how.
        Raises:
          CommandFailed: a topic does not exist. PlainsongError: any other error.
        """
        from plainsong import Client  # here, so that help and completion need no HTTP

        options = {"namespace": self.namespace, **self.access, "retry": retry, **options}
        options.setdefault("follow_owners", follows_owners())
        if self.timeout_s is not None:
            deadline_s = self.timeout_s
            options |= {"request_timeout_s": deadline_s, "connect_timeout_s": min(deadline_s, CONNECT_S)}
        if retry:
            options.setdefault("wait_for_daemon_s", MAX_S)
        with Client(self.urls, deadline_s=deadline_s, **options) as client:
            try:
                yield client
            except TopicNotFound as error:
                raise failure_of(error, hint=_what_to_do(client, topics, creates=creates)) from error


def where_of(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Where:
    """Finds the daemon by the rules above.

    Args:
      given: the options of ``GIVEN``; None, or missing, where they were left out.
    Raises:
      CommandFailed: no such context, or the file of contexts cannot be read.
    """
    options = Context(_urls(given["url"]), given["namespace"], *(given.get(name) for name in FILES))
    env = {key: environ.get(f"PLAINSONG_{key.upper()}") or None for key in _KEYS}
    environment = Context(_urls(env["url"]), env["namespace"], *(env[name] for name in FILES))
    named, name = _context(given["context"] or None, environ)
    order = [options, named, environment] if given["context"] else [options, environment, named]
    urls_from = next((each for each in order if each.urls), None)
    namespace = next((each.namespace for each in order if each.namespace is not None), "default")
    trusted = [each for each in order if each is not named or urls_from is named]
    files = {key: next((file for each in trusted if (file := getattr(each, key)) is not None), None) for key in FILES}
    urls = urls_from.urls if urls_from is not None else (DEFAULT_URL,)
    insecure = bool(given.get("insecure"))
    return Where(urls, namespace, **files, insecure=insecure, context=name if urls_from is named else None)


def _context(given: str | None, environ: Mapping[str, str]) -> tuple[Context, str | None]:
    contexts = load_contexts()
    name = given or environ.get("PLAINSONG_CONTEXT") or contexts.current
    return (Context(()), None) if name is None else (contexts.named(name), name)


def _urls(text: str | None) -> tuple[str, ...]:
    return tuple(each.strip() for each in (text or "").split(",") if each.strip())


def _what_to_do(client: Client, topics: Sequence[str], *, creates: bool) -> str:
    """The hint for a topic that does not exist: the nearest one that does."""
    try:
        there = client.topics()
    except PlainsongError:
        return ""
    missing = next((topic for topic in topics if topic not in there), None)
    if missing is None:
        return "plainsong topic list shows the topics"
    create = f"plainsong topic create {missing}"
    if not creates:
        near = nearest(missing, there) if there else ""
        return near if near.startswith("did") else "plainsong topic list shows the topics"
    if not there:
        return f"namespace {client.namespace} has no topics yet; {create} creates this one"
    near = nearest(missing, there)
    return (
        f"{near} Or create it: {create}"
        if near.startswith("did")
        else f"{create}, or list topics: plainsong topic list"
    )


# --- options -----------------------------------------------------------------------------------------


def complete_context(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in load_contexts().by_name if name.startswith(incomplete)]


def where_options(command: F) -> F:
    """Adds the options of ``WHERE_OPTIONS``, passed as one ``where``, and ``-v``."""
    return _with_where(command, has_timeout=True)


def where_options_but_timeout(command: F) -> F:
    """The same for a verb that has its own ``--timeout``."""
    return _with_where(command, has_timeout=False)


def _with_where(command: F, *, has_timeout: bool) -> F:

    @wraps(command)
    def with_where(*args: Any, **named: Any) -> Any:
        given = {key: named.pop(key) for key in GIVEN}
        timeout_ms = named.pop("timeout_ms") if has_timeout else None
        where = where_of(given)
        if timeout_ms is not None:
            where = replace(where, timeout_s=timeout_ms / 1000)
        return command(*args, where=where, **named)

    decorated: Any = with_where
    decorated.__click_params__ = [*getattr(decorated, "__click_params__", []), verbose_option()]
    for name, (names, metavar, says) in reversed(WHERE_OPTIONS.items()):
        more: dict[str, Any] = {}
        if name == "timeout_ms":
            if not has_timeout:
                continue
            more["type"] = Length(0.001)
        if not metavar:
            more["is_flag"] = True
        if name == "context":
            more["shell_complete"] = complete_context
        decorated = click.option(*names, cls=WhereOption, metavar=metavar or None, help=says, **more)(decorated)
    return decorated  # type: ignore[no-any-return] # it takes what the command takes


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Completes topic names; none when the daemon does not answer at once."""
    try:
        where = where_of({key: ctx.params.get(key) for key in GIVEN})
        with where.client(deadline_s=1.0, request_timeout_s=1.0, connect_timeout_s=0.5) as client:
            return [name for name in client.topics() if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - any message would land in the middle of a command line
        return []


T = TypeVar("T")


def run_call(client: Client, call: Call[T]) -> T:
    """Sends a call that the client has no method for. Raises PlainsongError."""
    return client._channel.call(call)
