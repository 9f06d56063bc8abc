"""The package as others install it: its wheel, and interpreters that have it, or a part of what it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

from tests.daemon.harness import ROOT, clean_environ

#: Folders of the source tree that are packages to install.
PACKAGES = ("actors", "broker", "plainsong", "pyspark_plainsong", "storage")
#: What Spark's Python workers import, and what the extra brings beside it.
SPARK = ("pyspark", "py4j", "pyarrow")
EXTRA = (*SPARK, "matplotlib")
#: How this project itself is installed here.
_OURS = ("plainsong", "__editable__")


def build_wheel(folder: Path) -> Path:
    """The wheel of the sources, from a copy: what an earlier build left beside them would get into it."""
    sources = folder / "sources"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", sources)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder))
    _pip("wheel", *options, str(sources))
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_interpreter(
    folder: Path, *, wheel: Path | None = None, only: Collection[str] = (), without: Collection[str] = ()
) -> Path:
    """An environment of its own in ``folder``; its interpreter, beside which the programs stand.

    Args:
      folder: to be made.
      wheel: is installed there; None: nothing of ours can be imported.
      only: of the packages that are installed here, these.
      without: or all but these.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    others = folder / "others"
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        name = path.name.partition("-")[0].partition(".")[0].lower()
        unwanted = path.suffix == ".pth" or path.name.startswith(_OURS) or name in without
        if not unwanted and (name in only or not only):
            (others / path.name).symlink_to(path)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{others}\n")
    for program in ("spark-submit", "find-spark-home", "find_spark_home.py"):
        (folder / "bin" / program).symlink_to(Path(sys.executable).with_name(program))
    if wheel is not None:
        options = ("--quiet", "--no-deps", "--no-index", "--no-compile")
        _pip("--python", str(python), "install", *options, str(wheel))
    return python


def environ_of(python: Path, **more: str) -> dict[str, str]:
    """Where its programs are the first on the PATH, and nothing says which Python or Spark to take."""
    unset = (
        "PYTHONPATH",
        "PYTHONHOME",
        "SPARK_HOME",
        "PYSPARK_PYTHON",
        "PYSPARK_DRIVER_PYTHON",
        "VIRTUAL_ENV",
        "JAVA_HOME",
    )
    found = {name: value for name, value in clean_environ().items() if name not in unset}
    return {**found, "PATH": f"{python.parent}:{found['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1", **more}


def _pip(*arguments: str) -> None:
    environ = {**clean_environ(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
