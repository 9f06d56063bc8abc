"""The verb `tx`: lists transactions, finds which one a topic waits for, ends them, and recovers a database after a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong import calls
from plainsong import transactions as service
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Verb, VerbGroup, json_option, one_line
from plainsong.cli.connection import complete_topic, run_call, where_options
from plainsong.cli.dry_run import dry_run_option, effect_lines, show_dry_run
from plainsong.cli.options import Place, show_length, show_time
from plainsong.cli.output import confirmed, echo_json, escaped, note, report
from plainsong.positions import now_ms
from plainsong.protocol.paging import pages
from plainsong.protocol.transactions.transaction import STATES, issued_ms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plainsong import Client, TransactionStatus
    from plainsong.calls import Call
    from plainsong.cli.connection import Where
    from plainsong.protocol.page import Held
    from plainsong.sql import Recovery

HEADINGS = ("CLIENT", "ID", "STATE", "TYPE", ">AGE", ">LEFT", ">TOPICS", ">HIDDEN")
MAX_ID = (1 << 63) - 1


class TransactionId(click.ParamType[int]):
    name = "id"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ID)) and 0 < int(text) <= MAX_ID):
            self.fail(f"invalid transaction id {text[:40]!r}; `plainsong tx ls` lists transactions", param, ctx)
        return int(text)


def transaction_json(status: TransactionStatus) -> dict[str, Any]:
    """JSON with the names of the HTTP interface."""
    return {
        "id": str(status.id),
        "writePointer": str(status.write_pointer),
        "type": status.type,
        "clientId": status.client_id,
        "state": status.state,
        "startedMs": status.started_ms,
        "expiresMs": status.expires_ms,
        "decidedMs": status.decided_ms,
        "topics": list(status.topics),
        "hiddenMessages": status.hidden_messages,
        "keptUntilMs": status.kept_until_ms,
        "name": status.name,
    }


def row_of(status: TransactionStatus, now: int) -> tuple[str, ...]:
    return (
        escaped(status.client_id or "-"),
        str(status.id),
        shown_state(status.state),
        status.type or "-",
        show_length(max(0, now - status.issued_ms)),
        show_length(left_ms(status, now)),
        str(len(status.topics)),
        output.show_count(status.hidden_messages),
    )


def facts_of(status: TransactionStatus) -> list[tuple[str, str]]:
    now = now_ms()
    pairs = [("transaction", str(status.id)), ("state", shown_state(status.state))]
    if status.state == "unknown":
        return [*pairs, ("", "this daemon did not begin it, or no longer remembers its outcome")]
    if status.write_pointer != status.id:
        pairs.append(("write pointer", f"{status.write_pointer}, since its last checkpoint"))
    begun = f"{show_time(status.issued_ms)}, {show_length(max(0, now - status.issued_ms))} ago"
    pairs += [("type", status.type or "-"), ("client", escaped(status.client_id or "-")), ("begun", begun)]
    if status.name is not None:
        pairs.append(("begun by", escaped(status.name)))
    left = left_ms(status, now)
    if left is not None:
        pairs.append(("times out", f"in {show_length(left)}, and becomes invalid"))
    if status.kept_until_ms is not None:
        pairs.append(("remembered", f"for at least {show_length(max(0, status.kept_until_ms - now))}"))
    pairs.append(("topics", ", ".join(status.topics) or "none with messages waiting for it"))
    if status.hidden_messages:
        pairs.append(("hides", f"{output.show_messages(status.hidden_messages)} from committed readers"))
    return pairs


def left_ms(status: TransactionStatus, now: int) -> int | None:
    """Milliseconds until its time-out; None if it is not in progress."""
    if status.state != "in_progress" or status.expires_ms is None:
        return None
    return max(0, status.expires_ms - now)


def shown_state(state: str) -> str:
    return state.replace("_", " ")


# --- ls, show, blame -------------------------------------------------------------------------------


DEFAULT_LIMIT = 100
#: The maximum that the daemon returns at once.
MAX_LIMIT = 1_000


@click.command(name="ls", cls=Verb, examples=["plainsong tx ls", "plainsong tx ls --state invalid --json"])
@click.option("--state", type=click.Choice(STATES), help="Only this state; default: in progress and invalid.")
@click.option("--after", type=TransactionId(), metavar="ID", help="Continue after this transaction.")
@click.option("--limit", type=click.IntRange(1, MAX_LIMIT), default=DEFAULT_LIMIT, show_default=True, metavar="N")
@json_option
@where_options
def list_transactions(state: str | None, after: int | None, limit: int, as_json: bool, where: Where) -> None:
    """List transactions in progress and invalid ones, oldest first.

    LEFT is the time until the time-out. TOPICS counts topics with messages that
    wait for the decision, HIDDEN the messages in them that committed readers do
    not get because of it.
    """
    with where.client() as client:
        found = client.transactions.list(state=state, limit=limit, after=after)  # type: ignore[arg-type] # checked by click
    if as_json:
        echo_json([transaction_json(each) for each in found])
        return
    if not found:
        note("no transactions")
    now = now_ms()
    output.echo_lines(output.table(HEADINGS, [row_of(each, now) for each in found]))
    if len(found) == limit:
        report(f"there may be more: --after {found[-1].id}")


@click.command(cls=Verb, examples=["plainsong tx show 1769860800000000000"])
@click.argument("transaction", type=TransactionId(), metavar="ID")
@json_option
@where_options
def show(transaction: int, as_json: bool, where: Where) -> None:
    """Show one transaction, decided or not.

    `unknown` means that this daemon did not begin it, or no longer remembers it.
    """
    with where.client() as client:
        status = client.transactions.get(transaction)
    if as_json:
        echo_json(transaction_json(status))
    else:
        output.echo_lines(output.facts(facts_of(status)))


@click.command(cls=Verb, examples=["plainsong tx blame orders", "plainsong tx blame orders --json"])
@click.argument("topic", shell_complete=complete_topic)
@json_option
@where_options
def blame(topic: str, as_json: bool, where: Where) -> None:
    """Show the transaction that holds readers of a topic.

    A committed reader stops at the first message of an undecided transaction.
    Shows that transaction: its client, age and time-out, and how many messages
    it hides.
    """
    with where.client(topic) as client:
        held = _held(client, topic)
        full_name = f"{client.namespace}:{topic}"
        others = [each for each in _all(client) if full_name in each.topics]
        holder = None if held is None else _holder(client, held, others)
    others = [each for each in others if each.state == "in_progress" and (holder is None or each.id != holder.id)]
    if as_json:
        echo_json(_blame_json(topic, held, holder, others))
    else:
        output.echo_lines(_lines(topic, held, holder, others))


def _all(client: Client) -> Iterator[TransactionStatus]:
    """All transactions in progress and invalid ones."""

    def page(after: int | None) -> dict[str, Any]:
        found = client.transactions.list(limit=MAX_LIMIT, after=after)
        return {"transactions": found, "next": found[-1].id if len(found) == MAX_LIMIT else None}

    for each in pages(page):
        yield from each["transactions"]


def _held(client: Client, topic: str) -> Held | None:
    """Return the transaction that blocks a committed reader of the whole topic."""
    call = calls.topic_offsets(client.namespace, topic, {"isolation": "committed"})
    end = client._channel.call(call)["end"]
    return client.poll(topic, end, inclusive=True, limit=1, isolation="committed").held


def _holder(client: Client, held: Held, on_topic: list[TransactionStatus]) -> TransactionStatus | None:
    """The transaction of the write pointer; None: this daemon's service did not begin it."""
    for each in on_topic:
        if held.write_pointer in (each.id, each.write_pointer):
            return each
    status = client.transactions.get(held.write_pointer)
    return None if status.state == "unknown" else status


def _lines(
    topic: str, held: Held | None, holder: TransactionStatus | None, others: list[TransactionStatus]
) -> list[str]:
    if held is None:
        lines = [f"no transaction holds readers of {topic}"]
    else:
        since = "" if held.since_ms is None else f" since {show_length(max(0, now_ms() - held.since_ms))}"
        hidden = f"{output.show_messages(held.hidden_messages, more=held.hidden_more)} hidden"
        lines = [f"readers of {topic} are held by transaction {held.write_pointer}{since}, {hidden}"]
        lines += _what_it_is(held, holder)
    if others:
        now = now_ms()
        lines += ["", "also in progress in this topic:"]
        lines += output.table(HEADINGS, [row_of(each, now) for each in others])
    return lines


def _what_it_is(held: Held, holder: TransactionStatus | None) -> list[str]:
    if holder is None:
        return [
            "  This daemon did not begin it: another transaction service did, or a program without one.",
            "  Committed readers wait until its messages are rolled back or expire.",
        ]
    facts = [pair for pair in facts_of(holder) if pair[0] != "hides"]
    advice = f"  to end it: plainsong tx abort {holder.id}"
    return [f"  {line}" for line in output.facts(facts)] + ([advice] if holder.state == "in_progress" else [])


def _blame_json(
    topic: str, held: Held | None, holder: TransactionStatus | None, others: list[TransactionStatus]
) -> dict[str, Any]:
    return {
        "topic": topic,
        "heldBy": None if held is None else str(held.write_pointer),
        "heldSinceMs": None if held is None else held.since_ms,
        "hiddenMessages": 0 if held is None else held.hidden_messages,
        "hiddenMore": held is not None and held.hidden_more,
        "transaction": None if holder is None else transaction_json(holder),
        "others": [transaction_json(each) for each in others],
    }


# --- abort, invalidate, truncate -------------------------------------------------------------------


_ENDS = {
    "aborted": "aborted: its messages are rolled back",
    "invalid": "invalid: committed readers will never see its messages; the daemon rolls them back as it cleans",
}


@click.command(cls=Verb, examples=["plainsong tx abort 1769860800000000000 --yes"])
@click.argument("transaction", type=TransactionId(), metavar="ID")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@dry_run_option
@json_option
@where_options
def abort(transaction: int, yes: bool, dry_run: bool, as_json: bool, where: Where) -> None:
    """Abort a transaction: roll back its messages and release readers.

    Its client gets an error when it tries to commit. A long transaction, and
    one whose topics cannot all be reached in time, becomes `invalid`, which is
    the same to readers.
    """
    with where.client() as client:
        if dry_run:
            call = calls.dry_run(service.abort(transaction))
            show_dry_run(run_call(client, call), as_json=as_json)
            return
        _confirm(client, "Abort", transaction, service.abort(transaction), yes=yes)
        _show_end(transaction, client.transactions.end(transaction), as_json=as_json)


@click.command(cls=Verb, examples=["plainsong tx invalidate 1769860800000000000 --yes"])
@click.argument("transaction", type=TransactionId(), metavar="ID")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@dry_run_option
@json_option
@where_options
def invalidate(transaction: int, yes: bool, dry_run: bool, as_json: bool, where: Where) -> None:
    """Hide a transaction's messages forever, without rolling them back now.

    Faster than `abort`, which you should prefer: the daemon rolls the messages
    back later, as it cleans, and keeps the transaction on the invalid list
    until then.
    """
    with where.client() as client:
        if dry_run:
            call = calls.dry_run(service.invalidate(transaction))
            show_dry_run(run_call(client, call), as_json=as_json)
            return
        _confirm(client, "Invalidate", transaction, service.invalidate(transaction), yes=yes)
        _show_end(transaction, client.transactions.end(transaction, "invalidate"), as_json=as_json)


@click.command(
    cls=Verb,
    examples=[
        "plainsong tx truncate 1769860800000000000",
        "plainsong tx truncate --before 2026-01-31T12:00Z --yes",
    ],
)
@click.argument("transactions", nargs=-1, type=TransactionId(), metavar="[ID]...")
@click.option(
    "--before", type=Place(now="this computer's"), metavar="TIME", help="All transactions that began before this."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@where_options
def truncate(
    transactions: tuple[int, ...], before: str | bytes | int | None, yes: bool, as_json: bool, where: Where
) -> None:
    """Remove transactions from the list of invalid ones.

    By id, or all that began before a time. `plainsong tx pruning` says which
    may be removed; the daemon first rolls back their remaining messages.
    """
    if bool(transactions) == (before is not None):
        raise click.UsageError("give ids, or --before")
    if before is not None and not isinstance(before, int):
        raise click.UsageError("--before takes a time, such as -7d or 2026-01-31T12:00Z")
    what = f"all before {show_time(before)}" if before is not None else f"{len(transactions)}"
    confirmed(f"Remove {what} from the list of invalid transactions?", yes=yes)
    with where.client() as client:
        if before is None:
            removed = client.transactions.truncate(ids=transactions)
        else:
            removed = client.transactions.truncate(before_ms=before)
    if as_json:
        echo_json({"removed": removed})
    else:
        click.echo(f"removed {removed} from the list")


def _confirm(client: Client, verb: str, transaction: int, call: Call[Any], *, yes: bool) -> None:
    """Shows the effect, and asks for confirmation; the daemon refuses a transaction that it does not know."""
    if yes:
        return
    status = client.transactions.get(transaction)
    if status.state == "in_progress":
        age = show_length(max(0, now_ms() - status.issued_ms))
        note(
            "\n".join(
                f"  {line}"
                for line in effect_lines(run_call(client, calls.dry_run(call))) or [("no reader waits for it")]
            )
        )
        confirmed(f"{verb} {status.id} of client {escaped(status.client_id or '-')}, {age} old?", yes=yes)


def _show_end(transaction: int, done: Mapping[str, Any], *, as_json: bool) -> None:
    state = str(done["state"])
    if as_json:
        echo_json({**done, "id": str(transaction)})
    else:
        click.echo(f"{transaction} is {_ENDS.get(state, shown_state(state))}")
        output.echo_lines([f"  {each}" for each in effect_lines(done)])


# --- pruning, recover ------------------------------------------------------------------------------


_POINTERS = ("oldestInvalid", "safeBound")


@click.command(cls=Verb, examples=["plainsong tx pruning", "plainsong tx pruning --json"])
@json_option
@where_options
def pruning(as_json: bool, where: Where) -> None:
    """Show the list of invalid transactions, and when they leave it.

    Readers skip the transactions on the list. The daemon rolls their messages
    back as it cleans; a pointer leaves the list when none of its messages are
    left and none can be added. You need to do nothing unless the output says so.
    """
    with where.client() as client:
        figures = dict(client.transactions.pruning().figures)
    if as_json:
        echo_json(_pruning_json(figures))
    else:
        output.echo_lines(_explained(figures))


def _pruning_json(figures: dict[str, Any]) -> dict[str, Any]:
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
        ("invalid", f"{output.counted(invalid, 'pointer')}{oldest}"),
        ("last complete pass", "none yet" if last is None else f"{show_length(max(0, now - last))} ago"),
        (
            "safe bound",
            "none yet" if safe is None else f"{_pointer(safe, now)}: everything this service began up to it is decided",
        ),
        (
            "longest lifetime",
            show_length(lifetime_ms) if lifetime_ms else "unlimited (transactions.max_lifetime_s = 0)",
        ),
        ("pruned automatically", by_itself),
    ]
    lines = output.facts(pairs)
    if figures["oldestByTopic"]:
        rows = [
            (
                each["topic"],
                str(each["oldestPointer"]),
                show_length(max(0, now - issued_ms(int(each["oldestPointer"])))),
            )
            for each in figures["oldestByTopic"]
        ]
        lines += ["", *output.table(("TOPIC", "OLDEST POINTER", ">AGE"), rows)]
        if (left_out := figures["topics"] - len(rows)) > 0:
            lines.append(f"and {output.counted(left_out, 'more topic')}")
    if kept_because and invalid:
        lines += ["", *_by_hand(safe)]
    return lines


def _by_hand(safe: int | None) -> list[str]:
    if safe is None:
        return ["Wait for a complete cleaning pass before you prune by hand."]
    return [
        "To prune by hand, when no other store relies on the list and no client still writes with pointers that old:",
        f"  plainsong tx truncate --before {show_time(issued_ms(int(safe)))}",
    ]


def _pointer(pointer: int | str, now: int) -> str:
    return f"{pointer} ({show_length(max(0, now - issued_ms(int(pointer))))} ago)"


@click.command(cls=Verb, examples=["plainsong tx recover --database postgresql://shop@db.example/shop"])
@click.option(
    "--database", required=True, metavar="URL", help="URL of a PostgreSQL database; PGPASSWORD and ~/.pgpass work."
)
@json_option
@where_options
def recover(database: str, as_json: bool, where: Where) -> None:
    """Finish what crashed programs left prepared in a PostgreSQL database.

    For programs that use plainsong.sql. The command asks the daemon about each
    prepared transaction, commits those that were committed, rolls back aborted
    and invalid ones, and leaves those in progress. It also leaves those that
    the daemon does not know, and then exits with 1.
    """
    try:
        from plainsong import sql  # here, since it is an optional extra
    except ModuleNotFoundError as missing:
        raise CommandFailed(str(missing).partition(":")[0], hint="pip install 'plainsong-client[sql]'") from missing
    with where.client() as client:
        found = sql.recover(database, client)
    if as_json:
        echo_json([_found_json(each) for each in found.found])
    else:
        output.echo_lines(_found_lines(found))
    if found.unsure:
        left = (
            f"{output.counted(len(found.unsure), 'prepared transaction')} {'is' if len(found.unsure) == 1 else 'are'}"
        )
        advice = "" if as_json else "see the advice above"
        raise CommandFailed(f"{left} undecided: the daemon does not know the outcome", hint=advice)


def _found_lines(found: Recovery) -> list[str]:
    if not found.found:
        note("no prepared transactions")
        return []
    rows = [
        (str(each.transaction_id), shown_state(each.state), _done(each.action), show_length(each.age_s * 1000))
        for each in found.found
    ]
    lines = output.table(("TRANSACTION", "STATE", "DONE", ">PREPARED AGO"), rows)
    return lines + [f"{each.transaction_id}: {one_line(each.advice)}" for each in found.unsure]


def _done(action: str) -> str:
    return {"rolled_back": "rolled back", "gone": "already finished"}.get(action, action)


def _found_json(each: Any) -> dict[str, Any]:
    return {
        "transaction": str(each.transaction_id),
        "gid": each.gid,
        "state": each.state,
        "action": each.action,
        "ageS": round(each.age_s, 3),
        "advice": each.advice,
    }


# --- the group -------------------------------------------------------------------------------------


@click.group(cls=VerbGroup)
def tx() -> None:
    """Show transactions, and end one that holds readers.

    A transaction's id is its first write pointer. In JSON ids are strings,
    since floating-point numbers cannot hold them.
    """


for _verb in (list_transactions, show, blame, abort, invalidate, truncate, pruning, recover):
    tx.add_command(_verb)
