"""The verb `tx`: lists transactions, finds which one a topic waits for, ends them, and recovers a database after a crash.

Transactions as the command line writes them: ids, states, and one transaction as a row, as facts and as JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong import calls
from plainsong.cli import output
from plainsong.cli.options import Place, now_ms, show_length, show_time
from plainsong.cli.output import confirmed, echo_json, harmless, note
from plainsong.cli.verb import CommandFailed, Verb, VerbGroup, json_option, one_line
from plainsong.cli.where import complete_topic, where_options
from plainsong.protocol.transactions.transaction import issued_ms

if TYPE_CHECKING:
    from plainsong import Client, TransactionStatus
    from plainsong.cli.where import Where
    from plainsong.messages import Held
    from plainsong.sql import Recovery

#: States as the service names them; people may write a blank or a hyphen.
STATES = ("in_progress", "invalid", "committed", "aborted")
HEADINGS = ("CLIENT", "ID", "STATE", "TYPE", ">AGE", ">LEFT", ">TOPICS", ">HIDDEN")
MAX_ID = (1 << 63) - 1


class TransactionId(click.ParamType[int]):
    """A transaction's id on the command line."""

    name = "id"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; fails for what can be none."""
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ID)) and 0 < int(text) <= MAX_ID):
            self.fail(f"{text[:40]!r} is no transaction id; `plainsong tx ls` shows those there are", param, ctx)
        return int(text)


def transaction_json(status: TransactionStatus) -> dict[str, Any]:
    """For programs; the names are the HTTP interface's."""
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
    }


def row_of(status: TransactionStatus, now: int) -> tuple[str, ...]:
    """One transaction below ``HEADINGS``."""
    return (
        harmless(status.client_id or "-"),
        str(status.id),
        shown_state(status.state),
        status.type or "-",
        show_length(max(0, now - status.issued_ms)),
        show_length(left_ms(status, now)),
        str(len(status.topics)),
        output.show_count(status.hidden_messages),
    )


def facts_of(status: TransactionStatus) -> list[tuple[str, str]]:
    """Everything that is known of one."""
    now = now_ms()
    pairs = [("transaction", str(status.id)), ("state", shown_state(status.state))]
    if status.state == "unknown":
        return [*pairs, ("", "never begun by this daemon, or so long ago that its outcome is not kept any more")]
    if status.write_pointer != status.id:
        pairs.append(("write pointer", f"{status.write_pointer}, since its last checkpoint"))
    begun = f"{show_time(status.issued_ms)}, {show_length(max(0, now - status.issued_ms))} ago"
    pairs += [("type", status.type or "-"), ("client", harmless(status.client_id or "-")), ("begun", begun)]
    left = left_ms(status, now)
    if left is not None:
        pairs.append(("times out", f"in {show_length(left)}, then it is invalid"))
    if status.kept_until_ms is not None:
        pairs.append(("remembered", f"for {show_length(max(0, status.kept_until_ms - now))} at least"))
    pairs.append(("topics", ", ".join(status.topics) or "none with messages that wait for it"))
    if status.hidden_messages:
        pairs.append(("hides", f"{output.show_count(status.hidden_messages)} messages from committed readers"))
    return pairs


def left_ms(status: TransactionStatus, now: int) -> int | None:
    """Until its time-out; None for one that is not in progress."""
    if status.state != "in_progress" or status.expires_ms is None:
        return None
    return max(0, status.expires_ms - now)


def shown_state(state: str) -> str:
    """For people."""
    return state.replace("_", " ")


# --- tx look ---------------------------------------------------------------------------------------
#
# ``plainsong tx ls``, ``show`` and ``blame``: which transactions there are, and which one a topic waits for.


#: Shown unless somebody wants more. The daemon gives so many at once, at most.
DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000


@click.command(name="ls", cls=Verb, examples=["plainsong tx ls", "plainsong tx ls --state invalid --json"])
@click.option("--state", type=click.Choice(STATES), help="Only those; in progress and invalid by default.")
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
        echo_json([transaction_json(each) for each in found])
        return
    if not found:
        note("there are none")
    now = now_ms()
    output.echo_lines(output.table(HEADINGS, [row_of(each, now) for each in found]))
    if len(found) == limit < MAX_LIMIT:
        note(f"there may be more: --limit {MAX_LIMIT}")


@click.command(cls=Verb, examples=["plainsong tx show 1769860800000000000"])
@click.argument("transaction", type=TransactionId(), metavar="ID")
@json_option
@where_options
def show(transaction: int, as_json: bool, where: Where) -> None:
    """Show one transaction, also when it has been decided.

    `unknown` is an answer too: this daemon never began it, or has forgotten.
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
        echo_json(_blame_json(topic, held, holder, others))
    else:
        output.echo_lines(_lines(topic, held, holder, others))


def _held(client: Client, topic: str) -> Held | None:
    """Who holds up a committed reader of the whole topic."""
    call = calls.topic_offsets(client.namespace, topic, {"isolation": "committed"})
    end = client._channel.call(call)["end"]
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
        hidden = f"{output.show_count(held.hidden_messages)}{more} messages hidden"
        lines = [f"{topic} is held up by transaction {held.write_pointer}{since}, {hidden}"]
        lines += _what_it_is(held, holder)
    if others:
        now = now_ms()
        lines += ["", "also in progress there:"]
        lines += output.table(HEADINGS, [row_of(each, now) for each in others])
    return lines


def _what_it_is(held: Held, holder: TransactionStatus | None) -> list[str]:
    if holder is None:
        return [
            "  This daemon did not begin it: it is of a transaction service elsewhere, or of a program without one.",
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


# --- tx end ----------------------------------------------------------------------------------------
#
# ``plainsong tx abort``, ``invalidate`` and ``truncate``: ending transactions that do not end by themselves.


_ENDS = {
    "aborted": "aborted: its messages are rolled back",
    "invalid": "invalid: no committed reader will see its messages, which the daemon rolls back as it cleans",
}


@click.command(cls=Verb, examples=["plainsong tx abort 1769860800000000000 --yes"])
@click.argument("transaction", type=TransactionId(), metavar="ID")
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
@click.argument("transaction", type=TransactionId(), metavar="ID")
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
@click.argument("transactions", nargs=-1, type=TransactionId(), metavar="[ID]...")
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
        click.echo(f"{transaction} is {_ENDS.get(state, shown_state(state))}")


# --- tx upkeep -------------------------------------------------------------------------------------
#
# ``plainsong tx pruning`` and ``recover``: the list of invalid transactions, and what a crash left in a database.


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
        ("invalid", f"{output.show_count(invalid)} pointers{oldest}"),
        ("last complete pass", "none yet" if last is None else f"{show_length(max(0, now - last))} ago"),
        (
            "safe bound",
            "none yet" if safe is None else f"{_pointer(safe, now)}: up to it nothing this service began is undecided",
        ),
        ("longest life", show_length(lifetime_ms) if lifetime_ms else "without end (transactions.max_lifetime_s = 0)"),
        ("pruned by itself", by_itself),
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
        output.echo_lines(_found_lines(found))
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
        (str(each.transaction_id), shown_state(each.state), _done(each.action), show_length(each.age_s * 1000))
        for each in found.found
    ]
    lines = output.table(("TRANSACTION", "STATE", "DONE", ">PREPARED AGO"), rows)
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


# --- tx --------------------------------------------------------------------------------------------
#
# ``plainsong tx``: who is in a transaction, who holds a topic up, and what can be done about it.


@click.group(cls=VerbGroup)
def tx() -> None:
    """Transactions: who holds a topic up, and what to do about it.

    A transaction is known by its id, which is its first write pointer. In JSON
    ids are strings: they pass what programs that count in floats can hold.
    """


for _verb in (list_transactions, show, blame, abort, invalidate, truncate, pruning, recover):
    tx.add_command(_verb)
