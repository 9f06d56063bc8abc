"""The verb `events`: prints changes of the service as they happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import click

from plainsong.cli import output
from plainsong.cli.command import Exit, Verb, json_option, one_line
from plainsong.cli.connection import complete_topic, where_options
from plainsong.cli.options import show_time
from plainsong.cli.output import echo_json, note
from plainsong.positions import now_ms
from plainsong.protocol.answers.service import EVENT_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.service import EventKind

#: The maximum number of open transactions that one event names.
MAX_OPEN = 100


@click.command(
    cls=Verb,
    examples=["plainsong events", "plainsong events orders shop:returns", "plainsong events --kind attention --json"],
)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...", shell_complete=complete_topic)
@click.option(
    "--kind", "kinds", type=click.Choice(EVENT_KINDS), multiple=True, help="Only these events; may be repeated."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N events.")
@json_option
@where_options
def events(topics: tuple[str, ...], kinds: tuple[str, ...], limit: int | None, as_json: bool, where: Where) -> None:
    """Follow changes as they happen.

    Prints what needs attention, the open transactions and the state of the
    cluster, then every change to them; also the figures of each TOPIC given
    (NAMESPACE:TOPIC names one of another namespace). Runs until Ctrl-C, also
    across restarts of the daemon. With --json, prints one object per event,
    with all its details.
    """
    if "topics" in kinds and not topics:
        raise click.UsageError("--kind topics needs the names of topics")
    with where.client(*topics) as client:
        client.admin.attention()  # following retries forever, so report a daemon that cannot be reached at the start
    changes = Changes()
    count = 0
    with (
        where.client(*topics, retry=True) as client,
        client.admin.events(*topics, kinds=cast("tuple[EventKind, ...]", kinds)) as found,
    ):
        note("following the service; Ctrl-C stops")
        reader = output.Reader()
        with reader.watched(found.stop):
            for event in found:
                if as_json:
                    echo_json({"timeMs": now_ms(), "event": event.kind, "data": event.data})
                else:
                    at, lines = show_time(now_ms()), changes.lines(event.kind, event.data)
                    output.echo_lines([f"{at}  {event.kind:<12}  {line}" for line in lines])
                count += 1
                if count == limit:
                    return
        if reader.has_left:
            raise click.exceptions.Exit(Exit.FAILED)


class Changes:
    """Formats the differences between an event and the last one of the same kind as lines."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, str]] = {}
        self._facts: dict[str, Callable[[Any], dict[str, str]]] = {
            "topics": _topics,
            "transactions": _transactions,
            "attention": _attention,
            "cluster": _cluster,
        }

    def lines(self, kind: str, data: Any) -> Iterator[str]:
        """Yield the current state for the first event of a kind, and after that what was added, changed or removed."""
        facts = self._facts.get(kind)
        if facts is None:  # a kind from a later version of the daemon
            yield one_line(str(data))
            return
        before, now = self._before.get(kind), facts(data)
        self._before[kind] = now
        yield from (f"{name}  {text}" for name, text in now.items() if before is None or before.get(name) != text)
        if before is None:
            if not now:
                yield _NOTHING[kind]
            return
        yield from (f"{name}  gone" for name in before if name not in now)


_NOTHING = {
    "topics": "no such topic",
    "transactions": "no open transactions",
    "attention": "nothing needs attention",
    "cluster": "no instances",
}


def _topics(rows: list[Mapping[str, Any]]) -> dict[str, str]:
    return {
        one_line(f"{each['namespace']}:{each['name']}"): ", ".join(
            [
                output.show_messages(each["messages"], estimated=each["estimated"]),
                output.show_bytes(each["bytes"]),
                f"in {output.show_rate(each['publishPerSecond'])}",
                f"out {output.show_rate(each['pollPerSecond'])}",
                f"{output.show_count(each['hiddenMessages'])} hidden",
            ]
        )
        for each in rows
    }


def _transactions(found: Mapping[str, Any]) -> dict[str, str]:
    if found["total"] > MAX_OPEN:  # the event names only some of them, so their changes would mean little
        return {"all": f"{output.show_count(found['total'])} open transactions"}
    return {
        str(each["id"]): one_line(
            f"open since {show_time(each['startedMs'])}"
            + (f", of {each['clientId']}" if each["clientId"] else "")
            + (f", hides {output.show_messages(each['hiddenMessages'])}" if each["hiddenMessages"] else "")
        )
        for each in found["open"]
    }


def _attention(found: list[Mapping[str, Any]]) -> dict[str, str]:
    return {
        one_line(f"{each['kind']} {each['subject']}".rstrip()): one_line(f"{each['severity']}: {each['text']}")
        for each in found
    }


def _cluster(found: Mapping[str, Any]) -> dict[str, str]:
    shown = {}
    for each in found["instances"]:
        states = [word for word in ("leaving", "drained") if each[word]] or ["available"]
        shown[one_line(each["name"])] = f"{', '.join(states)}, {output.counted(each['topicsOpen'], 'open topic')}"
    return shown
