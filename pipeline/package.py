"""The one zip that Spark's executors need: the connector, the frames it reads, and the jobs."""

from __future__ import annotations

import os
import zipfile
from importlib.util import find_spec
from pathlib import Path

from plainsong.cli.verb import CommandFailed

#: Workers need two files of ``protocol``; but spark-submit puts the zip before the driver's own packages, which
#: would then find no more of it than that.
PACKAGES = ("pyspark_plainsong", "pipeline", "protocol")
#: The earliest time a zip can hold, so that equal sources are equal zips.
_WHEN = (1980, 1, 1, 0, 0, 0)


def zip_files() -> dict[str, Path]:
    """Names in the zip, sorted, and the files. Raises CommandFailed: a package is not installed."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        folder = _folder(package)
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found[f"{package}/{path.relative_to(folder).as_posix()}"] = path
    return dict(sorted(found.items()))


def write_zip(out: Path) -> int:
    """Write it, whole or not at all; the number of files. Raises CommandFailed, OSError."""
    files = zip_files()
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, path in files.items():
                archive.writestr(zipfile.ZipInfo(name, _WHEN), path.read_bytes(), zipfile.ZIP_DEFLATED)
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    return len(files)


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CommandFailed(f"the package {package} is not installed", hint='pip install "plainsong[spark]"')
    return Path(spec.submodule_search_locations[0])
