"""Producers in this process, with a fault at a chosen write.

Each client fulfils the contract: if a request's outcome is unknown, it reopens its session and sends the missing
messages, or, without a session, sends the same request again. Readers poll after every step: they must never see a part
of an atomic batch, a message twice, or a producer's messages out of order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio
from broker_in_process import TOPICS

from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

PUBLISH, POLL, PRODUCERS = f"{TOPICS}/t/publish", f"{TOPICS}/t/poll", f"{TOPICS}/t/producers"
#: Writes a snapshot with every other request, so that faults also hit its rows.
SETTINGS = {"deduplication__snapshot_entries": 2}


class InDoubt(Exception):
    """The request failed, and its outcome is unknown."""


@dataclass(eq=False)
class Client:
    """A producer's own state: the ids that it sent, and the request whose outcome it must find out."""

    name: str
    session: bool
    epoch: int | None = None
    generation: int | None = None
    sent: list[int] = field(default_factory=list)
    """All ids whose outcome is known or must be found out; in the end each is stored once."""
    batches: list[tuple[int, ...]] = field(default_factory=list)
    doubtful: dict | None = None
    """The request without an answer, if any."""

    def request(self, ids, *, atomic=False):
        """Return the body of a publish with one message for each id."""
        body = {"messages": [f"{self.name}{each}" for each in ids], "producer": self.name, "sequenceIds": list(ids)}
        if self.session:
            body |= {"producerEpoch": self.epoch, "generation": self.generation}
        if atomic:
            body |= {"atomic": True, "routingKey": "k"}
            self.batches.append(tuple(ids))
        return body

    def names(self):
        return [f"{self.name}{each}" for each in sorted(set(self.sent))]


class Stage:
    """A topic, its store, and the producers."""

    def __init__(self, *, session):
        self.store = FaultyStore(MemoryStore())
        self.daemon = None
        self.clients = [Client("a", session), Client("b", session)]
        self._fault_at = None

    def fail_write(self, number, applied):
        """Make a write fail after ``number`` further writes have succeeded."""
        self._fault_at = self.store.calls["write"] + number
        self.store.fail_next("write", applied=applied, after=number)

    @property
    def has_failed(self):
        return self._fault_at is not None and self.store.calls["write"] > self._fault_at

    async def ask(self, method, path, body=None):
        """Return the answer, which must be 200. Raises InDoubt."""
        answer = await self.daemon.ask(method, path, body)
        if answer.status_code == 503:
            assert answer.json()["code"] in ("outcome_unknown", "storage_failed"), answer.text
            raise InDoubt(answer.text)
        assert answer.status_code == 200, answer.text
        return answer

    async def insist(self, method, path, body=None):
        """Retry the request until it succeeds; opening, reading and resending may be repeated."""
        while True:
            try:
                return await self.ask(method, path, body)
            except InDoubt:
                await trio.sleep(0.05)

    # --- producers -------------------------------------------------------------------------------

    async def open(self, client):
        """Open the session and return the last sequence id; None without a session."""
        if not client.session:
            return None
        told = (await self.insist("PUT", f"{PRODUCERS}/{client.name}", {})).json()
        assert told["epoch"] > (client.epoch or 0)
        client.epoch, client.generation = told["epoch"], told["generation"]
        return told["lastSequenceId"]

    async def send(self, client, ids, *, atomic=False):
        """Publish a message for each id. Raises InDoubt."""
        client.sent += ids
        client.doubtful = client.request(ids, atomic=atomic)
        receipt = (await self.ask("POST", PUBLISH, client.doubtful)).json()
        client.doubtful = None
        return receipt

    async def find_out(self, client):
        """Find out the outcome of the request in doubt, and make sure that it is stored."""
        request, client.doubtful = client.doubtful, None
        if request is None:
            return
        last = await self.open(client)
        if last is not None:
            missing = [each for each in request["sequenceIds"] if each > last]
            if request.get("atomic"):
                assert missing in ([], request["sequenceIds"]), "a part of an atomic request took effect"
            if not missing:
                return
            request |= {"producerEpoch": client.epoch, "generation": client.generation}
        receipt = (await self.insist("POST", PUBLISH, request)).json()
        assert receipt["lastSequenceId"] >= request["sequenceIds"][-1]

    # --- readers ---------------------------------------------------------------------------------

    async def look(self):
        """Check that batches are complete, receipts true, and messages present once and in their producer's order."""
        payloads = [each["payload"] for each in (await self.insist("POST", POLL, {})).json()]
        assert len(payloads) == len(set(payloads)), payloads
        for client in self.clients:
            own = [int(each[1:]) for each in payloads if each[0] == client.name]
            assert own == sorted(own)
            assert set(own) <= set(client.sent)
            for batch in client.batches:
                seen = [at for at, payload in enumerate(payloads) if payload in {f"{client.name}{i}" for i in batch}]
                assert len(seen) in (0, len(batch)), payloads
                assert seen == list(range(seen[0], seen[0] + len(seen))) if seen else True, payloads
        return payloads

    async def check(self):
        """Check at the end that every message is present once, and that the producers' records agree."""
        payloads = await self.look()
        known = {each["producer"]: each for each in (await self.insist("GET", PRODUCERS)).json()["producers"]}
        for client in self.clients:
            assert [each for each in payloads if each[0] == client.name] == client.names()
            if client.sent:
                assert known[client.name]["pushed"] == known[client.name]["persisted"] == max(client.sent)
