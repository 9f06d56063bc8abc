"""The files of an archive on HDFS, S3 and the like, through the Hadoop classes that Spark brings."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from py4j.protocol import Py4JJavaError

from pyspark_plainsong.pipeline.locks import leased

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from pyspark_plainsong.pipeline.locks import Hold


class HadoopFiles:
    """Files below a URL that Hadoop can open; see ``pyspark_plainsong.pipeline.files.Files``.

    It calls classes in the driver's JVM, so it does not work with Spark Connect.
    """

    def __init__(self, root: str, spark: SparkSession) -> None:
        self._root = root.rstrip("/")
        self._gateway: Any = spark.sparkContext._gateway
        self._jvm: Any = spark._jvm
        self._conf: Any = spark._jsc.hadoopConfiguration()
        self._system: Any = self._path("").getFileSystem(self._conf)

    def url(self, path: str) -> str:
        """See ``Files``."""
        return f"{self._root}/{path}" if path else self._root

    def table(self, path: str) -> str:
        """See ``Files``."""
        return quote(self.url(path), safe=":/@%")

    def make_folder(self, path: str) -> None:
        """See ``Files``."""
        self._system.mkdirs(self._path(path))

    def read(self, path: str) -> bytes | None:
        """See ``Files``."""
        at = self._path(path)
        if not self._system.exists(at):
            return None
        stream = self._system.open(at)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def write(self, path: str, data: bytes) -> None:
        """See ``Files``. Where a rename copies (S3), the file still appears only when it is complete."""
        at, beside = self._path(path), self._path(f"{path}.{secrets.token_hex(4)}.tmp")
        stream = self._system.create(beside, True)
        stream.write(bytearray(data))
        stream.close()
        context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(at.toUri(), self._conf)
        rename = self._jvm.org.apache.hadoop.fs.Options.Rename
        options = self._gateway.new_array(rename, 1)
        options[0] = rename.OVERWRITE
        context.rename(context.makeQualified(beside), context.makeQualified(at), options)

    def create(self, path: str, data: bytes) -> bool:
        """Create a file; False: it exists."""
        try:
            stream = self._system.create(self._path(path), False)
        except Py4JJavaError as error:
            if "FileAlreadyExistsException" in str(error.java_exception.getClass().getName()):
                return False
            raise
        stream.write(bytearray(data))
        stream.close()
        return True

    def discard(self, path: str) -> None:
        """Remove a file, if it exists."""
        self._system.delete(self._path(path), False)

    def lock(self, path: str, what: str, say: Callable[[str], None]) -> AbstractContextManager[Hold]:
        """See ``Files``. Uses leases in a folder of that name, since there are no locks."""
        return leased(self, path, what, say=say)

    def sizes(self, folder: str) -> dict[str, int]:
        """See ``Files``."""
        found = {each.getPath().getName(): int(each.getLen()) for each in self._statuses(folder) if each.isFile()}
        return {name: found[name] for name in sorted(found) if name.endswith(".parquet") and name[0] not in "._"}

    def names(self, folder: str) -> list[str]:
        """See ``Files``."""
        return sorted(each.getPath().getName() for each in self._statuses(folder))

    def settle(self, paths: Sequence[str]) -> None:
        """See ``Files``. A closed file is as durable as the file system makes it."""

    def remove(self, folder: str) -> None:
        """See ``Files``."""
        self._system.delete(self._path(folder), True)

    def modified_ms(self, folder: str) -> int | None:
        """See ``Files``."""
        try:
            own = self._system.getFileStatus(self._path(folder)).getModificationTime()
        except Py4JJavaError as error:
            if _is_missing(error):
                return None
            raise
        return max(int(own), *(int(each.getModificationTime()) for each in self._statuses(folder)), 0)

    def _statuses(self, folder: str) -> list[Any]:
        try:
            return list(self._system.listStatus(self._path(folder)))
        except Py4JJavaError as error:
            if _is_missing(error):
                return []
            raise

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.url(path))


def _is_missing(error: Py4JJavaError) -> bool:
    return "FileNotFoundException" in str(error.java_exception.getClass().getName())
