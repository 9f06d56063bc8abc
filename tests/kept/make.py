"""Makes ``tests/kept/VERSION``, a data directory and its required answers: ``python -m tests.kept.make VERSION``.

Run it once, on the last commit that writes a layout. A finished directory never changes. ``fill`` below makes its
content, and later versions that open it must answer as in its ``answers.json``.

The directory is copied while the daemon still runs, as if it had been killed: its topics have not written a checkpoint,
so there are rows to replay.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import trio

from actors.janitor import Janitor
from actors.observe import NoObserver
from actors.restoring import RestoredStore, RestoreRequest, RestoreRun
from actors.settings import RetentionConfig
from storage.backup.files import LocalFiles
from storage.backup.folder import BackupFolder
from storage.config import StorageConfig
from storage.copying import CopyRequest
from storage.leveldb import LevelDBOptions, LevelDBStore
from tests.broker.broker_in_process import InProcess, SetClock, in_process
from tests.kept.asking import ASKED_MS, CENTURY_S, TOPICS, ask_everything

#: Small enough to leave several table files, on more than one level, and rows in the log.
SMALL = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16))
#: LevelDB's own text log, which contains no rows.
LEFT_OUT = ("LOG", "LOG.old")


class Filling:
    """The daemon to be filled, and its clock."""

    def __init__(self, daemon: Any, store: LevelDBStore) -> None:
        self.daemon, self.store, self.clock = daemon, store, daemon.clock

    async def call(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        """Send a request one millisecond after the previous one; return the answer's JSON."""
        self.clock.ms += 1
        answer = await self.daemon.call(method, path, json=body, status=status)
        return answer.json() if answer.content else None

    async def create(self, topic: str, ttl_s: int = CENTURY_S, **properties: Any) -> None:
        await self.call("PUT", f"{TOPICS}/{topic}", {"ttl": ttl_s, **properties})

    async def publish(self, topic: str, *payloads: object, status: int = 200, **more: Any) -> Any:
        return await self.call("POST", f"{TOPICS}/{topic}/publish", {"messages": payloads, **more}, status=status)

    async def begin(self, **more: Any) -> int:
        return int((await self.call("POST", "/v1/transactions", more))["writePointer"])

    async def clean(self) -> None:
        """Run a round of the janitor."""
        settings = RetentionConfig(delete_grace_s=3600)
        await Janitor(self.store, self.daemon.service.directory, self.clock, NoObserver(), settings).clean_all()


async def fill(made: Filling) -> None:
    """Write some of everything that a store contains."""
    await made.call("PUT", "/v1/namespaces/shop/properties", {"deduplication": "enabled"})
    await plain_messages(made)
    await producers(made)
    await generations_and_expiry(made)
    await transactions(made)
    await staged(made)
    await many_topics(made)


async def plain_messages(made: Filling) -> None:
    await made.create("orders")
    for request in range(16):
        await made.publish("orders", *(f"order {request}.{index} " + "x" * (index % 7) * 20 for index in range(20)))
    with_attributes = [
        {"payload": "a", "attributes": {"colour": "red"}},
        {"base64": "AP8="},
        {"payload": "", "ttlSeconds": CENTURY_S},
    ]
    await made.publish("orders", *with_attributes)
    await made.publish("orders", {"payload": "expires by itself", "ttlSeconds": 60}, "stays")
    first = (await made.call("POST", f"{TOPICS}/orders/poll", {"limit": 10}))[-1]["id"]
    await made.call("PUT", f"{TOPICS}/orders/readers/billing", {"position": first})
    await made.call("PUT", f"{TOPICS}/orders/readers/audit", {"position": "00" * 20})


async def producers(made: Filling) -> None:
    await made.create("counted", deduplication="enabled")
    session = await made.call("PUT", f"{TOPICS}/counted/producers/till", {"retentionSeconds": 15_552_000})
    for request in range(8):
        ids = [request * 10 + index for index in range(10)]
        said = {"producer": "till", "producerEpoch": session["epoch"], "sequenceIds": ids}
        await made.publish("counted", *(f"till {number}" for number in ids), **said)
    await made.publish("counted", "one", "two", "three", producer="nobody's", sequenceIds=[3, 5, 9], atomic=True)
    await made.publish("counted", "at once", "or never", atomic=True)
    await made.call("PUT", f"{TOPICS}/counted/producers/fenced", {})
    await made.call("PUT", f"{TOPICS}/counted/producers/fenced", {})


async def transactions(made: Filling) -> None:
    await made.create("payments")
    committed = await made.begin(clientId="committed")
    await made.publish("payments", "c1", "c2", transactionWritePointer=committed)
    await made.call("POST", f"/v1/transactions/{committed}/commit")
    stored = await made.begin(clientId="stored")
    for segment in ("won", "lost"):
        body = {
            "transactionWritePointer": stored,
            "messages": [f"{segment} {n}" for n in range(60)],
            "segment": segment,
        }
        await made.call("POST", f"{TOPICS}/payments/store", body)
    await made.publish("payments", "last", transactionWritePointer=stored, segments=["won"])
    await made.call("POST", f"/v1/transactions/{stored}/commit")
    aborted = await made.begin(clientId="aborted")
    await made.publish("payments", "a1", "a2", transactionWritePointer=aborted)
    await made.call("POST", f"/v1/transactions/{aborted}/abort")
    rolled = await made.begin(clientId="rolled back in part", type="long")
    answer = await made.publish("payments", "r1", transactionWritePointer=rolled)
    await made.publish("payments", "r2", transactionWritePointer=rolled)
    await made.call("POST", f"{TOPICS}/payments/rollback", answer)
    invalid = await made.begin(clientId="invalid")
    await made.publish("payments", "i1", "i2", transactionWritePointer=invalid)
    await made.call("POST", f"/v1/transactions/{invalid}/invalidate")
    await made.publish("payments", "without a pointer")
    open_ = await made.begin(clientId="open", type="long")
    await made.publish("payments", "o1", "o2", transactionWritePointer=open_)
    await made.publish("orders", "o3", transactionWritePointer=open_)
    checkpoint = await made.call("POST", f"/v1/transactions/{open_}/checkpoint")
    await made.publish("payments", "o4", transactionWritePointer=checkpoint["writePointer"])
    prepared = await made.begin(clientId="prepared", timeoutSeconds=3600)
    body = {"transactionWritePointer": prepared, "messages": ["p1", "p2"], "segment": "0.a"}
    await made.call("POST", f"{TOPICS}/payments/store", body)
    await made.call("POST", f"/v1/transactions/{prepared}/prepare", {"changes": ["cm93LTE="]})
    await made.publish("payments", "behind the undecided ones")


async def staged(made: Filling) -> None:
    await made.create("parts", deduplication="enabled")
    for segment in ("0.a", "1.a", "1.b"):
        body = {"producer": "job", "segment": segment, "sequenceIds": list(range(50))}
        body["messages"] = [f"{segment} {n}" for n in range(50)]
        await made.call("POST", f"{TOPICS}/parts/store", body)
    await made.publish("parts", producer="job", sequenceIds=[0], segments=["0.a", "1.b"])
    body = {"producer": "job", "segment": "2.a", "sequenceIds": [0, 1], "messages": ["later one", "later two"]}
    await made.call("POST", f"{TOPICS}/parts/store", body)
    await made.publish("parts", "beside")


async def generations_and_expiry(made: Filling) -> None:
    await made.create("again")
    await made.publish("again", *(f"of the first generation {n}" for n in range(100)))
    await made.call("DELETE", f"{TOPICS}/again")
    await made.create("again")
    await made.publish("again", *(f"of the second generation {n}" for n in range(100)))
    await made.create("cleaned")
    await made.publish("cleaned", *(f"cleaned {n}" for n in range(200)))
    await made.call("DELETE", f"{TOPICS}/cleaned")
    await made.create("short", ttl_s=3600)
    await made.publish("short", *(f"long ago {n}" for n in range(100)))
    made.clock.ms += 2 * 3_600_000
    await made.publish("short", *(f"an hour ago {n}" for n in range(100)))
    await made.clean()
    made.clock.ms += 1_800_000
    await made.publish("short", *(f"just now {n}" for n in range(100)))
    await made.create("deleted")
    await made.publish("deleted", *(f"comes back {n}" for n in range(50)))
    await made.call("DELETE", f"{TOPICS}/deleted")


async def many_topics(made: Filling) -> None:
    for number in range(12):
        await made.create(f"of-many-{number:02}", max_bytes=10_000_000)
    for request in range(6):
        for number in range(12):
            await made.publish(f"of-many-{number:02}", *(f"{request}.{index}" for index in range(8)))


async def make(directory: Path) -> None:
    """Make a data directory in ``directory / "data"``, and its answers."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "data"
        async with await LevelDBStore.open(path, SMALL) as store, in_process(store=store, clock=SetClock()) as daemon:
            await fill(Filling(daemon, store))
            assert daemon.clock.ms < ASKED_MS
            await back_up(daemon, directory / "backup")
            shutil.copytree(path, directory / "data", ignore=shutil.ignore_patterns(*LEFT_OUT))
    # The lock file contains the pid of the process that made the directory.
    (directory / "data/plainsong.lock").write_bytes(b"")
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(directory / "data", Path(scratch) / "data")
        write_answers(directory / "answers.json", await ask_everything(copy))
        await restore(directory / "backup", Path(scratch) / "restored")
        write_answers(directory / "restored.json", await ask_everything(Path(scratch) / "restored"))


async def back_up(daemon: InProcess, path: Path) -> None:
    """Make a folder with one backup of the daemon, like ``plainsong backup create``."""
    folder = BackupFolder.make(LocalFiles(path))
    begun = (await daemon.call("POST", "/v1/backups")).json()
    prefix = f"/v1/backups/{begun['id']}/objects"

    async def objects(about: str) -> list[dict[str, Any]]:
        page = (await daemon.call("GET", prefix, params={"topic": about})).json()
        assert page["next"] is None
        for each in page["objects"]:
            data = (await daemon.call("GET", f"{prefix}/{each['sha256']}")).content
            each["kept"] = folder.put(each["sha256"], data)
        found: list[dict[str, Any]] = page["objects"]
        return found

    service, metadata = await objects("service"), await objects("metadata")
    topics = [
        {
            **topic,
            "line": None,
            "messages": 0,
            "bytes": 0,
            "objects": await objects(f"{topic['namespace']}:{topic['topic']}"),
        }
        for topic in begun["topics"]
    ]
    folder.put_manifest({**begun, "topics": topics, "service": service, "metadata": metadata})
    await daemon.call("DELETE", f"/v1/backups/{begun['id']}")


async def restore(path: Path, to: Path) -> None:
    """Restore a folder's only backup to a data directory, at the time of the requests."""
    folder = BackupFolder.open(LocalFiles(path))
    manifest = folder.manifest(folder.last_id())
    assert folder.verify(manifest, deep=True).ok
    source = await RestoredStore.open(folder, manifest, RestoreRequest(), ASKED_MS)
    async with await LevelDBStore.open(to) as target:
        await RestoreRun(source, target, CopyRequest("kept")).run(lambda: ASKED_MS)


def write_answers(path: Path, answers: dict[str, Any]) -> None:
    lines = [f"{json.dumps(question)}: {json.dumps(answer, sort_keys=True)}" for question, answer in answers.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    trio.run(make, Path(__file__).parent / sys.argv[1])
