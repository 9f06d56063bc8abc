"""The verb `topic`: creates, changes, lists, deletes and restores topics."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plainsong import calls
from plainsong.chains import ChainHead
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, VerbGroup, json_option
from plainsong.cli.connection import complete_topic, run_call, where_options
from plainsong.cli.definitions import import_file
from plainsong.cli.dry_run import dry_run_option, effect_lines, show_dry_run
from plainsong.cli.options import (
    DEFAULT,
    Length,
    chosen,
    differences,
    merged,
    parse_assignments,
    show_length,
    show_property,
    show_time,
)
from plainsong.cli.output import confirmed, echo_json, named, note
from plainsong.cli.producer import show_effective
from plainsong.positions import now_ms
from plainsong.protocol.errors import TopicExists
from plainsong.protocol.ids import bound_at
from plainsong.protocol.paging import pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from plainsong import Client
    from plainsong.chains import ChainReport
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.topics import DeletedTopic, TopicColumn, TopicRow


R = TypeVar("R", "TopicRow", "DeletedTopic")
#: The size limit of a file with a head.
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
    """Create a topic; return False if it exists with these properties. Raises TopicExists."""
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
@click.option("--sort", type=click.Choice(tuple(_COLUMNS)), help="Show figures, sorted by a column, the largest first.")
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
        raise click.UsageError("--deleted cannot be combined with --sort or --long")
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
    """Return all topics of the namespace, sorted by a column."""
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
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@dry_run_option
@json_option
@where_options
def set_properties(
    topic: str, properties: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool, where: Where
) -> None:
    """Change properties of a topic; the others stay unchanged.

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
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@dry_run_option
@json_option
@where_options
def delete(topics: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool, where: Where) -> None:
    """Delete topics with all their messages.

    They disappear for all readers at once. `topic undelete` restores a topic
    until the daemon has cleaned up, after an hour by default.
    """
    with where.client(*topics, creates=False) as client:
        # If one name is unknown, nothing is deleted.
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
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
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
        confirmed(
            f"Take {shown} out of {topic} forever ({output.counted(effect['damagedRows'], 'damaged row')})?", yes=yes
        )
        done = run_call(client, call)
    if as_json:
        echo_json(done)
    else:
        after = done["after"]
        assert after is not None  # of a range that was set aside
        count = "all readable rows" if after["rows"] is None else output.counted(after["rows"], "row")
        click.echo(f"set aside {count}, copied to {after['file']} in the daemon's data directory")


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
    """Read the head in a file. Raises CommandFailed, InvalidParameter."""
    try:
        with click.open_file(file, "rb") as opened:
            return ChainHead.parse(opened.read(MAX_HEAD_BYTES))
    except OSError as error:
        raise CommandFailed(f"cannot read {file}: {error.strerror}", code=Exit.USAGE) from error


@contextmanager
def _in_namespace(where: Where, topic: str) -> Iterator[tuple[Client, str]]:
    """Yield a client and the topic's name; the namespace is the one before the name, or else the command's."""
    namespace, _, name = topic.rpartition(":")
    if namespace:
        where = replace(where, namespace=namespace)
    with where.client(name, creates=False) as client:
        yield client, name


def _verified(topic: str, found: ChainReport) -> list[str]:
    lines = [
        f"verified {output.show_messages(found.messages)} of {topic} in {output.counted(found.entries, 'entry')}: "
        f"{'all unchanged' if found.is_good else 'see the faults below'}"
    ]
    if found.begins_at is not None:
        begun_ms = int(found.begins_at[:16], 16)
        lines.append(f"the chain begins at {found.begins_at} ({show_time(begun_ms)}); it covers nothing before")
    notes = {
        "known": {
            "found": "the earlier head is part of the chain",
            "cleaned": "the earlier head has expired: it cannot be compared",
        }.get(found.known or "", ""),
        "expired": f"{output.counted(found.expired, 'entry')} with messages that have expired",
        "set aside": f"{output.counted(found.set_aside, 'entry')} with rows that were set aside",
        "found": f"{output.counted(found.found, 'entry')} added at a start after a crash",
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


# --- a former verb ---------------------------------------------------------------------------------


@topic.command(hidden=True)
@click.option("-f", "--file", required=True, type=click.Path(path_type=Path, allow_dash=True), help="TOML or JSON.")
@click.option("--dry-run", is_flag=True, help="Show what would change; change nothing.")
@click.option("--prune", is_flag=True, help="Delete topics of the namespace that are not in the file.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before deleting topics or hiding messages.")
@json_option
@where_options
def apply(file: Path, dry_run: bool, prune: bool, yes: bool, as_json: bool, where: Where) -> None:
    """The former name of `definitions import`, which does it now.

    Properties that the file does not name stay unchanged. The next version
    removes this name.
    """
    output.report("warning: `topic apply` is `definitions import` now, and the next version removes the old name")
    import_file(file, dry_run=dry_run, prune=prune, yes=yes, as_json=as_json, where=where, keeps=True)
