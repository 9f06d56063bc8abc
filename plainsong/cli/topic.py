"""The verb `topic`: creates, changes, lists, deletes and restores topics, one by one or as a file declares them."""

from __future__ import annotations

import json
import sys
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plainsong import calls
from plainsong.chains import ChainHead
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb, VerbGroup, json_option
from plainsong.cli.connection import complete_topic, run_call, where_options
from plainsong.cli.dry_run import dry_run_option, effect_lines, show_dry_run
from plainsong.cli.options import (
    DEFAULT,
    Length,
    checked,
    chosen,
    differences,
    merged,
    now_ms,
    parse_assignments,
    show_length,
    show_property,
    show_time,
)
from plainsong.cli.output import confirmed, echo_json, named, note
from plainsong.cli.producer import show_effective
from plainsong.protocol.errors import InvalidProperty, PlainsongError, TopicExists, nearest
from plainsong.protocol.ids import bound_at
from plainsong.protocol.names import topic_name
from plainsong.protocol.paging import pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from plainsong import Client
    from plainsong.calls import Call
    from plainsong.chains import ChainReport
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.topics import DeletedTopic, TopicColumn, TopicRow


R = TypeVar("R", "TopicRow", "DeletedTopic")
#: Of a file with a head.
MAX_HEAD_BYTES = 1 << 16


@click.group(cls=VerbGroup)
def topic() -> None:
    """Create, change, list and delete topics."""


@topic.command(
    examples=[
        "plainsong topic create greetings",
        "plainsong topic create orders --ttl 30d max_bytes=10GiB",
        "plainsong topic create orders --ttl 30d --if-not-exists",
    ]
)
@click.argument("topic")
@click.argument("properties", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--ttl", "ttl_s", type=Length(), metavar="TIME", help="Time to live of messages, e.g. 7d; short for ttl=7d."
)
@click.option("--if-not-exists", is_flag=True, help="Succeed if it exists with the properties given.")
@json_option
@where_options
def create(
    topic: str, properties: tuple[str, ...], ttl_s: int | None, if_not_exists: bool, as_json: bool, where: Where
) -> None:
    """Create a topic.

    Properties: ttl (7d by default), max_bytes (none), transactional
    (optional, required, disabled), deduplication (inherit, enabled, disabled).
    """
    given = parse_assignments([*properties, *([] if ttl_s is None else [f"ttl={ttl_s}"])])
    with where.client() as client:
        try:
            is_new = _create(client, topic, merged({}, given), if_not_exists=if_not_exists)
        except TopicExists as error:
            if if_not_exists:
                differing = differences(client.admin.properties(topic), given)
                error.detail = f"topic {topic} exists with other properties: {_differing(differing)}"
            error.hint = f"plainsong topic set {topic} NAME=VALUE changes it; plainsong topic show {topic} shows it"
            raise
        if as_json:
            echo_json({"name": topic, "properties": client.admin.properties(topic)})
        else:
            done = "created topic {}" if is_new else "topic {} exists"
            click.echo(f"{done.format(topic)} in namespace {client.namespace}")


def _create(client: Client, topic: str, properties: dict[str, Any], *, if_not_exists: bool) -> bool:
    """Create a topic. False: it exists, with these properties. Raises TopicExists."""
    try:
        run_call(client, calls.create_topic(client.namespace, topic, properties, if_not_exists=False))
    except TopicExists:
        if not if_not_exists:
            raise
        run_call(client, calls.create_topic(client.namespace, topic, properties, if_not_exists=True))
        return False
    return True


def _differing(found: Mapping[str, tuple[str | None, str]]) -> str:
    """``ttl is 7d, not 30d; max_bytes is unset, not 10 GiB``."""
    return "; ".join(
        f"{name} is {'unset' if has is None else show_property(name, has)}, not {show_property(name, wanted)}"
        for name, (has, wanted) in found.items()
    )


#: Columns by which the daemon sorts, and whether the largest come first.
_COLUMNS: dict[str, tuple[TopicColumn, bool]] = {
    "name": ("name", False),
    "messages": ("messages", True),
    "size": ("bytes", True),
    "age": ("oldestAgeMs", True),
    "in": ("publishPerSecond", True),
    "out": ("pollPerSecond", True),
    "hidden": ("hiddenMessages", True),
}


@topic.command(
    name="list",
    examples=[
        "plainsong topic list",
        "plainsong topic list 'orders-*' --long",
        "plainsong topic list --sort messages",
        "plainsong topic list --deleted",
    ],
)
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("-l", "--long", "is_long", is_flag=True, help="Show ttl, messages and size.")
@click.option("--sort", type=click.Choice(tuple(_COLUMNS)), help="Show figures, the largest of a column first.")
@click.option("--deleted", is_flag=True, help="List deleted topics, and until when undelete restores them.")
@json_option
@where_options
def list_topics(
    patterns: tuple[str, ...], is_long: bool, sort: str | None, deleted: bool, as_json: bool, where: Where
) -> None:
    """List the topics of the namespace.

    With --sort the daemon sorts and counts, without opening a topic; IN and OUT
    are messages per second, HIDDEN those hidden by an undecided transaction.
    """
    if deleted and (sort is not None or is_long):
        raise click.UsageError("--deleted goes without --sort and --long")
    if deleted or sort is not None:
        with where.client() as client:
            if deleted:
                _show_rows(client.admin.deleted_topics(), patterns, _deleted_table, as_json=as_json)
            else:
                _show_rows(_sorted(client, *_COLUMNS[sort or "name"]), patterns, _figures_table, as_json=as_json)
        return
    with where.client() as client:
        names = chosen(client.topics(), patterns)
        if not is_long:
            if as_json:
                echo_json(names)
            else:
                output.echo_lines(names)
            return
        rows = [(name, client.admin.properties(name), client.admin.stats(name)) for name in names]
    if as_json:
        echo_json([{"name": name, "properties": properties, "stats": stats} for name, properties, stats in rows])
        return
    shown = [
        (
            name,
            show_property("ttl", properties["ttl"]),
            output.show_count(stats["messages"], estimated=stats["estimated"]),
            output.show_bytes(stats["bytes"]),
            show_length(stats["oldestAgeMs"]),
        )
        for name, properties, stats in rows
    ]
    output.echo_lines(output.table(("TOPIC", ">TTL", ">MESSAGES", ">SIZE", ">OLDEST"), shown))


def _show_rows(
    found: list[R], patterns: tuple[str, ...], table: Callable[[Sequence[R]], list[str]], *, as_json: bool
) -> None:
    kept = set(chosen([each["name"] for each in found], patterns))
    found = [each for each in found if each["name"] in kept]
    if as_json:
        echo_json(found)
    else:
        output.echo_lines(table(found))


def _sorted(client: Client, column: TopicColumn, descending: bool) -> list[TopicRow]:
    """All topics of the namespace in the order of a column."""
    order = "desc" if descending else "asc"
    query = {"namespace": client.namespace, "sort": column, "order": order, "limit": 500}
    found = pages(lambda after: run_call(client, calls.topics_page({**query, "after": after})))
    return [each for page in found for each in page["topics"]]


def _figures_table(rows: Sequence[TopicRow]) -> list[str]:
    headings = ("TOPIC", ">TTL", ">MESSAGES", ">SIZE", ">OLDEST", ">IN", ">OUT", ">HIDDEN")
    shown = [
        (
            each["name"],
            show_property("ttl", str(each["ttl"])),
            output.show_count(each["messages"], estimated=each["estimated"]),
            output.show_bytes(each["bytes"]),
            show_length(each["oldestAgeMs"]),
            output.show_rate(each["publishPerSecond"]),
            output.show_rate(each["pollPerSecond"]),
            output.show_count(each["hiddenMessages"]),
        )
        for each in rows
    ]
    return output.table(headings, shown)


def _deleted_table(rows: Sequence[DeletedTopic]) -> list[str]:
    shown = [
        (
            each["name"],
            show_time(each["deletedMs"]),
            show_time(each["undeleteUntilMs"]) if each["state"] == "kept" else "cannot be restored",
            output.show_count(each["messages"]),
            output.show_bytes(each["bytes"]),
        )
        for each in rows
    ]
    return output.table(("TOPIC", "DELETED", "RESTORE UNTIL", ">MESSAGES", ">SIZE"), shown)


@topic.command(examples=["plainsong topic show orders", "plainsong topic show orders --json"])
@click.argument("topic", shell_complete=complete_topic)
@json_option
@where_options
def show(topic: str, as_json: bool, where: Where) -> None:
    """Show a topic's properties, size, producers and readers."""
    with where.client(topic) as client:
        properties, stats, readers = (
            client.admin.properties(topic),
            client.admin.stats(topic),
            client.admin.readers(topic),
        )
        producers = run_call(client, calls.list_producers(client.namespace, topic, None, 1))
    if as_json:
        effective = producers["deduplication"]
        document = {
            "name": topic,
            "properties": properties,
            "deduplication": effective,
            "stats": stats,
            "readers": readers,
        }
        echo_json(document)
        return
    newest = stats["newestId"]
    lines = [("topic", topic), *((name, show_property(name, value)) for name, value in sorted(properties.items()))]
    lines += [
        ("messages", output.show_count(stats["messages"], estimated=stats["estimated"])),
        ("size", output.show_bytes(stats["bytes"])),
        ("oldest", show_length(stats["oldestAgeMs"])),
        ("newest", "-" if newest is None else show_time(int(newest[:16], 16))),
        ("producers", f"{output.show_count(producers['count'])}, deduplication is {show_effective(producers)}"),
        ("readers", named([each["name"] for each in readers]) if readers else "none"),
    ]
    output.echo_lines(output.facts(lines))


@topic.command(
    name="set",
    examples=[
        "plainsong topic set orders ttl=30d",
        "plainsong topic set orders max_bytes=default",
        "plainsong topic set orders ttl=1h --dry-run",
    ],
)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("properties", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@dry_run_option
@json_option
@where_options
def set_properties(
    topic: str, properties: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool, where: Where
) -> None:
    """Change properties of a topic; the others stay as they are.

    The value `default` restores the daemon's default. A shorter ttl takes
    effect at once, also for messages already published: if it would hide some,
    the command asks first.
    """
    changes = parse_assignments(properties)
    with where.client(topic) as client:
        current, etag = run_call(client, calls.describe_topic_state(client.namespace, topic))
        call = calls.set_properties(client.namespace, topic, merged(current, changes), etag)
        if dry_run:
            show_dry_run(run_call(client, calls.dry_run(call)), as_json=as_json)
            return
        hidden = _hidden_by_ttl(client, topic, changes.get("ttl"))
        if hidden:
            shown = show_property("ttl", changes["ttl"])
            confirmed(f"A ttl of {shown} hides {output.show_messages(hidden)} of {topic} forever. Set it?", yes=yes)
        done = run_call(client, call)
        now = client.admin.properties(topic)
    if as_json:
        echo_json({**done, "name": topic, "properties": now})
    else:
        facts = output.facts([(name, show_property(name, value)) for name, value in sorted(now.items())])
        output.echo_lines([*facts, *effect_lines(done)])


def _hidden_by_ttl(client: Client, topic: str, ttl: str | None) -> int:
    """Return the number of present messages that a new ttl would hide."""
    if ttl is None or ttl == DEFAULT:
        return 0
    bound = bound_at(max(0, now_ms() - int(ttl) * 1000)).hex()
    found = run_call(client, calls.topic_offsets(client.namespace, topic, {"end": bound}))
    return int(found["count"])


@topic.command(
    examples=[
        "plainsong topic delete greetings",
        "plainsong topic delete old-1 old-2 --yes",
        "plainsong topic delete greetings --dry-run",
    ]
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...", shell_complete=complete_topic)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@dry_run_option
@json_option
@where_options
def delete(topics: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool, where: Where) -> None:
    """Delete topics with all their messages.

    They disappear for all readers at once. `topic undelete` restores a topic
    until the daemon has cleaned up, after an hour by default.
    """
    with where.client(*topics, creates=False) as client:
        # One unknown name, and nothing is deleted.
        told = [run_call(client, calls.dry_run(calls.delete_topic(client.namespace, each))) for each in topics]
        if dry_run:
            for each in told:
                show_dry_run(each, as_json=as_json)
            return
        removes = [each["effect"]["removes"] for each in told]
        messages = sum(each["messages"] for each in removes)
        shown = output.show_messages(messages, estimated=any(each["estimated"] for each in removes))
        for name, each in zip(topics, told, strict=True):
            note("\n".join([f"{name}:", *(f"  {line}" for line in effect_lines(each))]))
        confirmed(f"Delete {named(topics)} with {shown}?", yes=yes)
        for name, each in zip(topics, told, strict=True):
            # The etag ensures that the topic is the one shown above: not changed or created again since.
            done = run_call(client, calls.delete_topic(client.namespace, name, each["etag"]))
            if as_json:
                echo_json({**done, "deleted": name})
            else:
                click.echo(f"deleted {name}; for a while, plainsong topic undelete {name} restores it")
                output.echo_lines([f"  {line}" for line in effect_lines(done)])


@topic.command(examples=["plainsong topic undelete greetings"])
@click.argument("topic")
@json_option
@where_options
def undelete(topic: str, as_json: bool, where: Where) -> None:
    """Restore a deleted topic with its messages."""
    with where.client() as client:
        done = client.admin.undelete_topic(topic)
        stats = client.admin.stats(topic)
    if as_json:
        echo_json({**done, "name": topic, "messages": stats["messages"]})
    else:
        click.echo(f"restored topic {topic} with {output.show_messages(stats['messages'])}")


@topic.command(
    name="set-aside",
    examples=[
        "plainsong topic set-aside orders FROM TO --dry-run",
        "plainsong topic set-aside shop:orders FROM TO --yes",
    ],
)
@click.argument("topic", metavar="[NS:]TOPIC")
@click.argument("first", metavar="FROM")
@click.argument("last", metavar="TO")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@dry_run_option
@json_option
@where_options
def set_aside(topic: str, first: str, last: str, yes: bool, dry_run: bool, as_json: bool, where: Where) -> None:
    """Take damaged rows out of a topic, so that readers get past them.

    FROM and TO are ids, both included, as the scrub reports them (GET
    /v1/scrub). The daemon copies the rows unchanged to a file in its data
    directory, and readers never see them again; intact rows among them are lost
    to readers too.
    """
    namespace, colon, name = topic.rpartition(":")
    with where.client(name, creates=False) as client:
        call = calls.set_aside(namespace if colon else client.namespace, name, first, last)
        told = run_call(client, calls.dry_run(call))
        if dry_run:
            show_dry_run(told, as_json=as_json)
            return
        note("\n".join(f"  {line}" for line in effect_lines(told)))
        effect = told["effect"]
        shown = output.show_messages(effect["removes"]["messages"], estimated=effect["removes"]["estimated"])
        confirmed(f"Take {shown} out of {topic} forever, {effect['damagedRows']} damaged?", yes=yes)
        done = run_call(client, call)
    if as_json:
        echo_json(done)
    else:
        rows = done["after"]["rows"]
        count = "all rows that can be read are" if rows is None else f"{output.counted(rows, 'row')} are"
        click.echo(f"set aside: {count} in {done['after']['file']} of the daemon's data directory")


# --- chains ----------------------------------------------------------------------------------------


@topic.command(
    examples=[
        "plainsong topic head system:audit",
        "plainsong topic head orders --json > orders.head",
    ]
)
@click.argument("topic", metavar="[NS:]TOPIC", shell_complete=complete_topic)
@json_option
@where_options
def head(topic: str, as_json: bool, where: Where) -> None:
    """Show the head of a chained topic, to keep it and verify the topic with it.

    The head has the topic, its generation, its last entry, the number of
    entries, and a hash that changes if anything before it is changed. It is
    signed if the daemon has topic.chain_secret_file.
    """
    with _in_namespace(where, topic) as (client, name):
        found = client.admin.chain_head(name)
    if as_json:
        echo_json(found.shown())
        return
    rows = [
        ("topic", found.topic),
        ("generation", str(found.generation)),
        ("entries", str(found.count)),
        ("last", f"{found.id} ({show_time(found.at_ms)})"),
        ("hash", found.hash),
        ("signature", "none" if found.signature is None else found.signature["signature"]),
    ]
    for label, value in rows:
        click.echo(f"{label:<12}{value}")


@topic.command(
    examples=[
        "plainsong topic verify system:audit",
        "plainsong topic verify orders --known orders.head",
        "plainsong topic verify orders --json",
    ]
)
@click.argument("topic", metavar="[NS:]TOPIC", shell_complete=complete_topic)
@click.option(
    "--known",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="File with an earlier head (topic head --json), which must still be part of the chain; - is stdin.",
)
@json_option
@where_options
def verify(topic: str, known: str | None, as_json: bool, where: Where) -> None:
    """Verify that nothing in a chained topic was changed, removed or inserted.

    Reads the whole topic and recomputes every hash on this machine. Without
    --known it finds contradictions; with an earlier head it also finds a topic
    that was created again, truncated, or replaced by an older copy. Exits with
    1 if there is a fault, and shows the id of the first.
    """
    expected = None if known is None else _known_head(known)
    with _in_namespace(where, topic) as (client, name):
        found = client.admin.verify_chain(name, known=expected)
    if as_json:
        echo_json(found.shown())
    else:
        output.echo_lines(_verified(topic, found))
    if not found.is_good:
        first, count = found.faults[0], len(found.faults) + found.more_faults
        raise CommandFailed(
            f"topic {topic} does not match its chain: {output.counted(count, 'fault')}, the first at {first.id}",
            hint=f"plainsong peek {topic} shows the messages; compare them with a backup",
        )


def _known_head(file: str) -> ChainHead:
    """The head in a file. Raises CommandFailed, InvalidParameter."""
    try:
        with click.open_file(file, "rb") as opened:
            return ChainHead.parse(opened.read(MAX_HEAD_BYTES))
    except OSError as error:
        raise CommandFailed(f"cannot read {file}: {error.strerror}", code=Exit.USAGE) from error


@contextmanager
def _in_namespace(where: Where, topic: str) -> Iterator[tuple[Client, str]]:
    """A client of the namespace that stands before the topic's name, or of its own; and the name alone."""
    namespace, _, name = topic.rpartition(":")
    if namespace:
        where = replace(where, namespace=namespace)
    with where.client(name, creates=False) as client:
        yield client, name


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{output.show_count(count)} entries"


def _verified(topic: str, found: ChainReport) -> list[str]:
    lines = [
        f"{output.show_messages(found.messages)} of {topic} in {_entries(found.entries)} "
        f"{'are' if found.is_good else 'are, apart from the faults below,'} as they were published"
    ]
    if found.begins_at is not None:
        begun_ms = int(found.begins_at[:16], 16)
        lines.append(f"the chain begins at {found.begins_at} ({show_time(begun_ms)}); it covers nothing before")
    notes = {
        "known": {
            "found": "the earlier head is part of the chain",
            "cleaned": "the earlier head has expired: it cannot be compared",
        }.get(found.known or "", ""),
        "expired": f"{_entries(found.expired)} with messages that have expired",
        "set aside": f"{_entries(found.set_aside)} with rows that were set aside",
        "found": f"{_entries(found.found)} were added at a start after a crash",
        "restored": f"the topic was restored from a backup {output.counted(found.restored, 'time')}",
    }
    given = {"known": found.known, "expired": found.expired, "set aside": found.set_aside, "found": found.found}
    given["restored"] = found.restored
    lines += [text for key, text in notes.items() if given[key]]
    lines.append(f"head: entry {found.head.count}, {found.head.hash}")
    lines += [f"{each.id}  {each.kind}: {each.detail}" for each in found.faults]
    if found.more_faults:
        lines.append(f"and {output.counted(found.more_faults, 'fault')} more")
    return lines


# --- apply -----------------------------------------------------------------------------------------


@click.command(
    cls=Verb,
    examples=[
        "plainsong topic apply -f topics.toml --dry-run",
        "plainsong topic apply -f topics.toml",
        "plainsong topic apply -f topics.json --prune --yes",
    ],
)
@click.option(
    "-f", "--file", required=True, type=click.Path(dir_okay=False, allow_dash=True), help="TOML or JSON; - is stdin."
)
@click.option("--dry-run", is_flag=True, help="Show what would change; change nothing.")
@click.option("--prune", is_flag=True, help="Delete topics that are not in the file.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before deleting topics or hiding messages.")
@json_option
@where_options
def apply(file: str, dry_run: bool, prune: bool, yes: bool, as_json: bool, where: Where) -> None:
    """Create, change and delete topics as a file declares them.

    The file has a table for each topic, in TOML or as JSON:

    \b
      [topics.orders]
      ttl = "30d"
      max_bytes = "10GiB"
      [topics.audit]

    Properties that the file does not name stay as they are; "default" resets
    one. Topics that it does not name stay too, unless --prune is given. Applying
    the file again changes nothing. In the output, + marks a new topic, ~ a
    changed one, - a deleted one.
    """
    wanted = load_declarations(file)
    with where.client() as client:
        changes = plan(client, wanted, prune=prune)
        doomed = [change.topic for change in changes if change.action == "delete"]
        if not as_json:
            for change in changes:
                click.echo(change.shown())
        if not dry_run:
            if doomed:
                confirmed(f"Delete {named(doomed)} with all messages?", yes=yes)
            for change in changes:
                shorter = change.send.get("ttl") if change.action == "change" and "ttl" in change.properties else None
                if hidden := _hidden_by_ttl(client, change.topic, shorter):
                    shown = show_property("ttl", str(shorter))
                    says = f"A ttl of {shown} hides {output.show_messages(hidden)} of {change.topic} forever. Set it?"
                    confirmed(says, yes=yes)
            _carry_out(client, changes)
    if as_json:
        echo_json({"applied": not dry_run, "topics": [change.as_json() for change in changes]})
        return
    todo = sum(change.action in ("create", "change", "delete") for change in changes)
    click.echo(
        f"{output.counted(todo, 'topic')} would change"
        if dry_run
        else f"{output.counted(todo, 'topic')} changed"
        if todo
        else "nothing to change"
    )


def _carry_out(client: Client, changes: Sequence[Change]) -> None:
    """Carries out the changes, deletions last. Raises PlainsongError that says how far it came."""
    at = client.namespace
    steps: dict[str, Callable[[Change], Call[Any]]] = {
        "create": lambda change: calls.create_topic(at, change.topic, change.send, if_not_exists=False),
        "change": lambda change: calls.set_properties(at, change.topic, change.send),
        "delete": lambda change: calls.delete_topic(at, change.topic),
    }
    todo = sorted((change for change in changes if change.action in steps), key=lambda each: each.action == "delete")
    for done, change in enumerate(todo):
        try:
            run_call(client, steps[change.action](change))
        except PlainsongError as error:
            error.detail = (
                f"{error.detail} ({change.action} {change.topic}; {done} of {len(todo)} changes made before it)"
            )
            raise


def load_declarations(file: str) -> dict[str, dict[str, str]]:
    """Returns the checked properties of each topic. Raises CommandFailed, InvalidProperty, InvalidName."""
    try:
        text = (sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{file} cannot be read: {error}", code=Exit.USAGE) from error
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except ValueError as error:
        raise CommandFailed(f"{file}: {error}", hint=_EXAMPLE, code=Exit.USAGE) from error
    topics = document.get("topics") if isinstance(document, dict) else None
    unknown = next((key for key in document if key != "topics"), None)
    if unknown is not None:
        hint = nearest(unknown, ("topics",))
        raise CommandFailed(f"{file}: unknown key {unknown!r}", hint=hint, code=Exit.USAGE)
    if not isinstance(topics, dict) or not all(isinstance(each, dict) for each in topics.values()):
        raise CommandFailed(f"{file} declares no topics", hint=_EXAMPLE, code=Exit.USAGE)
    return {name: _declared(file, name, properties) for name, properties in topics.items()}


def plan(client: Client, wanted: Mapping[str, Mapping[str, str]], *, prune: bool) -> list[Change]:
    """Compares the topics with the file, in the order of their names."""
    existing = client.topics()
    changes = []
    for name in sorted({*existing, *wanted}):
        if name not in existing:
            new: dict[str, tuple[str | None, str]] = {key: (None, value) for key, value in wanted[name].items()}
            changes.append(Change(name, "create", new, merged({}, wanted[name])))
        elif name in wanted:
            current = client.admin.properties(name)
            different = differences(current, wanted[name])
            changes.append(Change(name, "change" if different else "keep", different, merged(current, wanted[name])))
        else:
            changes.append(Change(name, "delete" if prune else "leave", {}, {}))
    return changes


topic.add_command(apply)

_EXAMPLE = 'write a table for each topic: [topics.orders] and below it ttl = "30d"'


@dataclass(frozen=True, slots=True)
class Change:
    """One topic's change by `apply`."""

    topic: str
    action: str
    """``create``, ``change``, ``delete``, ``keep`` (as the file says), ``leave`` (not in the file)."""
    properties: Mapping[str, tuple[str | None, str]]
    """Name → (current value, new value)."""
    send: Mapping[str, str]
    """All properties of the topic afterwards, as sent."""

    def shown(self) -> str:
        """One line: a sign, the topic, its changes."""
        sign = {"create": "+", "change": "~", "delete": "-", "keep": "=", "leave": " "}[self.action]
        says = "  ".join(self._property(name, *pair) for name, pair in self.properties.items())
        if self.action == "leave":
            says = "(not in the file)"
        return f"{sign} {self.topic:<24} {says}".rstrip()

    def _property(self, name: str, has: str | None, will: str) -> str:
        value = show_property(name, will)
        return f"{name} {value}" if self.action == "create" else f"{name} {show_property(name, has)} -> {value}"

    def as_json(self) -> dict[str, Any]:
        changed = {name: {"from": has, "to": will} for name, (has, will) in self.properties.items()}
        return {"topic": self.topic, "action": self.action, "properties": changed}


def _declared(file: str, name: str, properties: dict[str, object]) -> dict[str, str]:
    topic_name("default", name)
    try:
        return checked(properties)
    except InvalidProperty as error:
        raise InvalidProperty(f"{file}: topic {name}: {error.detail}", hint=error.hint) from error
