"""The verb `cluster`: shows the instances of a service and the owners of topics; drains instances and moves topics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

import click

from plainsong import calls
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb, VerbGroup, json_option
from plainsong.cli.connection import complete_topic, run_call, where_options
from plainsong.cli.dry_run import dry_run_option, show_dry_run
from plainsong.cli.options import show_length
from plainsong.cli.output import echo_json, escaped, note, report
from plainsong.positions import now_ms
from plainsong.protocol.cluster import SLICES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong import Client
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.service import ClusterView, InstanceRow, TopicPlacement

#: Interval between checks of an instance that is being drained.
LOOK_EVERY_S = 0.2
DEFAULT_WITHIN_S = 60.0


@click.group(cls=VerbGroup)
def cluster() -> None:
    """Show instances and owners; drain and move.

    Any instance answers any request; each topic is owned by one of them. Drains
    and pins hold until they are undone, also across restarts.
    """


@cluster.command(cls=Verb, examples=["plainsong cluster status", "plainsong cluster status orders --json"])
@click.argument("topic", required=False, shell_complete=complete_topic)
@json_option
@where_options
def status(topic: str | None, as_json: bool, where: Where) -> None:
    """Show the instances, and the owner of TOPIC if given.

    As seen by the instance that answers; another may see a change a moment
    later. TOPICS counts the topics open on an instance. An instance takes its
    share of the topics in steps when it enters, and gives it up in steps when it
    leaves or is drained: STATE shows how many of 64 slices it has.
    """
    with where.client() as client:
        found = run_call(client, calls.show_cluster(client.namespace, topic))
    if as_json:
        echo_json(found)
        return
    output.echo_lines(output.table(_HEADINGS, [_row(each, found["instance"]) for each in found["instances"]]))
    output.echo_lines(["", *output.facts(_facts(found))])
    for line in security_differences(found["instances"]):
        report(line)


def security_differences(instances: Sequence[InstanceRow]) -> list[str]:
    """Return a sentence per security file that differs between instances; empty if no difference is known."""
    found = []
    files: tuple[tuple[Literal["grants", "tokens"], str], ...] = (
        ("grants", "a name has different rights at different instances"),
        ("tokens", "some instances refuse tokens that others accept"),
    )
    for what, hint in files:
        kinds: dict[str, list[str]] = {}
        for each in instances:
            security = each.get("security")
            if security is not None:
                kinds.setdefault(security[what] or "none", []).append(escaped(each["name"]))
        if len(kinds) > 1:
            shown = "; ".join(f"{digest} at {', '.join(names)}" for digest, names in sorted(kinds.items()))
            found.append(f"warning: the {what} of the instances differ, so {hint}: {shown}")
    return found


_HEADINGS = ("INSTANCE", "ADDRESS", "STATE", ">WEIGHT", ">TOPICS")


def _row(each: InstanceRow, asked_one: str) -> tuple[str, ...]:
    states = [word for word in ("leaving", "drained") if each[word]]
    if each["slices"] < SLICES and (each["slices"] or not states):
        states.append(f"{each['slices']}/{SLICES}")
    return (
        escaped(each["name"]) + (" *" if each["name"] == asked_one else ""),
        escaped(each["address"]),
        ", ".join(states) or "there",
        str(each["weight"]),
        output.show_count(each["topicsOpen"]),
    )


def _facts(found: ClusterView) -> list[tuple[str, str]]:
    zookeeper = found["zookeeper"]
    if zookeeper is None:
        kept = "none: a single instance"
    else:
        since = show_length(max(0, now_ms() - zookeeper["since"]))
        kept = (
            f"connected for {since}"
            if zookeeper["connected"]
            else f"unavailable for {since}; owners continue, nothing moves"
        )
    facts = [("zookeeper", kept), ("transactions", escaped(found["transactions"] or "no owner at the moment"))]
    if (topic := found["topic"]) is not None:
        pinned = f", pinned to {topic['pinned']}" if topic["pinned"] else ""
        facts.append((escaped(topic["name"]), escaped((topic["owner"] or "no owner at the moment") + pinned)))
    facts += [(f"pinned {name}", instance) for name, instance in list(found["pins"].items())[:20]]
    if len(found["pins"]) > 20:
        facts.append(("", f"and {output.counted(len(found['pins']) - 20, 'more pin')}; --json lists all"))
    return [(escaped(name), escaped(value)) for name, value in facts]


@cluster.command(cls=Verb, examples=["plainsong cluster drain host-1", "plainsong cluster drain host-1 --dry-run"])
@click.argument("instance")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until its topics have moved.")
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    default=DEFAULT_WITHIN_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait.",
)
@dry_run_option
@json_option
@where_options
def drain(instance: str, wait: bool, within: float, dry_run: bool, as_json: bool, where: Where) -> None:
    """Move all topics of INSTANCE to the others.

    The instance keeps answering, and can then be stopped without a pause for
    clients. It stays drained until undrain, also across restarts.
    """
    with where.client() as client:
        call = calls.drain_instance(instance, drained=True)
        if dry_run:
            show_dry_run(run_call(client, calls.dry_run(call)), as_json=as_json)
            return
        done = run_call(client, call)
        left = _wait_until_empty(client, instance, within) if wait else None
    if left:
        raise CommandFailed(
            f"{instance} is drained, but still has {output.counted(left, 'topic')} open after {within:g} s",
            hint="check again with plainsong cluster status",
            code=Exit.UNAVAILABLE,
        )
    change = {**done, "instance": instance, "drained": True, "topicsOpen": left}
    _show_change(change, f"{instance} is drained", as_json=as_json)


def _wait_until_empty(client: Client, instance: str, within_s: float) -> int | None:
    """Returns how many topics are left; None when the instance is gone, or drains have no effect. Raises CommandFailed."""
    until_s, shown_left = time.monotonic() + within_s, -1
    while True:
        found = run_call(client, calls.show_cluster())
        here = next((each for each in found["instances"] if each["name"] == instance), None)
        if here is None:
            return None
        if all(each["drained"] or each["leaving"] for each in found["instances"]):
            report("all instances are drained, so the drains have no effect")
            return None
        left: int | None = here["topicsOpen"]
        if left == 0 and not here["slices"]:
            return 0
        if time.monotonic() >= until_s:
            if left is None:
                raise CommandFailed(
                    f"{instance} is drained, but does not report how many topics it still has open",
                    hint="the other instances take them over; check whether this one hangs or is unreachable",
                    code=Exit.UNAVAILABLE,
                )
            return left
        if left is not None and left != shown_left:
            note(f"{output.counted(left, 'topic')} left")
            shown_left = left
        time.sleep(LOOK_EVERY_S)


@cluster.command(cls=Verb, examples=["plainsong cluster undrain host-1"])
@click.argument("instance")
@json_option
@where_options
def undrain(instance: str, as_json: bool, where: Where) -> None:
    """Give INSTANCE its share of the topics again."""
    with where.client() as client:
        run_call(client, calls.drain_instance(instance, drained=False))
    _show_change({"instance": instance, "drained": False}, f"{instance} takes topics again", as_json=as_json)


@cluster.command(cls=Verb, examples=["plainsong cluster move orders host-2"])
@click.argument("topic", shell_complete=complete_topic)
@click.argument("instance")
@json_option
@where_options
def move(topic: str, instance: str, as_json: bool, where: Where) -> None:
    """Pin TOPIC to INSTANCE, while that instance is available.

    While the instance is drained, placement is automatic.
    """
    with where.client() as client:
        run_call(client, calls.pin_topic(client.namespace, topic, instance))
        found = _placement(client, topic)
    owner, text = found["owner"], f"{found['name']} is owned by {instance}"
    if owner != instance:
        text = (
            f"{found['name']} is pinned to {instance}, but owned by {owner or 'no instance'}: check whether "
            f"{instance} is drained"
        )
    _show_change({"topic": found["name"], "instance": instance, "owner": owner}, text, as_json=as_json)


@cluster.command(cls=Verb, examples=["plainsong cluster unpin orders"])
@click.argument("topic", shell_complete=complete_topic)
@json_option
@where_options
def unpin(topic: str, as_json: bool, where: Where) -> None:
    """Unpin TOPIC: its placement is automatic again."""
    with where.client() as client:
        run_call(client, calls.unpin_topic(client.namespace, topic))
        found = _placement(client, topic)
    owner = found["owner"]
    _show_change(
        {"topic": found["name"], "instance": owner},
        f"{found['name']} is owned by {owner or 'no instance at the moment'}",
        as_json=as_json,
    )


def _placement(client: Client, topic: str) -> TopicPlacement:
    found = run_call(client, calls.show_cluster(client.namespace, topic))["topic"]
    assert found is not None  # the request asked for the owner
    return found


def _show_change(value: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        echo_json(value)
    else:
        click.echo(escaped(text))
