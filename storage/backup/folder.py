"""A folder of backups, on this machine or in an object store: objects by name, and a manifest for each, written last.

    FORMAT                       {"format":1}
    objects/ab/<sha256>          an object, as one zlib stream
    backups/<id>.json            a manifest: the topics, their objects, and its own digest
    lock                         held while backups are made or removed

A file is complete or absent (see ``storage.backup.files``), and a manifest is written once all of its objects are
stored. A ``create`` that is killed leaves objects that the next one finds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plainsong.protocol.keys import DamagedRow, parse_message_key, parse_payload_key
from plainsong.protocol.rows import decode_row
from storage.backup.objects import DamagedObject, compress, decode_rows, decompress, name_of
from storage.base import StoreError, StoreTooNew, StoreUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from storage.backup.files import BackupFiles
    from storage.base import Row

FORMAT = 1
FORMAT_NAME = "FORMAT"
OBJECTS = "objects"
BACKUPS = "backups"
#: Objects removed between two checks of the lock.
REMOVED_AT_ONCE = 1000
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
#: Number of objects that a reader keeps decoded: a step of a restore may end within an object.
_KEPT = 4


class DamagedManifest(StoreUnusable):
    """A manifest differs from what was written."""


def canonical(value: Mapping[str, Any]) -> bytes:
    """Encode a manifest in its canonical form: equal manifests have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own digest."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return {**rest, "sha256": hashlib.sha256(canonical(rest)).hexdigest()}


@dataclass(slots=True)
class Damage:
    """An object that does not match the manifest."""

    sha256: str
    topic: str | None
    """``namespace:topic``; None for the transaction service and namespaces."""
    from_ms: int | None
    to_ms: int | None
    messages: int
    why: str

    def shown(self) -> dict[str, object]:
        """Return it ready for JSON."""
        shown = {"sha256": self.sha256, "topic": self.topic, "fromMs": self.from_ms, "toMs": self.to_ms}
        return {**shown, "messages": self.messages, "why": self.why}


@dataclass(slots=True)
class Verified:
    """The result of verifying a backup."""

    objects: int = 0
    missing: list[str] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)
    manifest: str | None = None
    """Why the manifest cannot be read; then nothing else was checked."""

    @property
    def ok(self) -> bool:
        """True if the manifest and all objects exist and are intact."""
        return not self.missing and not self.damaged and self.manifest is None

    def shown(self) -> dict[str, object]:
        """Return it ready for JSON."""
        damaged = [each.shown() for each in self.damaged]
        found = {"ok": self.ok, "objects": self.objects, "missing": self.missing, "damaged": damaged}
        return found if self.manifest is None else {**found, "manifest": self.manifest}


@dataclass(slots=True)
class Pruned:
    """The result of pruning."""

    removed: list[str] = field(default_factory=list)
    """Ids of the removed backups."""
    objects: int = 0
    bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    """Backups with unreadable manifests → why. Then no object was removed, because these may need it."""

    def shown(self) -> dict[str, object]:
        """Return it ready for JSON."""
        damaged = [{"id": backup_id, "why": why} for backup_id, why in self.damaged.items()]
        return {"removed": self.removed, "objects": self.objects, "bytes": self.bytes, "damaged": damaged}


class HoldsCopy(StoreUnusable):
    """The place holds a second copy of a store, not backups."""


class BackupFolder:
    """A folder of backups. Methods block, and raise OSError or StoreError if a file cannot be read or written."""

    def __init__(self, files: BackupFiles) -> None:
        self.files = files
        self._check_lock: Callable[[], None] = lambda: None
        self._decoded: OrderedDict[str, list[Row]] = OrderedDict()

    @classmethod
    def make(cls, files: BackupFiles) -> BackupFolder:
        """Return the folder; create it, for its owner only, if necessary. Raises StoreUnusable, StoreError."""
        try:
            if _format_of(files) is None:
                files.make(FORMAT_NAME, canonical({"format": FORMAT}))
        except OSError as error:
            raise StoreUnusable(f"cannot create a folder of backups in {files.shown}: {error.strerror}") from error
        return cls.open(files)

    @classmethod
    def open(cls, files: BackupFiles) -> BackupFolder:
        """Open an existing folder. Raises HoldsCopy, StoreUnusable, StoreTooNew, StoreError."""
        try:
            text = _format_of(files)
        except OSError as error:
            raise StoreUnusable(f"{files.shown} cannot be read: {error.strerror}") from error
        if text is None:
            raise StoreUnusable(
                f"{files.shown} is not a folder of backups: it has no FORMAT",
                hint="`plainsong backup create` creates one",
            )
        try:
            found = json.loads(text)
            number, is_copy = found["format"], "store" in found
        except (ValueError, KeyError, TypeError):
            number, is_copy = None, False
        if is_copy:
            raise HoldsCopy(
                f"{files.shown} holds a second copy, which only its daemon writes",
                hint="list, verify and restore work here; for backups, name another prefix",
            )
        if type(number) is int and number > FORMAT:
            raise StoreTooNew(
                f"{files.shown} has format {number}; this version reads {FORMAT}", hint="use a newer plainsong"
            )
        if text != canonical({"format": FORMAT}):
            raise StoreUnusable(f"FORMAT in {files.shown} is damaged: {text[:40]!r}")
        return cls(files)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from making or removing backups here. Raises StoreInUse, StoreError."""
        with self.files.locked() as check:
            self._check_lock = check
            try:
                yield
            finally:
                self._check_lock = lambda: None

    # --- objects -------------------------------------------------------------------------------

    def stored(self) -> set[str]:
        """Return the names of all objects; some may be damaged."""
        found = (name.rpartition("/")[2] for name in self.files.sizes(OBJECTS))
        return {name for name in found if _DIGEST.fullmatch(name)}

    def digest(self, name: str) -> str | None:
        """Read an object and return the digest of its file; None if it is missing or damaged."""
        try:
            kept = self.files.get(_place(name))
            decompress(kept, name)
        except (FileNotFoundError, DamagedObject):
            return None
        return name_of(kept)

    def put(self, name: str, data: bytes) -> str:
        """Store an object, durably; return the digest of its file. Raises DamagedObject: the name is wrong."""
        if name_of(data) != name:
            raise DamagedObject(f"object {name} arrived with bytes that do not match its name")
        kept = compress(data)
        self.files.put(_place(name), kept)
        return name_of(kept)

    def get(self, name: str) -> bytes:
        """Return an object's bytes, checked. Raises DamagedObject; FileNotFoundError."""
        return decompress(self.files.get(_place(name)), name)

    def rows(self, name: str) -> list[Row]:
        """Return an object's rows; caches the last few objects. Raises DamagedObject, even for a missing one."""
        found = self._decoded.get(name)
        if found is None:
            try:
                found = decode_rows(self.get(name))
            except OSError as error:
                raise DamagedObject(f"object {name} cannot be read: {error.strerror}") from error
            self._decoded[name] = found
            while len(self._decoded) > _KEPT:
                self._decoded.popitem(last=False)
        return found

    # --- manifests -----------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """Return the ids of complete backups, oldest first."""
        found = (name.removeprefix(f"{BACKUPS}/") for name in self.files.sizes(BACKUPS))
        ids = (name.removesuffix(".json") for name in found if name.endswith(".json"))
        return sorted(each for each in ids if _ID.fullmatch(each))

    def last_id(self) -> str:
        """Return the id of the newest backup. Raises StoreUnusable: there is none."""
        ids = self.ids()
        if not ids:
            raise StoreUnusable(
                f"{self.files.shown} has no complete backup", hint="`plainsong backup create` creates one"
            )
        return ids[-1]

    def manifest(self, backup_id: str) -> dict[str, Any]:
        """Read and check a manifest. Raises DamagedManifest; StoreUnusable: there is none; StoreTooNew."""
        if not _ID.fullmatch(backup_id):
            raise StoreUnusable(f"{backup_id!r} is not the id of a backup", hint="`plainsong backup list` shows them")
        try:
            text = self.files.get(_manifest(backup_id))
        except FileNotFoundError as error:
            raise StoreUnusable(
                f"{self.files.shown} has no backup {backup_id}", hint="`plainsong backup list` shows them"
            ) from error
        try:
            found = json.loads(text)
            is_whole = isinstance(found, dict) and canonical(found) == text and sealed(found) == found
        except (ValueError, RecursionError):
            is_whole = False
        if not is_whole or found["id"] != backup_id:
            raise DamagedManifest(
                f"the manifest of backup {backup_id} is damaged", hint="restore another backup of this folder"
            )
        if found["format"] > FORMAT:
            raise StoreTooNew(
                f"backup {backup_id} has format {found['format']}; this version reads {FORMAT}",
                hint="use a newer plainsong",
            )
        return dict(found)

    def manifests(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the readable manifests by id, oldest first; and the ids of the others with their errors."""
        found: dict[str, dict[str, Any]] = {}
        unreadable: dict[str, str] = {}
        for each in self.ids():
            try:
                found[each] = self.manifest(each)
            except (DamagedManifest, StoreTooNew) as error:
                unreadable[each] = error.detail
            except OSError as error:
                unreadable[each] = f"the manifest of backup {each} cannot be read: {error.strerror}"
        return found, unreadable

    def put_manifest(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Complete a backup: from now on it exists. Returns the manifest with its digest. Raises StoreInUse."""
        complete = sealed({**manifest, "complete": True})
        name = _manifest(manifest["id"])
        self._check_lock()
        self.files.put(name, canonical(complete))
        try:
            # While this process was stopped, another may have taken the lock and removed objects.
            self._check_lock()
        except (StoreError, StoreUnusable):
            self.files.remove([name])
            raise
        return complete

    # --- verifying and removing ----------------------------------------------------------------

    def verify(
        self,
        manifest: Mapping[str, Any],
        *,
        deep: bool = False,
        topics: Callable[[Mapping[str, Any]], bool] = lambda topic: True,
        on_object: Callable[[int], None] = lambda size: None,
    ) -> Verified:
        """Read every object of a backup.

        Args:
          deep: also parse each row.
          topics: returns True for topics whose objects to read.
          on_object: called with the size of each.
        """
        found = Verified()
        seen: set[str] = set()
        for topic, entry in objects_of(manifest, topics):
            name = entry["sha256"]
            if name in seen:
                continue
            seen.add(name)
            found.objects += 1
            on_object(entry["bytes"])
            try:
                why = self._fault(entry, deep=deep)
            except FileNotFoundError:
                found.missing.append(name)
                continue
            if why:
                messages = entry["rows"] if entry.get("table") == "messages" else 0
                found.damaged.append(Damage(name, topic, entry["fromMs"], entry["toMs"], messages, why))
        return found

    def _fault(self, entry: Mapping[str, Any], *, deep: bool) -> str:
        """Return what is wrong with an object; empty if nothing. Raises FileNotFoundError."""
        name = entry["sha256"]
        try:
            kept = self.files.get(_place(name))
            data = decompress(kept, name)
            rows = decode_rows(data)
        except DamagedObject as error:
            return error.detail
        except FileNotFoundError:
            raise
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        if name_of(kept) != entry["kept"]:
            return "its file has changed, although its rows have not"
        if len(data) != entry["bytes"] or len(rows) != entry["rows"]:
            return f"it has {len(rows)} rows and {len(data)} bytes"
        return _first_fault(rows, entry.get("table", "")) if deep else ""

    def prune(self, keep_last: int, since_ms: int | None = None) -> Pruned:
        """Remove backups, then the objects that no remaining backup needs.

        If a manifest cannot be read, the objects of that backup are unknown: it stays, and so do all objects.

        Args:
          keep_last: keep this many of the newest readable ones, and the newest that left nothing out.
          since_ms: also keep those with a later cut.
        Raises:
          StoreInUse: another process has taken the lock.
        """
        manifests, damaged = self.manifests()
        whole = [each for each, manifest in manifests.items() if not manifest.get("leftOut")]
        newest = {*list(manifests)[max(0, len(manifests) - keep_last) :], *whole[-1:]}
        gone = [
            each
            for each, manifest in manifests.items()
            if each not in newest and (since_ms is None or manifest["cutMs"] < since_ms)
        ]
        self._check_lock()
        self.files.remove([_manifest(each) for each in gone])
        done = Pruned(gone, damaged=damaged)
        kept = {
            entry["sha256"]
            for each, manifest in manifests.items()
            if each not in gone
            for _, entry in objects_of(manifest)
        }
        sizes = self.files.sizes(OBJECTS)
        unused = [
            place
            for place in sizes
            if (name := place.rpartition("/")[2]) not in kept and not (damaged and _DIGEST.fullmatch(name))
        ]
        for at in range(0, len(unused), REMOVED_AT_ONCE):
            some = unused[at : at + REMOVED_AT_ONCE]
            self._check_lock()
            self.files.remove(some)
            done.objects, done.bytes = done.objects + len(some), done.bytes + sum(sizes[each] for each in some)
        return done


def _format_of(files: BackupFiles) -> bytes | None:
    try:
        return files.get(FORMAT_NAME)
    except FileNotFoundError:
        return None


def _place(name: str) -> str:
    return f"{OBJECTS}/{name[:2]}/{name}"


def _manifest(backup_id: str) -> str:
    return f"{BACKUPS}/{backup_id}.json"


def objects_of(
    manifest: Mapping[str, Any], topics: Callable[[Mapping[str, Any]], bool] = lambda topic: True
) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yield the objects of a backup: the topic (None for objects of no topic), and the manifest entry."""
    for entry in (*manifest["service"], *manifest["metadata"]):
        yield None, entry
    for topic in manifest["topics"]:
        if topics(topic):
            for entry in topic["objects"]:
                yield f"{topic['namespace']}:{topic['topic']}", entry


def _first_fault(rows: Iterable[Row], table: str) -> str:
    parse = {"messages": parse_message_key, "payloads": parse_payload_key}.get(table)
    try:
        for key, value in rows:
            if parse is not None:
                parse(key)
                decode_row(value)
    except DamagedRow as error:
        return f"row {key.hex()}: {error.detail}"
    return ""
