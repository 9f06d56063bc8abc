"""Users publish notifications, which start the programs listed in a rules file (use case 7).

A notification is a text with attributes; a rule names the required attributes, and the command to start. The outcome of
the commands is published with the position of the notification as its sequence id. So the topic of outcomes records
which notifications were handled: without a database or a saved position, each gets exactly one outcome, no matter what
is killed. If a command ran but its outcome was not published, it runs again, with the same NOTIFICATION.

    custom_triggers.py                                             send some notifications, and handle them
    custom_triggers.py notify "new prices" kind=deployed stage=production version=7
    custom_triggers.py serve --rules FILE                          run until stopped
    custom_triggers.py outcomes                                    print the outcomes

Without Python, and for a single command: plainsong on TOPIC --run COMMAND.
"""

import argparse
import os
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from plainsong import JSON, TEXT, Client, Message, MessageId

NOTIFICATIONS, OUTCOMES = "notifications", "outcomes"


def number_of(notification: Message) -> int:
    """Return its position in the topic as a number: the time and the sequence number at the start of its id."""
    return int.from_bytes(notification.id[:10], "big")


def place_after(number: int) -> MessageId | str:
    """Return the position after the notification with this number."""
    return "oldest" if number < 0 else MessageId(number.to_bytes(10, "big") + bytes(10))


def serve(client: Client, triggers: Sequence[Mapping[str, Any]], *, follow: bool) -> None:
    """Handle notifications one after the other. A second process takes over from the first."""
    with client.producer(OUTCOMES, "custom-triggers", serializer=JSON) as producer:
        start = place_after(producer.last_sequence_id)
        for notification in client.read(NOTIFICATIONS, start, follow=follow, serializer=TEXT):
            says = notification.attributes
            pulled = [trigger["run"] for trigger in triggers if trigger["when"].items() <= says.items()]
            if pulled:
                outcome = {"notification": str(notification.id), "runs": [run(each, notification) for each in pulled]}
                producer.publish(outcome, sequence_ids=[number_of(notification)])


def run(command: Sequence[str], notification: Message) -> dict[str, Any]:
    """Run a command, and return its outcome."""
    fields = {"text": notification.value, **notification.attributes}
    words = [Template(word).safe_substitute(fields) for word in command]
    environ = {**os.environ, "NOTIFICATION": str(notification.id)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
    print(f"{words} ended with {done.returncode}", flush=True)
    return {"command": words, "exit": done.returncode, "output": done.stdout[-1000:]}


def notify(client: Client, text: str, attributes: Mapping[str, str]) -> None:
    """Publish a notification."""
    client.publish(NOTIFICATIONS, text, attributes=attributes, serializer=TEXT)


def play(client: Client, triggers: Sequence[Mapping[str, Any]]) -> None:
    """Send four notifications, of which three match a rule."""
    notify(client, "new prices", {"kind": "deployed", "stage": "test", "version": "7"})
    notify(client, "new prices", {"kind": "deployed", "stage": "production", "version": "7"})
    notify(client, "lunch", {"kind": "chatter"})
    notify(client, "at 99 %", {"kind": "disk-full", "host": "db1"})
    serve(client, triggers, follow=False)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="triggers", help="namespace of the topics (default: %(default)s)")
    parser.add_argument(
        "--rules",
        type=Path,
        default=Path(__file__).with_suffix(".toml"),
        help="file of rules (default: next to the program)",
    )
    parser.add_argument("what", nargs="?", choices=["demo", "notify", "serve", "outcomes"], default="demo")
    parser.add_argument("words", nargs="*", help="notify: the text, and attributes as name=value")
    args = parser.parse_args()
    triggers = tomllib.loads(args.rules.read_text())["trigger"]
    with Client(args.url, namespace=args.namespace, wait_for_daemon_s=60) as client:
        for topic in (NOTIFICATIONS, OUTCOMES):
            client.create_topic(topic, if_not_exists=True)
        match args.what:
            case "notify":
                notify(client, args.words[0], dict(word.split("=", 1) for word in args.words[1:]))
            case "serve":
                serve(client, triggers, follow=True)
            case "outcomes":
                for message in client.read(OUTCOMES, serializer=JSON):
                    print(message.value)
            case _:
                play(client, triggers)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
