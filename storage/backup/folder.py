"""A folder of backups: objects by name, and a manifest for each backup, written last.

    FORMAT                       {"format":1}
    objects/ab/<sha256>          an object, as one zlib stream
    backups/<id>.json            a manifest: the topics, their objects, and its own digest
    lock                         held while backups are made or removed

An object is written to a temporary file, synced and renamed, so it is complete or absent; likewise a manifest, once all
of its objects are stored. A ``create`` that is killed leaves objects that the next one finds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plainsong.protocol.keys import DamagedRow, parse_message_key, parse_payload_key
from plainsong.protocol.rows import decode_row
from storage.backup.objects import DamagedObject, compress, decode_rows, decompress, name_of
from storage.base import StoreInUse, StoreTooNew, StoreUnusable
from storage.directory import replace_file, sync_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from storage.base import Row

FORMAT = 1
FORMAT_NAME = "FORMAT"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
#: Number of objects that a reader keeps decoded: a step of a restore may end within an object.
_KEPT = 4


class DamagedManifest(StoreUnusable):
    """A manifest is not as it was written."""


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


class BackupFolder:
    """A folder of backups on this machine. Methods block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._objects = path / "objects"
        self._backups = path / "backups"
        self._decoded: OrderedDict[str, list[Row]] = OrderedDict()

    @classmethod
    def make(cls, path: Path) -> BackupFolder:
        """Return the folder; create it, for its owner only, if necessary. Raises StoreUnusable."""
        folder = cls(path)
        if (path / FORMAT_NAME).exists():
            return cls.open(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(each.name != "lock" for each in path.iterdir()):
                raise StoreUnusable(f"{path} has files and is not a folder of backups", hint="name an empty directory")
            path.chmod(0o700)
            folder._objects.mkdir(exist_ok=True)
            folder._backups.mkdir(exist_ok=True)
            replace_file(path / FORMAT_NAME, canonical({"format": FORMAT}))
        except OSError as error:
            raise StoreUnusable(f"{path} cannot be made a folder of backups: {error.strerror}") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> BackupFolder:
        """Open an existing folder. Raises StoreUnusable, StoreTooNew."""
        try:
            text = (path / FORMAT_NAME).read_bytes()
        except OSError as error:
            raise StoreUnusable(
                f"{path} is not a folder of backups: it has no FORMAT", hint="`plainsong backup create` makes one"
            ) from error
        try:
            number = json.loads(text)["format"]
        except (ValueError, KeyError, TypeError):
            number = None
        if type(number) is int and number > FORMAT:
            raise StoreTooNew(f"{path} has format {number}; this version reads {FORMAT}", hint="use a newer plainsong")
        if text != canonical({"format": FORMAT}):
            raise StoreUnusable(f"{path / FORMAT_NAME} is damaged: it says {text[:40]!r}")
        return cls(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from making or removing backups here. Raises StoreInUse."""
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise StoreInUse(f"another process makes or removes backups in {self.path}") from error
            yield
        finally:
            os.close(lock)

    # --- objects -------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """True if an object exists; it may be damaged."""
        return self._place(name).exists()

    def digest(self, name: str) -> str | None:
        """Read an object and return the digest of its file; None if it is missing or damaged. Raises OSError."""
        try:
            kept = self._place(name).read_bytes()
            decompress(kept, name)
        except (FileNotFoundError, DamagedObject):
            return None
        return name_of(kept)

    def put(self, name: str, data: bytes) -> str:
        """Store an object, durably; return the digest of its file. Raises DamagedObject: the name is wrong; OSError."""
        if name_of(data) != name:
            raise DamagedObject(f"object {name} arrived with bytes that do not match its name")
        place = self._place(name)
        place.parent.mkdir(exist_ok=True)
        kept = compress(data)
        replace_file(place, kept)
        return name_of(kept)

    def get(self, name: str) -> bytes:
        """Return an object's bytes, checked. Raises DamagedObject; FileNotFoundError."""
        return decompress(self._place(name).read_bytes(), name)

    def rows(self, name: str) -> list[Row]:
        """Return an object's rows; caches the last few objects. Raises DamagedObject, also for a missing one."""
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

    def _place(self, name: str) -> Path:
        return self._objects / name[:2] / name

    # --- manifests -----------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """Return the ids of complete backups, oldest first."""
        return sorted(each.stem for each in self._backups.glob("*.json") if _ID.fullmatch(each.stem))

    def last_id(self) -> str:
        """Return the id of the newest backup. Raises StoreUnusable: there is none."""
        ids = self.ids()
        if not ids:
            raise StoreUnusable(f"{self.path} has no complete backup", hint="`plainsong backup create` makes one")
        return ids[-1]

    def manifest(self, backup_id: str) -> dict[str, Any]:
        """Read and check a manifest. Raises DamagedManifest; StoreUnusable: there is none; StoreTooNew."""
        if not _ID.fullmatch(backup_id):
            raise StoreUnusable(f"{backup_id!r} is not the id of a backup", hint="`plainsong backup list` shows them")
        try:
            text = (self._backups / f"{backup_id}.json").read_bytes()
        except FileNotFoundError as error:
            raise StoreUnusable(
                f"{self.path} has no backup {backup_id}", hint="`plainsong backup list` shows them"
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
        """Complete a backup: from now on it exists. Returns the manifest with its digest. Raises OSError."""
        complete = sealed({**manifest, "complete": True})
        replace_file(self._backups / f"{manifest['id']}.json", canonical(complete))
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
            if not self.has(name):
                found.missing.append(name)
            elif why := self._fault(entry, deep=deep):
                messages = entry["rows"] if entry.get("table") == "messages" else 0
                found.damaged.append(Damage(name, topic, entry["fromMs"], entry["toMs"], messages, why))
        return found

    def _fault(self, entry: Mapping[str, Any], *, deep: bool) -> str:
        """Return what is wrong with an object; empty if nothing."""
        name = entry["sha256"]
        try:
            kept = self._place(name).read_bytes()
            data = decompress(kept, name)
            rows = decode_rows(data)
        except DamagedObject as error:
            return error.detail
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        if name_of(kept) != entry["kept"]:
            return "a bit of its file has changed, though not of its rows"
        if len(data) != entry["bytes"] or len(rows) != entry["rows"]:
            return f"it has {len(rows)} rows and {len(data)} bytes"
        return _first_fault(rows, entry.get("table", "")) if deep else ""

    def prune(self, keep_last: int, since_ms: int | None = None) -> Pruned:
        """Remove backups, then the objects that no remaining backup needs.

        If a manifest cannot be read, the objects of that backup are unknown: it stays, and so do all objects.

        Args:
          keep_last: keep this many of the newest readable ones, and the newest that left nothing out.
          since_ms: also keep those with a later cut.
        Raises OSError.
        """
        manifests, damaged = self.manifests()
        whole = [each for each, manifest in manifests.items() if not manifest.get("leftOut")]
        newest = {*list(manifests)[max(0, len(manifests) - keep_last) :], *whole[-1:]}
        gone = [
            each
            for each, manifest in manifests.items()
            if each not in newest and (since_ms is None or manifest["cutMs"] < since_ms)
        ]
        for each in gone:
            (self._backups / f"{each}.json").unlink()
        sync_directory(self._backups)
        done = Pruned(gone, damaged=damaged)
        kept = {
            entry["sha256"]
            for each, manifest in manifests.items()
            if each not in gone
            for _, entry in objects_of(manifest)
        }
        for shelf in sorted(self._objects.iterdir()):
            for place in sorted(shelf.iterdir()):
                if place.name not in kept and not (damaged and _DIGEST.fullmatch(place.name)):
                    done.objects, done.bytes = done.objects + 1, done.bytes + place.stat().st_size
                    place.unlink()
        return done


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
