"""Users receive the notifications that they subscribed to, including missed ones (use case 6).

Each kind of event has its own topic. A user subscribes to topics by pattern, and to events by their fields. The daemon
stores each user's position, and one event loop serves all users. A new user starts an hour in the past. If the program
is killed, notifications whose position was not saved yet are shown again, with the same id; none is lost.

    notifications.py                       publish events, and show each user's notifications
    notifications.py inbox ada --follow    follow one user's notifications
    notifications.py happen                publish more events
"""

import argparse
import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from plainsong import JSON, AsyncClient, ServerPosition

EVENTS: dict[str, list[dict[str, str]]] = {
    "events-metadata": [
        {"entity": "dataset:orders", "change": "owner=sales"},
        {"entity": "dataset:crm", "change": "tag+=pii"},
    ],
    "events-programs": [{"program": "join", "state": state} for state in ("started", "failed", "started", "completed")],
    "events-data": [{"dataset": "orders", "partition": day} for day in ("2026-01-30", "2026-01-31")],
}


@dataclass(frozen=True)
class Subscription:
    """The topics, and the fields that their events must have."""

    topics: tuple[str, ...]
    says: Mapping[str, str] = field(default_factory=dict)


SUBSCRIPTIONS = {
    "ada": Subscription(("events-*",)),
    "grace": Subscription(("events-programs",), {"state": "failed"}),
    "linus": Subscription(("events-data", "events-metadata")),
}


async def happen(client: AsyncClient) -> None:
    """Publish events over a stream, without waiting for the answer to the previous one."""
    for topic, events in EVENTS.items():
        async with client.stream(topic, serializer=JSON) as stream:
            tickets = [await stream.publish(event) for event in events]
        for ticket in tickets:
            await ticket  # raises if it was refused


async def inbox(client: AsyncClient, user: str, *, follow: bool) -> None:
    """Show a user's new notifications, and save the position."""
    wanted = SUBSCRIPTIONS[user]
    async with client.read(
        wanted.topics, "-1h", follow=follow, position=ServerPosition(f"inbox-{user}"), save_every=1, serializer=JSON
    ) as messages:
        async for message in messages:
            if wanted.says.items() <= message.value.items():
                print(f"{user:<6} {message.id:.20} {message.topic:<16} {message.value}", flush=True)


async def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="notifications", help="namespace of the topics (default: %(default)s)")
    parser.add_argument("--follow", action="store_true", help="inbox: wait for new messages")
    parser.add_argument("what", nargs="?", choices=["demo", "happen", "inbox"], default="demo")
    parser.add_argument("users", nargs="*", default=list(SUBSCRIPTIONS), help="inbox: users (default: all)")
    args = parser.parse_args()
    async with AsyncClient(args.url, namespace=args.namespace, wait_for_daemon_s=60) as client:
        for topic in EVENTS:
            await client.create_topic(topic, if_not_exists=True)
        if args.what != "inbox":
            await happen(client)
        if args.what != "happen":
            async with asyncio.TaskGroup() as users:
                for user in args.users:
                    users.create_task(inbox(client, user, follow=args.follow))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
