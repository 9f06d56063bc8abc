"""The verb `on`: runs a command for each message of a topic, or posts it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from plainsong.cli.on_options import (
    RetriesType,
    Untouched,
    check_unlike,
    derived_name,
    header_lines,
    kept_position,
    words_of,
)
from plainsong.cli.options import Length, Place, chosen, why_held
from plainsong.cli.output import note
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import complete_topic, where_options
from plainsong.positions import OLDEST
from plainsong.protocol.ids import before

if TYPE_CHECKING:
    from plainsong.cli.where import Where
    from plainsong.positions import Start
    from plainsong.react.reaction import Effect
    from plainsong.react.stopping import Stop

#: How long one attempt may take, unless --timeout says.
RUN_S = 300
POST_S = 30
#: Fetched at once. Few, so that those that expire meanwhile are few.
PAGE_MESSAGES = 256


@dataclass(frozen=True, slots=True)
class EffectOptions:
    """The options that say what is done about a message, and how."""

    command: str | None
    url: str | None
    shell: bool
    headers: tuple[str, ...]
    content_type: str
    retry_all: bool
    timeout_s: float | None
    prefix: bool
    dry_run: bool
    as_json: bool

    def check(self) -> None:
        """Raises click.UsageError where they contradict each other."""
        if (self.command is None) == (self.url is None):
            raise click.UsageError("say --run CMD or --post URL, one of them")
        run_only = {"--shell": self.shell, "--prefix": self.prefix}
        post_only = {"--header": self.headers, "--content-type": self.content_type, "--retry-all": self.retry_all}
        for wrong, needs in ((post_only, "--post"), (run_only, "--run")):
            given = [name for name, value in wrong.items() if value]
            if given and (self.command is None) == (needs == "--run"):
                raise click.UsageError(f"{given[0]} is for {needs}")


@click.command(
    cls=Verb,
    examples=[
        "plainsong on orders --run 'receipt --to sales'",
        "plainsong on orders --post https://example.com/hook --dead-letter orders-dead",
        "plainsong on orders --shell --run 'jq .total >> totals' --position totals.at",
        "plainsong on orders --run cat --once --dry-run",
    ],
)
@click.argument("topic", shell_complete=complete_topic)
@click.option("--run", "command", metavar="CMD", help="Run this for each; the payload is its standard input.")
@click.option("--shell", is_flag=True, help="CMD is for /bin/sh; without, for no shell.")
@click.option("--prefix", is_flag=True, help="Put the message's id before each line that CMD writes.")
@click.option("--post", "post_to", metavar="URL", help="Post each there; the payload is the body.")
@click.option("--content-type", default="", metavar="TYPE", help="Of posts; application/octet-stream.")
@click.option("--header", "headers", multiple=True, metavar="LINE", help="'Name: value', or @FILE with such lines.")
@click.option("--retry-all", is_flag=True, help="Retry whatever is not 2xx, also 4xx.")
@click.option("--timeout", "timeout_ms", type=Length(0.001), metavar="TIME", help="Of one attempt; run 5m, post 30s.")
@click.option("--retries", type=RetriesType(), default="8", metavar="N", help="Retries of a message: 8, or forever.")
@click.option("--pause", "pause_ms", type=Length(0.001), default="500ms", metavar="TIME", help="Before the first.")
@click.option("--max-pause", "max_pause_ms", type=Length(0.001), default="1m", metavar="TIME", help="Before any retry.")
@click.option("--dead-letter", metavar="TOPIC", shell_complete=complete_topic, help="For what fails for good.")
@click.option("--committed", is_flag=True, help="Only what is committed, in order.")
@click.option("--from", "start", type=Place(), metavar="PLACE", help="Where to begin the first time; oldest.")
@click.option("--position", metavar="WHERE", help="A file, or reader:NAME with the daemon (the default).")
@click.option("--once", is_flag=True, help="End when there is no more.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="End after N messages.")
@click.option(
    "--grace", "grace_ms", type=Length(0.001), default="30s", metavar="TIME", help="For what runs at the end."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done with what is there; do nothing.")
@json_option
@where_options
def on(
    topic: str,
    command: str | None,
    shell: bool,
    prefix: bool,
    post_to: str | None,
    content_type: str,
    headers: tuple[str, ...],
    retry_all: bool,
    timeout_ms: int | None,
    retries: int | None,
    pause_ms: int,
    max_pause_ms: int,
    dead_letter: str | None,
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
    """React to each message: run a command, or post it.

    One message at a time, in order, each tried until it is done; then the
    position is saved. What is killed in between is repeated: at least once,
    with the same id, and nothing is skipped.

    Exit code 0 and 2xx are done. Exit code 65 and 4xx say that the message
    is to blame, and are not retried (401, 403, 407, 408, 421, 425 and 429
    are). What fails for good goes to --dead-letter; without that it all ends,
    and the message stays the first one.

    SIGTERM and Ctrl-C let the message at hand come to its end, for --grace.
    """
    timeout_s = None if timeout_ms is None else timeout_ms / 1000
    asked = EffectOptions(
        command, post_to, shell, headers, content_type, retry_all, timeout_s, prefix, dry_run, as_json
    )
    asked.check()
    if dead_letter == topic:
        raise click.UsageError("--dead-letter is the topic itself: its messages would come again for ever")
    derived = derived_name(command, post_to)
    keeper = kept_position(position, derived)
    from plainsong.cli.on_run import Course  # here, so that help and completion need no HTTP
    from plainsong.react.reaction import Patience
    from plainsong.react.stopping import Stop

    patience = Patience(retries, pause_ms / 1000, max(max_pause_ms, pause_ms) / 1000)
    ends = once or dry_run
    with ExitStack() as stack:
        stop = Stop(grace_ms / 1000)
        stack.callback(stop.close)
        effect = _effect(stack, asked, where, stop)
        stack.enter_context(keeper.alone())
        topics = [topic] if dead_letter is None else [topic, dead_letter]
        with where.client(*topics) as client:
            chosen(client.topics(), topics)  # following waits for daemons for ever: what is wrong now is said first
            if position is None and start is None:
                check_unlike(derived, client.readers(topic))
        client = stack.enter_context(where.client(*topics, retry=True))
        stack.enter_context(stop.listening())
        course = Course(
            client,
            effect,
            stop,
            patience,
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
            position=Untouched(keeper.position) if dry_run else keeper.position,
            isolation="committed" if committed else None,
            page_messages=PAGE_MESSAGES,
            save_every=1,
        )
        course.run(topic, reader)
        if topic in reader.held:
            note(why_held(topic, reader.held[topic]))


def _effect(stack: ExitStack, asked: EffectOptions, where: Where, stop: Stop) -> Effect:
    """What is done about a message; ``stack`` closes what it needs."""
    from plainsong.cli.on_run import Pretended, output_for
    from plainsong.react.command import Runner
    from plainsong.react.post import Poster, checked_header

    if asked.url is None:
        words = words_of(asked.command or "", shell=asked.shell)
        if asked.dry_run:
            return Pretended(words, None, as_json=asked.as_json)
        output = output_for(prefix=asked.prefix, as_json=asked.as_json)
        timeout_s = asked.timeout_s or RUN_S
        return Runner(words, _environ(where), where.namespace, timeout_s=timeout_s, stop=stop, output=output)
    from plainsong.transport.outward import Outward

    outward = Outward()
    poster = Poster(
        outward,
        asked.url,
        where.namespace,
        content_type=checked_header(f"Content-Type: {asked.content_type or 'application/octet-stream'}")[1],
        headers=[checked_header(line) for line in header_lines(asked.headers)],
        timeout_s=asked.timeout_s or POST_S,
        retry_all=asked.retry_all,
        stop=stop,
    )
    if asked.dry_run:
        return Pretended(None, asked.url, as_json=asked.as_json)
    stack.enter_context(outward)
    return poster


def _environ(where: Where) -> dict[str, str]:
    """The environment of commands: ``plainsong`` in it speaks to the same daemon."""
    environ = {**os.environ, "PLAINSONG_URL": ",".join(where.urls)}
    environ.pop("PLAINSONG_TOKEN_FILE", None)
    if where.token_file is not None:
        environ["PLAINSONG_TOKEN_FILE"] = os.path.abspath(where.token_file)
    return environ
