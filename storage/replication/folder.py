"""Objects in a folder, such as a mounted share.

The folder is opened once, and every object is reached through that descriptor. If the share is unmounted while a daemon
runs, or another one is mounted there, the daemon still writes to the folder that it began with, or fails; it never writes
into the empty folder below the mount point, where no standby would look.
"""

from __future__ import annotations

import os
import secrets
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from storage.base import StoreUnusable
from storage.replication.carry import ObjectStoreRefused, ObjectStoreUnavailable
from storage.replication.protocol import Fetched, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: In the name of a file that is being written, and in no object's. Left by a process that was killed.
WRITING = "#"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FolderObjects:
    """The objects in a folder. Methods block."""

    #: See ``carry.Objects``.
    can_exchange = False

    def __init__(self, path: Path) -> None:
        """Make the folder if there is none. Raises OSError."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._root = os.open(path, _FOLDER)
        weakref.finalize(self, os.close, self._root)

    def get(self, name: str) -> Fetched | None:
        """See ``BlockingObjects.get``."""
        try:
            with self._reported(f"reading {name}"), open(name, "rb", opener=self._open) as file:
                data = file.read()
                # The writer may have died between creating the object and syncing it.
                os.fsync(file.fileno())
                self._sync_above(name)
                return Fetched(data, "")
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """See ``BlockingObjects.put``."""
        with self._reported(f"writing {name}"), self._written(name, data) as written:
            os.replace(written, name, src_dir_fd=self._root, dst_dir_fd=self._root)
            self._sync_above(name)

    def create(self, name: str, data: bytes) -> Verdict:
        """See ``BlockingObjects.create``."""
        try:
            with self._reported(f"writing {name}"), self._written(name, data) as written:
                os.link(written, name, src_dir_fd=self._root, dst_dir_fd=self._root)
                self._sync_above(name)
        except FileExistsError:
            return Verdict.REFUSED
        except FileNotFoundError as error:
            hint = "start the daemon again once it is there"
            raise ObjectStoreRefused(f"writing {name}: {self._path} was removed", hint=hint) from error
        except ObjectStoreUnavailable:
            return Verdict.UNKNOWN
        return Verdict.DONE

    def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """Not possible in a folder. Raises StoreUnusable."""
        raise StoreUnusable("this object store cannot replace an object conditionally")

    def sizes(self, prefix: str) -> list[tuple[str, int]]:
        """See ``BlockingObjects.sizes``."""
        with self._reported(f"listing {prefix}"):
            return sorted(self._sizes(prefix))

    def remove(self, names: Sequence[str]) -> None:
        """See ``BlockingObjects.remove``."""
        with self._reported("removing objects"):
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._root)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC, 0o666, dir_fd=self._root)

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        """Raise errors of the folder as those of an object store, except that a file exists, or does not."""
        try:
            yield
        except (FileExistsError, FileNotFoundError):
            raise
        except PermissionError as error:
            hint = f"check the permissions of {self._path}, and that its file system has hard links"
            raise ObjectStoreRefused(f"{doing}: {error.strerror}", hint=hint) from error
        except OSError as error:
            raise ObjectStoreUnavailable(f"{doing}: {error.strerror}") from error

    @contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[str]:
        """Write a synced file next to an object, and yield its name; remove the file if it still has that name."""
        self._make_above(name)
        written = f"{name}{WRITING}{secrets.token_hex(4)}"
        try:
            with open(written, "xb", opener=self._open) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield written
        finally:
            with suppress(FileNotFoundError):
                os.unlink(written, dir_fd=self._root)

    def _make_above(self, name: str) -> None:
        for above in reversed(Path(name).parents[:-1]):
            with suppress(FileExistsError):
                os.mkdir(above, dir_fd=self._root)

    def _sync_above(self, name: str) -> None:
        """Make the names that lead to an object survive a power cut."""
        for above in Path(name).parents:
            descriptor = os.open(above, _FOLDER, dir_fd=self._root)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        try:
            descriptor = os.open(folder or ".", _FOLDER, dir_fd=self._root)
        except FileNotFoundError:
            return
        try:
            with os.scandir(descriptor) as entries:
                found = [(each.name, each.is_dir(follow_symlinks=False)) for each in entries]
            for entry, is_folder in found:
                name = f"{folder}/{entry}" if folder else entry
                if is_folder:
                    yield from self._sizes(name)
                elif WRITING not in entry:
                    with suppress(FileNotFoundError):  # removed since
                        yield name, os.stat(entry, dir_fd=descriptor).st_size
        finally:
            os.close(descriptor)
