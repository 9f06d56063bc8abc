"""Backups over HTTP: holds a cut of the store while a client reads its objects, one backup at a time."""

from __future__ import annotations

import json
import logging
import re
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import trio

from broker.api.answers import json_answer
from broker.http.messages import Answer, flag
from plainsong.protocol.answers.service import EndedBackup
from plainsong.protocol.errors import BackupRunning, InvalidParameter, NotFound
from plainsong.protocol.names import topic_name
from storage.backup.cut import Cut, NotListed
from storage.backup.folder import FORMAT
from storage.backup.objects import MAX_OBJECT_BYTES
from storage.base import Unreadable
from storage.directory import write_whole
from storage.pace import Pace
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from actors.observe import Clock
    from broker.config.sections import BackupConfig
    from broker.http.messages import Request
    from plainsong.protocol.answers.service import BackupObjects, BegunBackup
    from storage.backup.cut import CutTopic, Page
    from storage.base import Store, StoreView

log = logging.getLogger(__name__)
#: After this time without a request, a new backup replaces the current one.
SILENT_S = 20.0
#: Values of ``?topic=`` for data that belongs to no topic.
SERVICE, METADATA = "service", "metadata"
#: Processor time to send a byte of an object.
SEND_S_PER_BYTE = 6e-9
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class _Held:
    """The current backup, and its cut of the store."""

    backup_id: str
    view: StoreView
    cut: Cut
    pace: Pace
    topics: list[CutTopic]
    cut_ms: int
    asked_s: float
    """Time of the last request, on trio's clock."""
    turn: trio.Lock = field(default_factory=trio.Lock)
    """Serializes its requests, so that a backup uses no more than its share, whatever its client does."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last request; 0 while one is being answered."""
        return 0.0 if self.turn.locked() else trio.current_time() - self.asked_s


@dataclass(slots=True)
class Backups:
    """The routes of backups."""

    store: Store
    clock: Clock
    instance: str
    version: str
    settings: BackupConfig
    file: Path | None = None
    """Stores the time of the last complete backup across restarts; None if it is not stored."""
    last_success_ms: int | None = None
    """When a client last reported a complete backup."""
    _held: _Held | None = None
    _beginning: bool = False

    def __post_init__(self) -> None:
        """Load the time of the last complete backup, if it can be read."""
        if self.file is None:
            return
        try:
            self.last_success_ms = int(json.loads(self.file.read_bytes())["lastSuccessMs"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the time of the last complete backup is not known", extra={"why": str(error)})

    async def _keep(self) -> None:
        """Store the time of the last complete backup; a failure is logged, and the backup still counts."""
        if self.file is None:
            return
        content = json.dumps({"format": 1, "lastSuccessMs": self.last_success_ms}).encode()
        try:
            with trio.CancelScope(shield=True):
                await in_thread(write_whole, self.file, content, max_wait_s=inf)
        except OSError as error:
            log.warning("the time of the last complete backup was not saved", extra={"why": str(error)})

    async def begin(self, request: Request) -> Answer:
        """Hold a cut that has every publish acknowledged before this request. Raises BackupRunning, StoreError."""
        around_damage = flag(request.parameters("withoutDamaged"), "withoutDamaged")
        held = self._held
        if self._beginning or (held is not None and held.silent_s < min(SILENT_S, self.settings.hold_s)):
            raise BackupRunning(
                "another backup is running",
                hint="wait for it, or end it: DELETE /v1/backups/ID; an idle one ends by itself",
            )
        self._beginning = True
        try:
            await self._end()
            self._held = held = await self._cut(around_damage=around_damage)
        finally:
            self._beginning = False
        begun: BegunBackup = {
            "format": FORMAT,
            "id": held.backup_id,
            "expiresMs": self._expires_ms(),
            "createdMs": held.cut_ms,
            "cutMs": held.cut_ms,
            "store": self.store.traits.kind,
            "exact": held.view.exact,
            "version": self.version,
            "instances": [self.instance],
            "topics": [each.shown() for each in held.topics],
            "leftOut": [each.shown() for each in held.cut.left_out],
        }
        return json_answer(begun)

    async def _cut(self, *, around_damage: bool) -> _Held:
        # Read before the view is made, so that everything acknowledged by then is in it, whatever the clock does.
        cut_ms = self.clock.now_ms()
        view = await self.store.pin(self.settings.hold_s)
        try:
            far = self.store.traits.shared
            pace = Pace(self.settings.bytes_per_s, on_pause=partial(view.renew, self.settings.hold_s), is_far=far)
            cut = Cut(view, pace, around_damage=around_damage)
            with _naming("the names of topics"):
                await cut.look()
                topics = await cut.topics()
        except BaseException:
            with trio.CancelScope(shield=True):
                await view.aclose()
            raise
        when = datetime.fromtimestamp(cut_ms / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        # Ids sort by the time of their cuts, also within a second, so that "the last two" can be chosen by id.
        backup_id = f"{when}-{cut_ms % 1000:03x}{secrets.token_hex(2)[:3]}"
        return _Held(backup_id, view, cut, pace, topics, cut_ms, trio.current_time())

    async def objects(self, request: Request) -> Answer:
        """List the objects of a topic, or of no topic, page by page. Raises NotFound, InvalidParameter, StoreError."""
        given = request.parameters("topic", "after")
        held = self._asked(request)
        about, after = given.get("topic", ""), given.get("after")
        async with held.turn:
            with _naming(about):
                page = await self._page(held, about, after)
        self._renew(held)
        found: BackupObjects = {
            "objects": [each.shown() for each in page.objects],
            "leftOut": [each.shown() for each in page.left_out],
            "next": page.next,
            "line": page.line,
            "expiresMs": self._expires_ms(),
        }
        return json_answer(found)

    async def _page(self, held: _Held, about: str, after: str | None) -> Page:
        if about == SERVICE:
            return await held.cut.service()
        if about == METADATA:
            return await held.cut.metadata()
        namespace, colon, topic = about.partition(":")
        if not colon:
            raise InvalidParameter(
                f"topic is {about[:80]!r}", hint=f"write namespace:topic, or {SERVICE}, or {METADATA}"
            )
        try:
            return await held.cut.page(topic_name(namespace, topic), after)
        except ValueError as error:
            raise InvalidParameter(f"after: {error}", hint="use `next` of the previous page") from None

    async def show(self, request: Request) -> Answer:
        """Return an object's bytes. Raises NotFound: list the objects again; StoreError."""
        request.parameters()
        held = self._asked(request)
        name = request.path["digest"]
        if request.room is not None:
            await request.room.take(MAX_OBJECT_BYTES, MAX_OBJECT_BYTES)
        try:
            async with held.turn:
                data = await held.cut.object(name)
                # Sending counts against the backup's share, like reading.
                await held.pace.rest(len(data) * SEND_S_PER_BYTE, 0)
        except NotListed:
            shown = name if _DIGEST.fullmatch(name) else name[:80]
            raise NotFound(
                f"no object {shown} was listed recently, or its rows have changed",
                hint="list the topic's objects again",
            ) from None
        if request.room is not None:
            request.room.must_have(len(data))
        self._renew(held)
        return Answer(200, data, "application/octet-stream")

    async def end(self, request: Request) -> Answer:
        """Release the cut; with ``complete`` record a complete backup. Raises NotFound: it has already ended."""
        complete = flag(request.parameters("complete"), "complete")
        self._asked(request)
        await self._end()
        if complete:
            self.last_success_ms = self.clock.now_ms()
            await self._keep()
        return json_answer(EndedBackup(id=request.path["backup"], ended=True))

    # --- the cut ---------------------------------------------------------------------------------

    def _asked(self, request: Request) -> _Held:
        """Return the cut of the request's path, and extend its hold. Raises NotFound."""
        held = self._held
        if held is None or held.backup_id != request.path["backup"] or self._is_over(held):
            raise NotFound(
                f"no backup {request.path['backup'][:80]!r} is running here",
                hint="it has ended, or runs at another instance; begin a new one if necessary",
            )
        self._renew(held)
        return held

    def _is_over(self, held: _Held) -> bool:
        return held.silent_s >= self.settings.hold_s

    def _renew(self, held: _Held) -> None:
        held.asked_s = trio.current_time()
        held.view.renew(self.settings.hold_s)

    def _expires_ms(self) -> int:
        return self.clock.now_ms() + round(self.settings.hold_s * 1000)

    async def _end(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.view.aclose()


@contextmanager
def _naming(about: str) -> Iterator[None]:
    """Add the topic and a remedy to an error about damaged rows."""
    try:
        yield
    except Unreadable as error:
        hint = "`plainsong backup create --without-damaged` backs up the rest"
        if about == SERVICE:
            hint = "these rows record what is committed: stop the daemon and copy its directory"
        raise Unreadable(f"{about}: {error.detail}", hint=hint) from error
