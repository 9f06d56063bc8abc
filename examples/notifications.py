"""Users are notified of what happens in the system, each of what he asked for, also of what he missed (use case 6).

Events of all kinds come on topics of their own. A user subscribes to topics by patterns, and to what the events say. The
daemon keeps where each user is, and one event loop looks after all of them. A user who comes for the first time begins
an hour ago. What was shown and not yet noted when the program is killed is shown again, under the same id; nothing is left out.

    notifications.py                       events of all kinds, and what each user gets to see
    notifications.py inbox ada --follow    one user's notifications, as they come
    notifications.py happen                more events
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
    """Which topics, and which of their events: those that say all of ``says``."""

    topics: tuple[str, ...]
    says: Mapping[str, str] = field(default_factory=dict)


SUBSCRIPTIONS = {
    "ada": Subscription(("events-*",)),
    "grace": Subscription(("events-programs",), {"state": "failed"}),
    "linus": Subscription(("events-data", "events-metadata")),
}


async def happen(client: AsyncClient) -> None:
    """Events; on a stream each is sent without waiting for the answer to the one before."""
    for topic, events in EVENTS.items():
        async with client.stream(topic, serializer=JSON) as stream:
            tickets = [await stream.publish(event) for event in events]
        for ticket in tickets:
            await ticket  # its receipt, or why it was refused


async def inbox(client: AsyncClient, user: str, *, follow: bool) -> None:
    """Show what came for a user since the last time, and note that it was shown."""
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
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="notifications", help="of the topics (default: %(default)s)")
    parser.add_argument("--follow", action="store_true", help="inbox: wait for what comes")
    parser.add_argument("what", nargs="?", choices=["demo", "happen", "inbox"], default="demo")
    parser.add_argument("users", nargs="*", default=list(SUBSCRIPTIONS), help="inbox: whose (default: everybody's)")
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
