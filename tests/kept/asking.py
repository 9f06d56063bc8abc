"""Requests everything that a client can see from a daemon on a kept directory, at a fixed time."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from broker.api.messages import poll_many
from storage.leveldb import LevelDBStore
from tests.broker.broker_in_process import START_MS, InProcess, SetClock, in_process

SHOP = "/v1/namespaces/shop"
TOPICS = f"{SHOP}/topics"
CENTURY_S = 2_000_000_000
#: The time of the requests: after everything that ``make`` does, but before its open transactions time out.
ASKED_MS = START_MS + 3 * 3_600_000
#: The only field that differs between runs: the duration of the last replay.
_VOLATILE = {"ms"}


class Asking:
    """Sends requests, and stores each answer by its request."""

    def __init__(self, daemon: InProcess) -> None:
        self._daemon = daemon
        self.answers: dict[str, Any] = {}

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the status, the headers about the end of the page, and the body."""
        answer = await self._daemon.http.request(method, path, json=body)
        headers = {name: value for name, value in answer.headers.items() if name.startswith("plainsong-")}
        found = _without_volatile(answer.json()) if answer.content else None
        question = f"{method} {path}" + (f" {body}" if body is not None else "")
        while question in self.answers:
            question += " again"
        self.answers[question] = {"status": answer.status_code, "headers": headers, "body": found}
        return found


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(inner) for key, inner in value.items() if key not in _VOLATILE}
    return [_without_volatile(inner) for inner in value] if isinstance(value, list) else value


async def ask_everything(directory: Path) -> dict[str, Any]:
    """Return the answers of a daemon on ``directory``; the last requests change the directory."""
    clock = SetClock()
    clock.ms = ASKED_MS
    # Each poll of many topics starts with a different topic; start with the first, like a daemon after its start.
    poll_many._turns = count()
    async with await LevelDBStore.open(directory) as store, in_process(store=store, clock=clock) as daemon:
        asking = Asking(daemon)
        await look(asking)
        await go_on(asking)
        return asking.answers


async def look(asking: Asking) -> None:
    """Send the requests that only read."""
    ask = asking.ask
    await ask("GET", "/v1/namespaces")
    await ask("GET", f"{SHOP}/properties")
    topics = await ask("GET", TOPICS)
    transactions = [
        each
        for state in ("in_progress", "invalid", "committed", "aborted")
        for each in await ask("GET", f"/v1/transactions?state={state}")
    ]
    await ask("GET", "/v1/transactions/pruning")
    for each in transactions:
        await ask("GET", f"/v1/transactions/{each['id']}")
    for topic in [*topics, "deleted", "cleaned"]:
        await look_at_topic(asking, f"{TOPICS}/{topic}")
    everywhere = {topic: {} for topic in topics}
    await ask("POST", f"{SHOP}/poll", {"topics": everywhere, "limit": 200, "isolation": "committed"})


async def look_at_topic(asking: Asking, topic: str) -> None:
    ask = asking.ask
    await ask("GET", topic)
    await ask("GET", f"{topic}/messages?limit=12")
    for isolation in ("uncommitted", "committed"):
        page = await ask("POST", f"{topic}/poll", {"isolation": isolation})
        if isinstance(page, list) and page:
            for middle in (page[len(page) // 2]["id"], page[-1]["id"]):
                await ask("POST", f"{topic}/poll", {"startFrom": middle, "limit": 20, "isolation": isolation})
    await ask("POST", f"{topic}/offsets", {"start": 0, "maxMessages": 500, "splits": 4})
    await ask("GET", f"{topic}/stats")
    await ask("GET", f"{topic}/readers")
    listed = await ask("GET", f"{topic}/producers")
    for producer in listed.get("producers", ()):
        await ask("GET", f"{topic}/producers/{producer['producer']}")


async def go_on(asking: Asking) -> None:
    """Check that open transactions can be ended, and that new messages come after the old ones."""
    ask = asking.ask
    said = {"producer": "till", "sequenceIds": list(range(70, 80)), "messages": [f"till {n}" for n in range(70, 80)]}
    await ask("POST", f"{TOPICS}/counted/publish", said)
    staged = {"producer": "job", "sequenceIds": [0], "segments": ["0.a", "1.b"], "messages": []}
    await ask("POST", f"{TOPICS}/parts/publish", staged)
    await ask("POST", f"{TOPICS}/parts/publish", {**staged, "sequenceIds": [1], "segments": ["2.a"]})
    await ask("POST", f"{TOPICS}/parts/poll", {"isolation": "committed"})
    for each in sorted(await ask("GET", "/v1/transactions?state=in_progress"), key=lambda each: str(each["clientId"])):
        verb = "abort" if each["clientId"] == "rolled back in part" else "commit"
        if each["clientId"] == "prepared":
            body = {"transactionWritePointer": each["writePointer"], "messages": []}
            await ask("POST", f"{TOPICS}/payments/publish", body)
        await ask("POST", f"/v1/transactions/{each['id']}/{verb}")
    for topic in ("payments", "orders"):
        await ask("POST", f"{TOPICS}/{topic}/poll", {"isolation": "committed", "limit": 2000})
    await ask("POST", f"{TOPICS}/deleted/undelete")
    await ask("POST", f"{TOPICS}/cleaned/undelete")
    for topic in ("deleted", "short", "again", "orders"):
        await ask("POST", f"{TOPICS}/{topic}/publish", {"messages": ["new"]})
        await ask("POST", f"{TOPICS}/{topic}/poll", {"limit": 2000})
        await ask("GET", f"{TOPICS}/{topic}/stats")
