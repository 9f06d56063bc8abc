"""``plainsong tx abort``, ``invalidate`` and ``truncate``: ending transactions that do not end by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong.cli import tx_words
from plainsong.cli.say import confirmed, echo_json, harmless
from plainsong.cli.times import Place, now_ms, show_length, show_time
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import where_options

if TYPE_CHECKING:
    from plainsong import TransactionStatus
    from plainsong.cli.where import Where

_ENDS = {
    "aborted": "aborted: its messages are rolled back",
    "invalid": "invalid: no committed reader will see its messages, which the daemon rolls back as it cleans",
}


@click.command(cls=Verb, examples=["plainsong tx abort 1769860800000000000 --yes"])
@click.argument("transaction", type=tx_words.TransactionId(), metavar="ID")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@where_options
def abort(transaction: int, yes: bool, as_json: bool, where: Where) -> None:
    """Abort a transaction: roll its messages back, then let readers go on.

    Its client is told so when it tries to commit. When not all its topics can
    be reached in time, and of long transactions always, the answer is
    `invalid`, which readers cannot tell from it.
    """
    with where.client() as client:
        _ask(client.transactions.get(transaction), "Abort", yes=yes)
        _tell(transaction, client.transactions.abort(transaction), as_json=as_json)


@click.command(cls=Verb, examples=["plainsong tx invalidate 1769860800000000000 --yes"])
@click.argument("transaction", type=tx_words.TransactionId(), metavar="ID")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@where_options
def invalidate(transaction: int, yes: bool, as_json: bool, where: Where) -> None:
    """Hide a transaction's messages for ever, at once, without touching them.

    Quicker than `abort`, which is better: the messages are rolled back later,
    as the daemon cleans, and until then the list of invalid ones has it.
    """
    with where.client() as client:
        _ask(client.transactions.get(transaction), "Invalidate", yes=yes)
        _tell(transaction, client.transactions.invalidate(transaction), as_json=as_json)


@click.command(
    cls=Verb,
    examples=[
        "plainsong tx truncate 1769860800000000000",
        "plainsong tx truncate --before 2026-01-31T12:00Z --yes",
    ],
)
@click.argument("transactions", nargs=-1, type=tx_words.TransactionId(), metavar="[ID]...")
@click.option("--before", type=Place(now="this computer's"), metavar="TIME", help="All that began before this.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@where_options
def truncate(
    transactions: tuple[int, ...], before: str | bytes | int | None, yes: bool, as_json: bool, where: Where
) -> None:
    """Take transactions off the list of invalid ones.

    By id, or all that began before a time. `plainsong tx pruning` says which
    may go; the daemon rolls back first what is left of them.
    """
    if bool(transactions) == (before is not None):
        raise click.UsageError("give ids, or --before")
    if before is not None and not isinstance(before, int):
        raise click.UsageError("--before takes a time, such as -7d or 2026-01-31T12:00Z")
    what = f"all before {show_time(before)}" if before is not None else f"{len(transactions)}"
    confirmed(f"Take {what} off the list of invalid transactions?", yes=yes)
    with where.client() as client:
        if before is None:
            removed = client.transactions.truncate(ids=transactions)
        else:
            removed = client.transactions.truncate(before_ms=before)
    if as_json:
        echo_json({"removed": removed})
    else:
        click.echo(f"took {removed} off the list")


def _ask(status: TransactionStatus, verb: str, *, yes: bool) -> None:
    """Whether it is meant; one that the daemon does not know is for the daemon to refuse."""
    if status.state == "in_progress":
        age = show_length(max(0, now_ms() - status.issued_ms))
        confirmed(f"{verb} {status.id} of client {harmless(status.client_id or '-')}, {age} old?", yes=yes)


def _tell(transaction: int, state: str, *, as_json: bool) -> None:
    if as_json:
        echo_json({"id": str(transaction), "state": state})
    else:
        click.echo(f"{transaction} is {_ENDS.get(state, tx_words.shown_state(state))}")
