"""The verbs `stats` and `top`: the numbers of topics, once or continuously."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click

from plainsong import calls
from plainsong.cli import output
from plainsong.cli.command import Verb, json_option, one_line
from plainsong.cli.connection import complete_topic, run_call, where_options
from plainsong.cli.options import Length, chosen, is_pattern, show_length, show_time
from plainsong.cli.output import echo_json
from plainsong.positions import now_ms
from plainsong.protocol.errors import PlainsongError, TopicNotFound
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.paging import pages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NotRequired

    from plainsong import Client
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.topics import TopicColumn, TopicPage, TopicStats

    class _Stats(TopicStats):
        """The figures of a topic, and the messages that committed readers see and do not see."""

        visible: NotRequired[int]
        hidden: int


HEADINGS = ("TOPIC", ">MESSAGES", ">SIZE", ">OLDEST", ">IN", ">OUT", ">WAITING", ">OPEN", ">HIDDEN")


@click.command(
    cls=Verb,
    examples=["plainsong stats", "plainsong stats orders", "plainsong stats 'orders-*' --json"],
)
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...", shell_complete=complete_topic)
@json_option
@where_options
def stats(topics: tuple[str, ...], as_json: bool, where: Where) -> None:
    """Show message counts, sizes, ages and rates.

    IN and OUT are messages published and polled per second over about the last
    minute; WAITING counts polls that wait for the next message; OPEN counts
    undecided transactions in the topic, and HIDDEN the messages that
    committed readers do not see because of them. A ~ marks an estimate. For a single
    topic it shows more, a line for each figure.
    """
    if len(topics) == 1 and not is_pattern(topics[0]):
        with where.client(*topics) as client:
            stats = client.admin.stats(topics[0], reader=FIRST_BOUND)
        committed = stats.pop("reader")
        found: _Stats = {**stats, "visible": committed["visible"], "hidden": committed["hidden"]}
        if as_json:
            echo_json({"topic": topics[0], **found})
        else:
            output.echo_lines(output.facts(_for_people(topics[0], found)))
        return
    with where.client(*topics) as client:
        rows = numbers(client, chosen(client.topics(), topics))
    if as_json:
        echo_json([{"topic": name, **found} for name, found in rows])
    else:
        output.echo_lines(output.table(HEADINGS, [row_of(name, found) for name, found in rows]))


def numbers(client: Client, names: Sequence[str]) -> list[tuple[str, _Stats]]:
    """Returns each topic's numbers; leaves out topics that were deleted in the meantime."""
    rows: list[tuple[str, _Stats]] = []
    for name in names:
        try:
            found = cast("_Stats", {**client.admin.stats(name), "hidden": 0})
            if found["openTransactions"]:  # without open transactions no message is hidden
                found["hidden"] = client.admin.stats(name, reader=FIRST_BOUND)["reader"]["hidden"]
            rows.append((name, found))
        except TopicNotFound:
            continue
    return rows


def row_of(name: str, found: _Stats) -> tuple[str, ...]:
    return (
        name,
        output.show_count(found["messages"], estimated=found["estimated"]),
        output.show_bytes(found["bytes"]),
        show_length(found["oldestAgeMs"]),
        output.show_rate(found["publishPerSecond"]),
        output.show_rate(found["pollPerSecond"]),
        output.show_count(found["parkedPolls"]),
        output.show_count(found["openTransactions"]),
        output.show_count(found["hidden"]),
    )


def _for_people(topic: str, found: _Stats) -> list[tuple[str, str]]:
    def moment(message_id: str | None) -> str:
        return "none" if message_id is None else f"{show_time(int(message_id[:16], 16))}  {message_id}"

    estimated = found["estimated"]
    age = "" if found["oldestAgeMs"] is None else f", {show_length(found['oldestAgeMs'])} ago"
    lines = [
        ("topic", topic),
        ("messages", output.show_count(found["messages"], estimated=estimated)),
        ("size", output.show_bytes(found["bytes"])),
        ("oldest", moment(found["oldestId"]) + age),
        ("newest", moment(found["newestId"])),
        ("published", output.show_rate(found["publishPerSecond"])),
        ("polled", output.show_rate(found["pollPerSecond"])),
        ("waiting", output.counted(found["parkedPolls"], "poll")),
        ("readable", f"{output.show_messages(found['visible'], estimated=estimated)} by committed readers"),
    ]
    if found["hidden"] or found["openTransactions"]:
        transactions = output.counted(found["openTransactions"], "undecided transaction")
        why = f"{output.show_messages(found['hidden'], estimated=estimated)} behind {transactions}"
        lines.append(("hidden", f"{why}: plainsong tx blame {topic}"))
    lines.append(("producers", output.show_count(found["producers"])))
    if found["owner"] is not None:
        lines.append(("owner", one_line(str(found["owner"]))))
    return [*lines, ("generation", str(found["generation"])), ("created", show_time(found["createdMs"]))]


# --- top -------------------------------------------------------------------------------------------


#: Maximum number of topics shown; each costs a request per refresh.
MAX_TOPICS = 200
#: The longest page of a list of topics.
MAX_PAGE = 500
#: Move to the upper left; clear the rest of the line; clear the rest of the screen.
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command(cls=Verb, examples=["plainsong top", "plainsong top 'orders-*' --every 5s", "plainsong top --once"])
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...", shell_complete=complete_topic)
@click.option("--every", "every_s", type=Length(), default="2s", show_default=True, metavar="TIME", help="Interval.")
@click.option("--once", is_flag=True, help="Print once and stop.")
@json_option
@where_options
def top(topics: tuple[str, ...], every_s: int, once: bool, as_json: bool, where: Where) -> None:
    """Watch topics live.

    Shows the busiest first, until q or Ctrl-C. `plainsong stats --help` explains the
    columns. With --json, prints one object each time.
    """
    live = sys.stdout.isatty() and not (once or as_json)
    with where.client(*topics) as client, Keys(wanted=live) as keys:
        while True:
            try:
                rows, more = _look(client, topics)
                complaint = ""
            except PlainsongError as error:
                if not live:
                    raise
                rows, more, complaint = [], 0, one_line(error.detail)
            if as_json:
                echo_json({"timeMs": now_ms(), "topics": [{"topic": name, **found} for name, found in rows]})
            else:
                _show(_lines(where, rows, more, complaint, live=live), live=live)
            if once or keys.is_quit(every_s):
                return


class Keys:
    """The keys of a terminal while `top` shows its screen; ``q`` ends it. Without a terminal it only waits.

    Args:
      wanted: whether to read keys, if standard input is a terminal.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted and sys.stdin.isatty()
        self._before: Any = None

    def __enter__(self) -> Keys:
        if self._wanted:
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)  # a key arrives without Return; Ctrl-C still interrupts
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def is_quit(self, wait_s: float) -> bool:
        """Waits; returns True if ``q`` was pressed."""
        if not self._wanted:
            time.sleep(wait_s)
            return False
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left_s)[0]:
                keys = os.read(sys.stdin.fileno(), 1024)
                if not keys:  # the terminal is gone
                    return True
                if b"q" in keys or b"Q" in keys:
                    return True
        return False


def _look(client: Client, topics: tuple[str, ...]) -> tuple[list[tuple[str, _Stats]], int]:
    """Returns the topics' numbers, busiest first, and how many more topics there are."""
    there = client.topics()
    wanted = [each for each in topics if not is_pattern(each) or there]
    names = chosen(there, wanted) if there or wanted else []
    more = len(names) - MAX_TOPICS
    if more > 0:
        names = _busiest(client, set(names))
    rows = numbers(client, names)
    rows.sort(key=lambda row: (-row[1]["publishPerSecond"] - row[1]["pollPerSecond"], -row[1]["bytes"], row[0]))
    return rows, max(0, more)


def _page(client: Client, query: dict[str, Any], after: str | None) -> TopicPage:
    return run_call(client, calls.topics_page({**query, "after": after}))


def _busiest(client: Client, names: set[str]) -> list[str]:
    """Returns those of many topics that are worth a request: the daemon has the figures of all, and sorts them."""
    found: dict[str, float] = {}
    columns: tuple[TopicColumn, ...] = ("publishPerSecond", "pollPerSecond")
    for column in columns:
        query = {"namespace": client.namespace, "sort": column, "order": "desc", "limit": MAX_PAGE}
        count = 0
        for page in pages(partial(_page, client, query)):
            for each in page["topics"]:
                if each["name"] in names:
                    count += 1
                    found[each["name"]] = each["publishPerSecond"] + each["pollPerSecond"]
            if count >= MAX_TOPICS:
                break
    return sorted(found, key=lambda name: (-found[name], name))[:MAX_TOPICS]


def _lines(where: Where, rows: list[tuple[str, _Stats]], more: int, complaint: str, *, live: bool) -> list[str]:
    into = sum(found["publishPerSecond"] for _, found in rows)
    out = sum(found["pollPerSecond"] for _, found in rows)
    summary = f"{output.counted(len(rows), 'topic')}, {output.show_bytes(sum(found['bytes'] for _, found in rows))}"
    head = [f"plainsong  {where.urls[0]}  {where.namespace}  {show_time(now_ms())}"]
    head += [f"{summary}, in {output.show_rate(into)}, out {output.show_rate(out)}", ""]
    if complaint:
        return [head[0], output.cut(f"no answer: {complaint}", output.width())]
    room = shutil.get_terminal_size((80, 24)).lines - len(head) - 3 if live else len(rows)
    lines = head + output.table(HEADINGS, [row_of(name, found) for name, found in rows[: max(1, room)]])
    hidden = more + len(rows) - max(1, room)
    return lines + ([f"and {hidden} more"] if hidden > 0 and rows else [])


def _show(lines: list[str], *, live: bool) -> None:
    if not live:
        output.echo_lines(lines)
        return
    whole = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
    click.echo(f"{_HOME}{whole}{_CLEAR_REST}", nl=False, color=True)
