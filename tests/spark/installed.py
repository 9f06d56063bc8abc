"""The package as users install it: its wheel, and interpreters with all or some of its dependencies."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

from tests.daemon.harness import clean_environ

#: The packages that Spark's Python workers import, and all that the extra installs.
SPARK = ("pyspark", "py4j", "pyarrow")
EXTRA = (*SPARK, "deltalake", "matplotlib")
#: Prefixes of the files with which this project is installed here.
_OURS = ("plainsong", "__editable__")


def make_interpreter(
    folder: Path, *, wheels: Collection[Path] = (), only: Collection[str] = (), without: Collection[str] = ()
) -> Path:
    """Make a virtual environment in ``folder``; return its interpreter, which is next to its programs.

    Args:
      folder: the folder to create.
      wheels: installed in the environment; without any, it cannot import this project.
      only: include only these of the packages installed here; all if empty.
      without: exclude these.
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
    if wheels:
        install(python, wheels)
    return python


def install(python: Path, wheels: Collection[Path]) -> None:
    """Install this project's wheels into an environment, without their dependencies."""
    _pip("--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--no-compile", *map(str, wheels))


def environ_of(python: Path, **more: str) -> dict[str, str]:
    """Return environment variables that put this interpreter's programs first on the PATH.

    Variables that configure Python or Spark are left out.
    """
    unset = (
        "PYTHONPATH",
        "PYTHONHOME",
        "SPARK_HOME",
        "PYSPARK_PYTHON",
        "PYSPARK_DRIVER_PYTHON",
        "PYSPARK_SUBMIT_ARGS",
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
