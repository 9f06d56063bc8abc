"""``plainsong tx ls``, ``show`` and ``blame``: which transactions there are, and which one a topic waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import tables, tx_words
from plainsong.cli.say import echo_json, note
from plainsong.cli.times import now_ms, show_length
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import complete_topic, where_options
from plainsong.core import calls

if TYPE_CHECKING:
    from plainsong import Client, TransactionStatus
    from plainsong.cli.where import Where
    from plainsong.messages import Held

#: Shown unless somebody wants more. The daemon gives so many at once, at most.
DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000


@click.command(name="ls", cls=Verb, examples=["plainsong tx ls", "plainsong tx ls --state invalid --json"])
@click.option("--state", type=click.Choice(tx_words.STATES), help="Only those; in progress and invalid by default.")
@click.option("--limit", type=click.IntRange(1, MAX_LIMIT), default=DEFAULT_LIMIT, show_default=True, metavar="N")
@json_option
@where_options
def list_transactions(state: str | None, limit: int, as_json: bool, where: Where) -> None:
    """List transactions, the oldest first: in progress and invalid ones.

    LEFT is the time until the time-out. TOPICS counts those with messages that
    wait for the decision, HIDDEN the messages that committed readers of one of
    them do not get because of it.
    """
    with where.client() as client:
        found = client.transactions.list(state=state, limit=limit)  # type: ignore[arg-type] # checked by click
    if as_json:
        echo_json([tx_words.as_json(each) for each in found])
        return
    if not found:
        note("there are none")
    now = now_ms()
    tables.echo_lines(tables.table(tx_words.HEADINGS, [tx_words.row_of(each, now) for each in found]))
    if len(found) == limit < MAX_LIMIT:
        note(f"there may be more: --limit {MAX_LIMIT}")


@click.command(cls=Verb, examples=["plainsong tx show 1769860800000000000"])
@click.argument("transaction", type=tx_words.TransactionId(), metavar="ID")
@json_option
@where_options
def show(transaction: int, as_json: bool, where: Where) -> None:
    """Show one transaction, also when it has been decided.

    `unknown` is an answer too: this daemon never began it, or has forgotten.
    """
    with where.client() as client:
        status = client.transactions.get(transaction)
    if as_json:
        echo_json(tx_words.as_json(status))
    else:
        tables.echo_lines(tables.facts(tx_words.facts_of(status)))


@click.command(cls=Verb, examples=["plainsong tx blame orders", "plainsong tx blame orders --json"])
@click.argument("topic", shell_complete=complete_topic)
@json_option
@where_options
def blame(topic: str, as_json: bool, where: Where) -> None:
    """Say who holds a topic up: client, age, time-out, hidden messages.

    A committed reader stops at the first message of an undecided transaction.
    This looks where that is, and whose it is.
    """
    with where.client(topic) as client:
        held = _held(client, topic)
        full_name = f"{client.namespace}:{topic}"
        others = [each for each in client.transactions.list(limit=MAX_LIMIT) if full_name in each.topics]
        holder = None if held is None else _holder(client, held, others)
    others = [each for each in others if each.state == "in_progress" and (holder is None or each.id != holder.id)]
    if as_json:
        echo_json(_as_json(topic, held, holder, others))
    else:
        tables.echo_lines(_lines(topic, held, holder, others))


def _held(client: Client, topic: str) -> Held | None:
    """Who holds up a committed reader of the whole topic."""
    call = calls.topic_offsets(client.namespace, topic, {"isolation": "committed"})
    end = client._shell.run(client._operations.call(call))["end"]
    return client.poll(topic, end, inclusive=True, limit=1, isolation="committed").held


def _holder(client: Client, held: Held, on_topic: list[TransactionStatus]) -> TransactionStatus | None:
    """The transaction whose pointer it is; None: this daemon's service never began it."""
    for each in on_topic:
        if held.write_pointer in (each.id, each.write_pointer):
            return each
    status = client.transactions.get(held.write_pointer)
    return None if status.state == "unknown" else status


def _lines(
    topic: str, held: Held | None, holder: TransactionStatus | None, others: list[TransactionStatus]
) -> list[str]:
    if held is None:
        lines = [f"nobody holds {topic} up"]
    else:
        more = "+" if held.hidden_more else ""
        since = "" if held.since_ms is None else f" since {show_length(max(0, now_ms() - held.since_ms))}"
        hidden = f"{tables.show_count(held.hidden_messages)}{more} messages hidden"
        lines = [f"{topic} is held up by transaction {held.write_pointer}{since}, {hidden}"]
        lines += _what_it_is(held, holder)
    if others:
        now = now_ms()
        lines += ["", "also in progress there:"]
        lines += tables.table(tx_words.HEADINGS, [tx_words.row_of(each, now) for each in others])
    return lines


def _what_it_is(held: Held, holder: TransactionStatus | None) -> list[str]:
    if holder is None:
        return [
            "  This daemon did not begin it: it is of a transaction service elsewhere, or of a program without one.",
            "  Committed readers wait until its messages are rolled back or expire.",
        ]
    facts = [pair for pair in tx_words.facts_of(holder) if pair[0] != "hides"]
    advice = f"  to end it: plainsong tx abort {holder.id}"
    return [f"  {line}" for line in tables.facts(facts)] + ([advice] if holder.state == "in_progress" else [])


def _as_json(
    topic: str, held: Held | None, holder: TransactionStatus | None, others: list[TransactionStatus]
) -> dict[str, Any]:
    return {
        "topic": topic,
        "heldBy": None if held is None else str(held.write_pointer),
        "heldSinceMs": None if held is None else held.since_ms,
        "hiddenMessages": 0 if held is None else held.hidden_messages,
        "hiddenMore": held is not None and held.hidden_more,
        "transaction": None if holder is None else tx_words.as_json(holder),
        "others": [tx_words.as_json(each) for each in others],
    }
