"""Send control messages to all containers of a program or an app, and collect their answers (use case 8).

All readers of a topic see all messages in the same order. So all containers of a program, however many there are,
execute the same commands in the same order, even across restarts of the daemon. A message is addressed by its
attributes. It expires after a minute, so a container that was stopped for longer ignores outdated commands.

    control_messages.py                                    run three containers, and send some commands
    control_messages.py container web-1 --program web      run one container, until it is sent stop
    control_messages.py send pause --answers 3             send to all containers of the app
    control_messages.py send log-level debug --program web
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from plainsong import TEXT, Client
from plainsong.positions import NEWEST, OLDEST, Start

CONTROL, ANSWERS = "control", "answers"
TTL_S = 60


def now_in(client: Client, topic: str) -> Start:
    """Return the current end of a topic; reading from it returns only new messages."""
    return client.poll(topic, NEWEST).last_id or OLDEST


def be_container(client: Client, name: str, app: str, program: str) -> None:
    """Execute commands until stop."""
    who, start = {"app": app, "program": program}, now_in(client, CONTROL)
    client.publish(ANSWERS, "ready", attributes={"container": name}, serializer=TEXT)
    for message in client.read(CONTROL, start, follow=True, serializer=TEXT):
        if message.attributes.items() <= who.items():
            # The real work would be done here. A duplicate answer is harmless, so one of unknown outcome is resent.
            attributes = {"container": name, "to": str(message.id)}
            client.publish(
                ANSWERS, f"{message.value}: done", attributes=attributes, serializer=TEXT, retry_unknown=True
            )
            if message.value == "stop":
                break


def send(client: Client, command: str, whom: Mapping[str, str], answers: int) -> None:
    """Send a command, and wait for the answers of this many containers."""
    start = now_in(client, ANSWERS)
    sent = client.publish(CONTROL, command, attributes=whom, ttl_s=TTL_S, serializer=TEXT)
    print(f"{command}, to {dict(whom)}", flush=True)
    waiting_for, obeyed = str(sent.first_id), set[str]()
    replies = client.read(ANSWERS, start, follow=True, serializer=TEXT)
    while len(obeyed) < answers:
        answer = next(replies)
        if answer.attributes.get("to") == waiting_for:
            obeyed.add(answer.attributes["container"])
            print(f"  {answer.attributes['container']} {answer.value}", flush=True)


def play(client: Client, url: str) -> None:
    """Run three containers of two programs of one app, and send them commands."""
    start, containers = now_in(client, ANSWERS), []
    for name, program in (("web-1", "web"), ("web-2", "web"), ("worker-1", "worker")):
        command = [sys.executable, __file__, f"--url={url}", f"--namespace={client.namespace}"]
        containers.append(subprocess.Popen([*command, "container", name, f"--program={program}"]))  # noqa: S603
    for _ in zip(containers, client.read(ANSWERS, start, follow=True), strict=False):
        pass  # each reports that it is ready
    send(client, "log-level debug", {"app": "shop", "program": "web"}, answers=2)
    for order in ("pause", "resume", "stop"):
        send(client, order, {"app": "shop"}, answers=3)
    for container in containers:
        container.wait()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="control", help="namespace of the topics (default: %(default)s)")
    parser.add_argument("--app", default="shop", help="app of the containers (default: %(default)s)")
    parser.add_argument("--program", help="container: its program; send: program of the containers (default: all)")
    parser.add_argument("--answers", type=int, default=0, help="send: number of answers to wait for")
    parser.add_argument("what", nargs="?", choices=["demo", "container", "send"], default="demo")
    parser.add_argument("words", nargs="*", help="container: its name; send: the command")
    args = parser.parse_args()
    with Client(args.url, namespace=args.namespace, wait_for_daemon_s=60) as client:
        client.create_topic(CONTROL, if_not_exists=True)
        client.create_topic(ANSWERS, if_not_exists=True)
        match args.what:
            case "container":
                be_container(client, args.words[0], args.app, args.program or "web")
            case "send":
                whom = {"app": args.app} | ({"program": args.program} if args.program else {})
                send(client, " ".join(args.words), whom, args.answers)
            case _:
                play(client, args.url)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
