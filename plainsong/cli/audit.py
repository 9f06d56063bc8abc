"""The verb `audit`: reads the daemon's record of who changed what, and who was refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import output
from plainsong.cli.command import Verb, json_option
from plainsong.cli.connection import where_options
from plainsong.cli.options import Place
from plainsong.cli.output import echo_json

if TYPE_CHECKING:
    from plainsong.cli.connection import Where

NAMESPACE, TOPIC = "system", "audit"


@click.command(
    cls=Verb,
    examples=[
        "plainsong audit",
        "plainsong audit --follow --action security.refused",
        "plainsong audit --name billing --from -7d --json",
    ],
)
@click.option("--follow", "-f", is_flag=True, help="Keep following until Ctrl-C.")
@click.option("--name", help="Only actions of this name.")
@click.option("--action", help="Only this action, e.g. topic.delete; a prefix matches too.")
@click.option("--from", "start", type=Place(), default="-24h", show_default=True, help="Start here.")
@json_option
@where_options
def audit(
    follow: bool, name: str | None, action: str | None, start: str | bytes | int, as_json: bool, where: Where
) -> None:
    """Show who changed what, and who was refused.

    With security.authentication, the daemon records this in the topic
    system:audit. Reading it requires the verb poll on that topic.
    """
    with where.client(namespace=NAMESPACE) as client, client.read(TOPIC, start, follow=follow) as reader:
        for message in reader:
            record = json.loads(message.payload)
            if (name is None or record["name"] == name) and (action is None or record["action"].startswith(action)):
                echo_json(record) if as_json else click.echo(_line(record))


def _line(record: dict[str, Any]) -> str:
    parts = [record["at"], record["name"] or "-", record["action"], record["target"], record["outcome"]]
    if record["code"]:
        parts.append(record["code"])
    if record["repeated"] > 1:
        parts.append(f"{record['repeated']} times")
    if record["remote"]:
        parts.append(f"from {record['remote']}")
    return output.escaped("  ".join(map(str, parts)))
