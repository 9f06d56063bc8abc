"""A backup taken in the middle of a history, and its restore.

It is read like ``plainsong backup create`` and restored like ``plainsong backup restore``, without files. A daemon
starts on the new store, everything is read, and the checker of clients' histories judges it by the clients' records:
messages acknowledged before the backup began are present, messages sent after its end are not, a request or
transaction is present completely or not at all, and ids are unchanged.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

import trio

from actors.restoring import RestoredStore, RestoreRequest, RestoreRun
from plainsong.protocol.errors import PlainsongError
from storage.backup.cut import Cut, NotListed, Page
from storage.backup.objects import decode_rows
from storage.base import StoreError
from storage.copying import CopyRequest
from storage.pace import Pace
from tests.cluster.course import at_last, may_be_forgotten, settle
from tests.cluster.history.checker import check
from tests.cluster.history.cut import known_between
from tests.cluster.writers import TX
from tests.simulation.clocks import time_now
from tests.simulation.disk import Disk
from tests.simulation.instances import SimulatedInstance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from storage.base import Row, Store
    from tests.cluster.history.records import History, Transaction
    from tests.cluster.voices import Voice
    from tests.simulation.world import World

#: Number of times that a topic's pages are listed again if its rows change faster than they are read.
LISTINGS = 50
#: The instance that serves the restored store.
RESTORED = "restored"


@dataclass(slots=True)
class Backup:
    """A completed backup, and the times of its begin and end."""

    began_s: float
    ended_s: float
    manifest: dict[str, Any]
    objects: dict[str, bytes] = field(default_factory=dict)

    def rows(self, name: str) -> list[Row]:
        """Like ``BackupFolder.rows``."""
        return decode_rows(self.objects[name])

    def manifests(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Like ``BackupFolder.manifests``; there is only one."""
        return {"the backup": self.manifest}, {}


class _Strolling(Pace):
    """Pauses between steps in simulated time, so that much happens while a backup is read."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng

    async def rest(self, busy_s: float, size: int, *, read_rows: int | None = None) -> None:
        del busy_s, size, read_rows
        await time_now().sleep(self._rng.choice((0.0, 0.001, 0.01)))


async def take(world: World, rng: Random) -> None:
    """Try to take a backup of some instance's store at some moment."""
    await time_now().sleep(rng.random() * world.plan.length_s)
    for _ in range(3):
        life = rng.choice(world.instances).life
        if life is not None and life.daemon is not None:
            with suppress(PlainsongError):
                world.backup = await _read(life.store, life.daemon.directory.environment.clock.now_ms, rng)
                world.tell("a backup was taken")
                return
        await time_now().sleep(0.1)


async def _read(store: Store, now_ms: Callable[[], int], rng: Random) -> Backup:
    """Read a backup. Raises StoreError if the process has ended."""
    began_s, cut_ms = trio.current_time(), now_ms()
    view = await store.pin(60.0)
    cut = Cut(view, _Strolling(rng))
    await cut.look()
    backup = Backup(began_s, began_s, {"id": "simulated", "cutMs": cut_ms})
    topics = await cut.topics()
    # In the command's order: first the service and the metadata without a topic. If the view is not of a single moment,
    # a topic may contain rows of transactions that began after the service was read.
    service, _ = await _pages(cut, backup, lambda _: cut.service())
    metadata, _ = await _pages(cut, backup, lambda _: cut.metadata())
    found = []
    for each in topics:
        objects, line = await _pages(cut, backup, partial(cut.page, each.name))
        found.append({**each.shown(), "line": line, "objects": objects})
    backup.manifest |= {"service": service, "metadata": metadata, "topics": found, "exact": view.exact}
    await view.aclose()
    backup.ended_s = trio.current_time()
    return backup


async def _pages(
    cut: Cut, backup: Backup, page_from: Callable[[str | None], Awaitable[Page]]
) -> tuple[list[dict[str, object]], str | None]:
    """Read all objects of a topic; return them and the topic's line."""
    found: list[dict[str, object]] = []
    after: str | None = None
    while True:
        page = await _fetched(cut, backup, partial(page_from, after))
        found += [each.shown() for each in page.objects]
        after = page.next
        if after is None:
            return found, page.line


async def _fetched(cut: Cut, backup: Backup, list_page: Callable[[], Awaitable[Page]]) -> Page:
    """Return a page after reading all its objects; list the page again if rows have changed in between."""
    for _ in range(LISTINGS):
        page = await list_page()
        try:
            backup.objects |= {each.sha256: await cut.object(each.sha256) for each in page.objects}
        except NotListed:
            continue
        return page
    raise StoreError("its rows change faster than the backup reads them")


# --- restoring -------------------------------------------------------------------------------------


async def judged(world: World, backup: Backup, seed: int) -> list[tuple[str, str]]:
    """Restore the backup, start a daemon on the result, read everything, and return all violations."""
    latest_ms, disk = world.latest_ms() + 1, Disk(shared=False)
    # ``open`` takes a backup folder, but uses only its objects' rows.
    source = await RestoredStore.open(backup, backup.manifest, RestoreRequest(), latest_ms)  # type: ignore[arg-type]
    await RestoreRun(source, disk.memory, CopyRequest("backup")).run(lambda: latest_ms)
    instance = SimulatedInstance(RESTORED, disk, world.network, world.config, Random(seed))
    instance.clock.jump((latest_ms - instance.clock.peek_ms()) / 1000)
    await world.nursery.start(instance.run, [RESTORED])
    stage = world.stage.beside([instance], known_between(world.stage.history, backup.ended_s, backup.began_s), seed)
    anomalies: list[tuple[str, str]] = []
    async with stage.voice(seed) as voice:
        for each in list(stage.history.transactions):
            if await at_last(stage, partial(_is_unknown, voice, each)):
                stage.history.transactions.remove(each)
                if each.told_s < backup.began_s and not may_be_forgotten(stage, each):
                    anomalies.append(("lost", f"transaction {each.id} was begun, but is not known"))
    await settle(stage)
    _let_go_of_stored(stage.history)
    anomalies += check(stage.history)
    instance.kill()
    world.stage.surprises += [f"restored: {text}" for text in stage.surprises]
    return [(kind, f"restored: {text}") for kind, text in anomalies]


def _let_go_of_stored(history: History) -> None:
    """Drop the writes that are not restored: unpublished stores of transactions that were not committed by then. No
    committed reader would see them; plain readers saw them while they lasted."""
    for write in history.writes:
        if write.transaction is not None and write.transaction.state != "committed":
            write.ended_s, write.unanswered = inf, max(1, write.unanswered)
    history.polls = [poll for poll in history.polls if poll.committed or poll.instance == RESTORED]


async def _is_unknown(voice: Voice, transaction: Transaction) -> bool:
    return bool((await voice.tell("GET", f"{TX}/{transaction.id}"))["state"] == "unknown")
