"""``plainsong tx pruning`` and ``recover``: the list of invalid transactions, and what a crash left in a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import tables, tx_words
from plainsong.cli.exits import CommandFailed
from plainsong.cli.say import echo_json, note
from plainsong.cli.times import now_ms, show_length, show_time
from plainsong.cli.verb import Verb, json_option, one_line
from plainsong.cli.where import where_options
from protocol.transactions.transaction import issued_ms

if TYPE_CHECKING:
    from plainsong.cli.where import Where
    from plainsong.sql import Recovery

_POINTERS = ("oldestInvalid", "safeBound")


@click.command(cls=Verb, examples=["plainsong tx pruning", "plainsong tx pruning --json"])
@json_option
@where_options
def pruning(as_json: bool, where: Where) -> None:
    """Explain the list of invalid transactions: what may leave it, and when.

    Readers skip what is on the list. The daemon rolls those messages back as
    it cleans; a pointer may leave the list when none of its messages is left
    and none can come any more. Nobody has to do anything, unless this says so.
    """
    with where.client() as client:
        figures = dict(client.transactions.pruning().figures)
    if as_json:
        echo_json(_as_json(figures))
    else:
        tables.echo_lines(_explained(figures))


def _as_json(figures: dict[str, Any]) -> dict[str, Any]:
    """The daemon's figures, with pointers as strings."""
    for name in _POINTERS:
        figures[name] = None if figures[name] is None else str(figures[name])
    figures["oldestByTopic"] = [
        {**each, "oldestPointer": str(each["oldestPointer"])} for each in figures["oldestByTopic"]
    ]
    return figures


def _explained(figures: dict[str, Any]) -> list[str]:
    now = now_ms()
    invalid, safe, last = figures["invalid"], figures["safeBound"], figures["lastPassMs"]
    lifetime_ms, kept_because = figures["maxLifetimeMs"], figures["keptBecause"]
    oldest = "" if figures["oldestInvalid"] is None else f", the oldest {_pointer(figures['oldestInvalid'], now)}"
    by_itself = f"no: {kept_because}" if kept_because else "yes, after each complete pass"
    pairs = [
        ("invalid", f"{tables.show_count(invalid)} pointers{oldest}"),
        ("last complete pass", "none yet" if last is None else f"{show_length(max(0, now - last))} ago"),
        (
            "safe bound",
            "none yet" if safe is None else f"{_pointer(safe, now)}: up to it nothing this service began is undecided",
        ),
        ("longest life", show_length(lifetime_ms) if lifetime_ms else "without end (transactions.max_lifetime_s = 0)"),
        ("pruned by itself", by_itself),
    ]
    lines = tables.facts(pairs)
    if figures["oldestByTopic"]:
        rows = [
            (
                each["topic"],
                str(each["oldestPointer"]),
                show_length(max(0, now - issued_ms(int(each["oldestPointer"])))),
            )
            for each in figures["oldestByTopic"]
        ]
        lines += ["", *tables.table(("TOPIC", "OLDEST POINTER", ">AGE"), rows)]
        if (left_out := figures["topics"] - len(rows)) > 0:
            lines.append(f"and {left_out} topics more")
    if kept_because and invalid:
        lines += ["", *_by_hand(safe)]
    return lines


def _by_hand(safe: int | None) -> list[str]:
    """How to prune, for those who must."""
    if safe is None:
        return ["Wait for a complete pass of the cleaning before you prune by hand."]
    return [
        "By hand, when no other store relies on the list, and no client still writes with a pointer that old:",
        f"  plainsong tx truncate --before {show_time(issued_ms(int(safe)))}",
    ]


def _pointer(pointer: int | str, now: int) -> str:
    return f"{pointer} ({show_length(max(0, now - issued_ms(int(pointer))))} ago)"


@click.command(cls=Verb, examples=["plainsong tx recover --database postgresql://shop@db.example/shop"])
@click.option("--database", required=True, metavar="URL", help="Of PostgreSQL; PGPASSWORD and ~/.pgpass work.")
@json_option
@where_options
def recover(database: str, as_json: bool, where: Where) -> None:
    """Finish what crashed programs left prepared in a PostgreSQL database.

    For programs that publish together with SQL (plainsong.sql). The daemon is
    asked about each: committed ones are committed, aborted and invalid ones
    rolled back, those in progress left alone. Of what the daemon does not know
    nothing is guessed: it is left, and the command ends with 1.
    """
    try:
        from plainsong import sql  # here, since it is an extra of the package
    except ModuleNotFoundError as missing:
        raise CommandFailed(str(missing).partition(":")[0], hint="pip install 'plainsong[sql]'") from missing
    with where.client() as client:
        found = sql.recover(database, client)
    if as_json:
        echo_json([_found_json(each) for each in found.found])
    else:
        tables.echo_lines(_found_lines(found))
    if found.unsure:
        left = (
            "1 prepared transaction is" if len(found.unsure) == 1 else f"{len(found.unsure)} prepared transactions are"
        )
        advice = "" if as_json else "what to do stands above"
        raise CommandFailed(f"{left} left for a person to decide", hint=advice)


def _found_lines(found: Recovery) -> list[str]:
    if not found.found:
        note("nothing is prepared there")
        return []
    rows = [
        (str(each.transaction_id), tx_words.shown_state(each.state), _done(each.action), show_length(each.age_s * 1000))
        for each in found.found
    ]
    lines = tables.table(("TRANSACTION", "STATE", "DONE", ">PREPARED AGO"), rows)
    return lines + [f"{each.transaction_id}: {one_line(each.advice)}" for each in found.unsure]


def _done(action: str) -> str:
    return {"rolled_back": "rolled back", "gone": "somebody else did"}.get(action, action)


def _found_json(each: Any) -> dict[str, Any]:
    return {
        "transaction": str(each.transaction_id),
        "gid": each.gid,
        "state": each.state,
        "action": each.action,
        "ageS": round(each.age_s, 3),
        "advice": each.advice,
    }
