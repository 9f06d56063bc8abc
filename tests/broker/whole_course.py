"""One transaction over two topics from begin to end, in one process, with a fault at a chosen write.

Readers of every kind poll both topics after each step, and during and after the fault; the checker of transactional
histories reports anomalies. Time is a counter, so that no two events are simultaneous.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from contextlib import asynccontextmanager, suppress
from itertools import count

import trio
from broker_in_process import TOPICS, in_process

from actors.invalid_list import InvalidPass
from plainsong.protocol.frames import FRAMES_TYPE, decode_frames
from plainsong.protocol.ids import FIRST_BOUND
from storage.memory import MemoryStore
from tests.daemon.transactional_checker import check
from tests.daemon.transactional_history import Log, Page, Request, Transaction
from tests.storage.faulty import FaultyStore

TX = "/v1/transactions"
NAMES = ("a", "b")
TIMEOUT_S = 30
#: By this time after the fault, every time-out has expired.
AFTERWARDS_S = 60
SETTINGS = {"storage__min_free_bytes": 0}


class Failed(Exception):
    """The daemon refused the request, or (``unknown``) its outcome is unknown."""

    def __init__(self, answer) -> None:
        super().__init__(answer.text)
        self.code = answer.json()["code"]
        self.unknown = answer.json()["outcome"] == "unknown"


class Killed(Exception):
    """Makes the daemon die without a clean shutdown."""


@asynccontextmanager
async def life(store, **settings):
    """Run the application on this store until a clean stop or ``Killed``."""
    try:
        async with in_process(store=store, **SETTINGS, **settings) as daemon:
            yield daemon
    except* Killed:
        store.crash()


class Follower:
    """A reader that continues from its last message; a snapshot reader starts from the beginning each time."""

    def __init__(self, topic, *, limit=None, isolation=None, inclusive=False, snapshot=None, view_s=None):
        self.topic, self.limit, self.isolation, self.inclusive = topic, limit, isolation, inclusive
        self.snapshot, self.view_s, self.last = snapshot, view_s, None
        self.name = f"{isolation or ('snapshot' if snapshot else 'uncommitted')} reader by {limit or 'all'}"


class Scene:
    """Both topics, the clients' view of them, and everything that their readers received."""

    def __init__(self, store=None) -> None:
        self.store = FaultyStore(MemoryStore()) if store is None else store
        self.daemon = None
        self.transactions, self.requests, self.pages = [], [], []
        self._moments, self._numbers = count(1), count()
        self._fault_at = None
        self.followers = [
            Follower(topic, **manner)
            for topic in NAMES
            for manner in ({"isolation": "committed"}, {"isolation": "committed", "limit": 1}, {})
        ]

    # --- faults ----------------------------------------------------------------------------------

    def fail_write(self, number, applied):
        """Make a write fail after ``number`` further writes have succeeded."""
        self._fault_at = self.store.calls["write"] + number
        self.store.fail_next("write", applied=applied, after=number)

    @property
    def is_armed(self):
        return self._fault_at is not None

    @property
    def has_failed(self):
        return self._fault_at is not None and self.store.calls["write"] > self._fault_at

    # --- requests --------------------------------------------------------------------------------

    async def post(self, path, body=None, **more):
        """Return the answer. Raises Failed."""
        answer = await self.daemon.ask("POST", path, body, **more)
        if answer.status_code != 200:
            raise Failed(answer)
        return answer

    async def begin(self, timeout_s=TIMEOUT_S):
        told = (await self.post(TX, {"timeoutSeconds": timeout_s, "clientId": "course"})).json()
        transaction = Transaction(told["id"], told["expires"])
        self.transactions.append(transaction)
        return transaction, b64decode(told["snapshot"])

    async def publish(self, topic, size, transaction=None, stores=()):
        """Publish new messages together with ``stores``."""
        request = self.request(topic, size, transaction)
        for part in (request, *stores):
            part.outcome = "unknown"
        await self._send(request, "publish", stores)
        return request

    async def store_messages(self, topic, size, transaction):
        request = self.request(topic, size, transaction)
        request.outcome = "refused"
        await self._send(request, "store")
        return request

    def request(self, topic, size, transaction):
        number = next(self._numbers)
        payloads = tuple(b"%d.%d in %s" % (number, each, topic.encode()) for each in range(size))
        self.requests.append(Request(topic, payloads, transaction))
        return self.requests[-1]

    async def _send(self, request, verb, stores=()):
        pointer = request.transaction and request.transaction.id
        body = {"messages": [payload.decode() for payload in request.payloads], "transactionWritePointer": pointer}
        parts = (request, *stores) if verb == "publish" else ()
        try:
            await self.post(f"{TOPICS}/{request.topic}/{verb}", {k: v for k, v in body.items() if v is not None})
        except Failed as failed:
            for part in parts if not failed.unknown else ():
                part.outcome = "refused"
            raise
        for part in parts:
            part.outcome, part.ended_s = "acknowledged", next(self._moments)

    async def decide(self, transaction, verb):
        """Request a decision, and record the state in the answer. Raises Failed."""
        if verb == "commit":
            transaction.asked_s = min(transaction.asked_s, next(self._moments))
        try:
            state = (await self.post(f"{TX}/{transaction.id}/{verb}")).json()["state"]
        except Failed as failed:
            if failed.code != "transaction_not_in_progress":
                raise
            state = "undone" if verb == "commit" else "committed"
        if state == "committed":
            transaction.committed_s = min(transaction.committed_s, next(self._moments))
        else:
            transaction.undone_s = min(transaction.undone_s, next(self._moments))

    async def roll_back(self, topic, transaction):
        await self.post(f"{TOPICS}/{topic}/rollback", {"transactionWritePointer": transaction.id})

    async def invalid_pass(self):
        """Run the janitor's pass over the rows of invalid transactions; it may fail."""
        await InvalidPass(self.daemon.service.directory, self.daemon.service.authority.transactions).run_once()

    async def insist(self, call, *arguments):
        """Retry the call until it succeeds."""
        while True:
            try:
                return await call(*arguments)
            except Failed:
                await trio.sleep(0.05)

    # --- looking ---------------------------------------------------------------------------------

    async def look(self):
        """Have every reader poll until it reaches the topic's end or is blocked."""
        for follower in self.followers:
            with suppress(Failed):
                while await self.page(follower) == "more":
                    pass

    async def page(self, follower, wait_ms=0):
        """Poll one page and return how it ended."""
        since = follower.last
        body = {
            "startFrom": since and since.hex(),
            "inclusive": since is None,
            "limit": follower.limit,
            "isolation": follower.isolation,
            "transaction": follower.snapshot and b64encode(follower.snapshot).decode(),
            "waitMs": wait_ms,
        }
        asked_s, asked_ms = next(self._moments), self.daemon.clock.ms
        answer = await self.post(f"{TOPICS}/{follower.topic}/poll", {k: v for k, v in body.items() if v is not None})
        answered_s = next(self._moments)
        last_id, held_by = answer.headers.get("plainsong-last-id"), answer.headers.get("plainsong-held-by")
        page = Page(
            follower.name,
            follower.topic,
            tuple((bytes.fromhex(each["id"]), each["payload"].encode()) for each in answer.json()),
            bool(follower.isolation or follower.snapshot),
            follower.view_s or (asked_s, answered_s),
            asked_s,
            answered_s,
            asked_ms,
            FIRST_BOUND if since is None else (int.from_bytes(since, "big") + 1).to_bytes(20, "big"),
            last_id and bytes.fromhex(last_id),
            answer.headers["plainsong-end"],
            held_by and int(held_by),
            None if follower.snapshot is None else follower.view_s[0],
        )
        self.pages.append(page)
        follower.last = page.through or follower.last
        return page.end

    async def bring_snapshot(self):
        """Add a reader with a snapshot taken now to each topic."""
        asked_s = next(self._moments)
        transaction, snapshot = await self.begin()
        view_s = (asked_s, next(self._moments))
        self.followers += [Follower(topic, limit=2, snapshot=snapshot, view_s=view_s) for topic in NAMES]
        return transaction

    async def log(self, topic):
        headers = {"Accept": FRAMES_TYPE + "; fields=pointer"}
        answer = await self.post(f"{TOPICS}/{topic}/poll", {}, headers=headers)
        return Log(topic, [(i, payload, p) for i, payload, p, _ in decode_frames(answer.content, pointers=True)])

    # --- afterwards ------------------------------------------------------------------------------

    async def pass_time(self, seconds=AFTERWARDS_S):
        self.daemon.clock.ms += seconds * 1000
        await trio.sleep(seconds)

    async def check(self):
        """After the last fault: every reader reaches the end, and the checker finds no anomaly."""
        await self.pass_time()
        for topic in NAMES:
            await self.insist(self.publish, topic, 1)
        for transaction in self.transactions:
            answer = await self.daemon.ask("GET", f"{TX}/{transaction.id}")
            transaction.state = answer.json()["state"]
        afresh = [Follower(t, limit=limit, isolation=i) for t in NAMES for limit in (1, 7) for i in ("committed", None)]
        for follower in [each for each in self.followers if not each.snapshot] + afresh:
            while (end := await self.page(follower)) == "more":
                pass
            assert end == "end", self.pages[-1]
        logs = [await self.log(topic) for topic in NAMES]
        anomalies = check(self.transactions, self.requests, self.pages, logs)
        assert not anomalies, "\n".join(map(str, anomalies))
        return logs
