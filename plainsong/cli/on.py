"""The verb `on`: runs a command for each message of a topic, or posts the message."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from plainsong.cli.command import Verb, json_option
from plainsong.cli.connection import FILES, complete_topic, where_options_but_timeout
from plainsong.cli.on_options import (
    RetriesType,
    UnsavedPosition,
    check_unlike,
    derived_name,
    header_lines,
    kept_position,
    words_of,
)
from plainsong.cli.options import Length, Place, chosen, isolation_option, why_held
from plainsong.cli.output import report
from plainsong.positions import OLDEST
from plainsong.protocol.ids import before

if TYPE_CHECKING:
    from plainsong.cli.connection import Where
    from plainsong.positions import Start
    from plainsong.protocol.requests import Isolation
    from plainsong.react.reaction import Effect
    from plainsong.react.stopping import Stop

#: Time-outs of one attempt, without --timeout.
RUN_S = 300
POST_S = 30
#: Messages fetched at once: few, so that few expire before their turn.
PAGE_MESSAGES = 256


@dataclass(frozen=True, slots=True)
class EffectOptions:
    """The options that choose the effect."""

    command: str | None
    url: str | None
    shell: bool
    headers: tuple[str, ...]
    content_type: str
    retry_all: bool
    sign_with: str | None
    timeout_s: float | None
    prefix: bool
    dry_run: bool
    as_json: bool

    def check(self) -> None:
        """Raises click.UsageError when options contradict each other."""
        if (self.command is None) == (self.url is None):
            raise click.UsageError("give either --run CMD or --post URL")
        run_only = {"--shell": self.shell, "--prefix": self.prefix}
        post_only = {
            "--header": self.headers,
            "--content-type": self.content_type,
            "--retry-all": self.retry_all,
            "--sign-with": self.sign_with,
        }
        for wrong, needs in ((post_only, "--post"), (run_only, "--run")):
            given = [name for name, value in wrong.items() if value]
            if given and (self.command is None) == (needs == "--run"):
                raise click.UsageError(f"{given[0]} needs {needs}")


@click.command(
    cls=Verb,
    examples=[
        "plainsong on orders --run 'receipt --to sales'",
        "plainsong on orders --post https://example.com/hook --dead-letter orders-dead",
        "plainsong on orders --post https://example.com/hook --sign-with hook.secret",
        "plainsong on orders --shell --run 'jq .total >> totals' --position totals.at",
        "plainsong on orders --run cat --once --dry-run",
    ],
)
@click.argument("topic", shell_complete=complete_topic)
@click.option("--run", "command", metavar="CMD", help="Run CMD for each message; stdin is the payload.")
@click.option("--shell", is_flag=True, help="Run CMD by /bin/sh; default: without a shell.")
@click.option("--prefix", is_flag=True, help="Prefix each line of CMD's output with the message's id.")
@click.option("--post", "post_to", metavar="URL", help="POST each message to URL; the payload is the body.")
@click.option(
    "--content-type", default="", metavar="TYPE", help="Content type of posts; default: application/octet-stream."
)
@click.option("--header", "headers", multiple=True, metavar="LINE", help="'Name: value', or @FILE with such lines.")
@click.option("--retry-all", is_flag=True, help="Retry every status except 2xx, 4xx included.")
@click.option("--sign-with", metavar="FILE", help="Sign posts as Standard Webhooks do, with the secrets in FILE.")
@click.option(
    "--timeout",
    "timeout_ms",
    type=Length(0.001),
    metavar="TIME",
    help="Time-out of an attempt; default: run 5m, post 30s.",
)
@click.option(
    "--retries", type=RetriesType(), default="8", metavar="N", help="Retries per message, or `forever`; default: 8."
)
@click.option(
    "--pause",
    "pause_ms",
    type=Length(0.001),
    default="500ms",
    metavar="TIME",
    help="Pause before the first retry; doubles with each.",
)
@click.option(
    "--max-pause",
    "max_pause_ms",
    type=Length(0.001),
    default="1m",
    metavar="TIME",
    help="Longest pause before a retry.",
)
@click.option(
    "--dead-letter", metavar="TOPIC", shell_complete=complete_topic, help="Topic for messages that fail for good."
)
@isolation_option
@click.option("--committed", is_flag=True, hidden=True)  # the default, since it was an option
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Where to start the first time; default: oldest.")
@click.option("--position", metavar="WHERE", help="File for the position, or reader:NAME at the daemon.")
@click.option("--once", is_flag=True, help="Stop at the end of the topic.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Stop after N messages.")
@click.option(
    "--grace",
    "grace_ms",
    type=Length(0.001),
    default="30s",
    metavar="TIME",
    help="Time a running attempt gets at shutdown.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done; do nothing.")
@json_option
@where_options_but_timeout
def on(
    topic: str,
    command: str | None,
    shell: bool,
    prefix: bool,
    post_to: str | None,
    content_type: str,
    headers: tuple[str, ...],
    retry_all: bool,
    sign_with: str | None,
    timeout_ms: int | None,
    retries: int | None,
    pause_ms: int,
    max_pause_ms: int,
    dead_letter: str | None,
    isolation: Isolation | None,
    committed: bool,
    start: Start,
    position: str | None,
    once: bool,
    limit: int | None,
    grace_ms: int,
    dry_run: bool,
    as_json: bool,
    where: Where,
) -> None:
    """Run a command for each message, or POST it.

    Processes one message at a time, in order. The position is saved after each
    message, so a message interrupted in between is repeated with the same id:
    at least once, and none is skipped.

    Exit code 0 and status 2xx mean success. Exit code 65 and 4xx mean that this
    message will never succeed, and are not retried (401, 403, 407, 408, 421,
    425 and 429 are). A message that fails for good goes to --dead-letter;
    without that option the command ends, and starts with that message next
    time.

    On SIGTERM and Ctrl-C the current message may finish, within --grace.
    """
    timeout_s = None if timeout_ms is None else timeout_ms / 1000
    options = EffectOptions(
        command, post_to, shell, headers, content_type, retry_all, sign_with, timeout_s, prefix, dry_run, as_json
    )
    options.check()
    if dead_letter == topic:
        raise click.UsageError("--dead-letter cannot be the topic itself: its messages would be processed forever")
    derived = derived_name(command, post_to)
    keeper = kept_position(position, derived)
    from plainsong.cli.on_run import OnRun  # here, so that help and completion need no HTTP
    from plainsong.react.reaction import RetryPolicy
    from plainsong.react.stopping import Stop

    retry_policy = RetryPolicy(retries, pause_ms / 1000, max(max_pause_ms, pause_ms) / 1000)
    ends = once or dry_run
    with ExitStack() as stack:
        stop = Stop(grace_ms / 1000)
        stack.callback(stop.close)
        effect = _effect(stack, options, where, stop)
        stack.enter_context(keeper.alone())
        topics = [topic] if dead_letter is None else [topic, dead_letter]
        with where.client(*topics) as client:
            chosen(client.topics(), topics)  # following waits for daemons forever: report errors first
            if position is None and start is None:
                check_unlike(derived, client.admin.readers(topic))
        client = stack.enter_context(where.client(*topics, retry=True))
        stack.enter_context(stop.listening())
        run = OnRun(
            client,
            effect,
            stop,
            retry_policy,
            keeper,
            dead_letter=dead_letter,
            ends=ends,
            dry_run=dry_run,
            as_json=as_json,
        )
        reader = client.read(
            topic,
            OLDEST if start is None else before(start) if isinstance(start, bytes) else start,
            follow=not ends,
            limit=limit,
            position=UnsavedPosition(keeper.position) if dry_run else keeper.position,
            isolation=isolation or ("committed" if committed else None),
            page_messages=PAGE_MESSAGES,
            save_every=1,
        )
        run.run(topic, reader)
        if topic in reader.held:
            report(why_held(topic, reader.held[topic]))


def _effect(stack: ExitStack, options: EffectOptions, where: Where, stop: Stop) -> Effect:
    """Makes the effect; ``stack`` closes what it opens."""
    from plainsong.cli.on_run import DryRunEffect, output_for
    from plainsong.react.command import Runner
    from plainsong.react.post import Poster, checked_header
    from plainsong.react.signing import Signer

    if options.url is None:
        words = words_of(options.command or "", shell=options.shell)
        if options.dry_run:
            return DryRunEffect(words, None, as_json=options.as_json)
        output = output_for(prefix=options.prefix, as_json=options.as_json)
        timeout_s = options.timeout_s or RUN_S
        return Runner(words, _environ(where), where.namespace, timeout_s=timeout_s, stop=stop, output=output)
    from plainsong.transport.outward import Outward

    outward = Outward()
    poster = Poster(
        outward,
        options.url,
        where.namespace,
        content_type=checked_header(f"Content-Type: {options.content_type or 'application/octet-stream'}")[1],
        headers=[checked_header(line) for line in header_lines(options.headers)],
        timeout_s=options.timeout_s or POST_S,
        retry_all=options.retry_all,
        stop=stop,
        signer=None if options.sign_with is None else Signer(options.sign_with),
    )
    if options.dry_run:
        return DryRunEffect(None, options.url, as_json=options.as_json)
    stack.enter_context(outward)
    return poster


def _environ(where: Where) -> dict[str, str]:
    """The environment of commands, in which ``plainsong`` uses the same daemon."""
    environ = {**os.environ, "PLAINSONG_URL": ",".join(where.urls)}
    environ.pop("PLAINSONG_TOKEN_FILE", None)
    for name in FILES:
        if (file := getattr(where, name)) is not None:
            environ[f"PLAINSONG_{name.upper()}"] = os.path.abspath(file)
    return environ
