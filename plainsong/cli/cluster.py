"""The verb `cluster`: shows the instances of a service and which of them owns which topic; drains them and moves topics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from plainsong import calls
from plainsong.cli import output
from plainsong.cli.options import now_ms, show_length
from plainsong.cli.output import echo_json, harmless, note
from plainsong.cli.verb import CommandFailed, Exit, Verb, VerbGroup, json_option
from plainsong.cli.where import complete_topic, run_call, where_options
from plainsong.protocol.cluster import SLICES

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.cli.where import Where

#: Between two looks at an instance that is drained.
LOOK_EVERY_S = 0.2
DEFAULT_WITHIN_S = 60.0


@click.group(cls=VerbGroup)
def cluster() -> None:
    """Instances of one service: who is there, who owns what.

    Any instance answers any request; each topic has one owner among them. What
    is said here holds until it is taken back, restarts included.
    """


@cluster.command(cls=Verb, examples=["plainsong cluster status", "plainsong cluster status orders --json"])
@click.argument("topic", required=False, shell_complete=complete_topic)
@json_option
@where_options
def status(topic: str | None, as_json: bool, where: Where) -> None:
    """Show the instances, and who owns TOPIC, if one is named.

    As the instance that is asked sees it; another one may see a change a moment
    later. TOPICS counts those that are open there. One that comes takes its share
    in portions, and gives it away in portions when it leaves or is drained: STATE
    says how many it has, of 64.
    """
    with where.client() as client:
        found = run_call(client, calls.show_cluster(client.namespace, topic))
    if as_json:
        echo_json(found)
        return
    output.echo_lines(output.table(_HEADINGS, [_row(each, found["instance"]) for each in found["instances"]]))
    output.echo_lines(["", *output.facts(_facts(found))])


_HEADINGS = ("INSTANCE", "ADDRESS", "STATE", ">WEIGHT", ">TOPICS")


def _row(each: dict[str, Any], asked_one: str) -> tuple[str, ...]:
    states = [word for word in ("leaving", "drained") if each[word]]
    if each["slices"] < SLICES and (each["slices"] or not states):
        states.append(f"{each['slices']}/{SLICES}")
    return (
        harmless(each["name"]) + (" *" if each["name"] == asked_one else ""),
        harmless(each["address"]),
        ", ".join(states) or "there",
        str(each["weight"]),
        output.show_count(each["topicsOpen"]),
    )


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    zookeeper = found["zookeeper"]
    if zookeeper is None:
        kept = "none: this instance is alone"
    else:
        since = show_length(max(0, now_ms() - zookeeper["since"]))
        kept = f"connected for {since}" if zookeeper["connected"] else f"away for {since}; owners go on, nothing moves"
    facts = [("zookeeper", kept), ("transactions", harmless(found["transactions"] or "nobody just now"))]
    if (topic := found["topic"]) is not None:
        pinned = f", pinned to {topic['pinned']}" if topic["pinned"] else ""
        facts.append((harmless(topic["name"]), harmless((topic["owner"] or "nobody just now") + pinned)))
    facts += [(f"pinned {name}", instance) for name, instance in list(found["pins"].items())[:20]]
    if len(found["pins"]) > 20:
        facts.append(("", f"and {len(found['pins']) - 20} more pins: --json has them all"))
    return [(harmless(name), harmless(value)) for name, value in facts]


@cluster.command(cls=Verb, examples=["plainsong cluster drain host-1", "plainsong cluster drain host-1 --no-wait"])
@click.argument("instance")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until its topics have moved.")
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    default=DEFAULT_WITHIN_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for that.",
)
@json_option
@where_options
def drain(instance: str, wait: bool, within: float, as_json: bool, where: Where) -> None:
    """Give all topics of INSTANCE to the others.

    It goes on answering, and can be stopped without a pause for anybody. It
    stays drained, also when it comes back, until undrain.
    """
    with where.client() as client:
        run_call(client, calls.drain_instance(instance, drained=True))
        left = _wait_until_empty(client, instance, within) if wait else None
    if left:
        raise CommandFailed(
            f"{instance} is drained, and still has {left} topics open after {within:g} s",
            hint="look again: plainsong cluster status",
            code=Exit.UNAVAILABLE,
        )
    _say({"instance": instance, "drained": True, "topicsOpen": left}, f"{instance} is drained", as_json=as_json)


def _wait_until_empty(client: Client, instance: str, within_s: float) -> int | None:
    """How many topics it still has; None when it is gone, or when drains mean nothing. Raises CommandFailed."""
    until_s, told = time.monotonic() + within_s, -1
    while True:
        found = run_call(client, calls.show_cluster())
        here = next((each for each in found["instances"] if each["name"] == instance), None)
        if here is None:
            return None
        if all(each["drained"] or each["leaving"] for each in found["instances"]):
            note("all instances are drained: it is as if none were")
            return None
        left: int | None = here["topicsOpen"]
        if left == 0 and not here["slices"]:
            return 0
        if time.monotonic() >= until_s:
            if left is None:
                raise CommandFailed(
                    f"{instance} is drained, and does not say how many topics it still has open",
                    hint="the others take them over; is it frozen, or out of their reach?",
                    code=Exit.UNAVAILABLE,
                )
            return left
        if left is not None and left != told:
            note(f"{output.show_count(left)} topics to go")
            told = left
        time.sleep(LOOK_EVERY_S)


@cluster.command(cls=Verb, examples=["plainsong cluster undrain host-1"])
@click.argument("instance")
@json_option
@where_options
def undrain(instance: str, as_json: bool, where: Where) -> None:
    """Let INSTANCE have its share of the topics again."""
    with where.client() as client:
        run_call(client, calls.drain_instance(instance, drained=False))
    _say({"instance": instance, "drained": False}, f"{instance} takes topics", as_json=as_json)


@cluster.command(cls=Verb, examples=["plainsong cluster move orders host-2"])
@click.argument("topic", shell_complete=complete_topic)
@click.argument("instance")
@json_option
@where_options
def move(topic: str, instance: str, as_json: bool, where: Where) -> None:
    """Pin TOPIC to INSTANCE: it is there as long as that is.

    While that is drained, the topic is where its name says.
    """
    with where.client() as client:
        run_call(client, calls.pin_topic(client.namespace, topic, instance))
        found = run_call(client, calls.show_cluster(client.namespace, topic))["topic"]
    owner, text = found["owner"], f"{found['name']} is at {instance}"
    if owner != instance:
        text = f"{found['name']} is pinned to {instance}, and at {owner or 'nobody'} just now: is {instance} drained?"
    _say({"topic": found["name"], "instance": instance, "owner": owner}, text, as_json=as_json)


@cluster.command(cls=Verb, examples=["plainsong cluster unpin orders"])
@click.argument("topic", shell_complete=complete_topic)
@json_option
@where_options
def unpin(topic: str, as_json: bool, where: Where) -> None:
    """Let TOPIC be where its name says."""
    with where.client() as client:
        run_call(client, calls.unpin_topic(client.namespace, topic))
        found = run_call(client, calls.show_cluster(client.namespace, topic))["topic"]
    owner = found["owner"]
    _say(
        {"topic": found["name"], "instance": owner},
        f"{found['name']} is at {owner or 'nobody just now'}",
        as_json=as_json,
    )


def _say(value: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        echo_json(value)
    else:
        note(harmless(text))
