"""The Spark session of a job: local by default, in UTC, quiet; and the checks before the JVM starts.

The checks cover Java, pyspark, pyarrow and the workers' interpreter, and report a missing one in one line.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from plainsong.cli.command import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[*]"
#: Settings that override the cluster's.
ALWAYS = {"spark.sql.session.timeZone": "UTC"}
#: Settings without spark-submit; with it, users set these themselves.
WITHOUT_SUBMIT = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
}
#: Spark 4 runs on this version of Java and newer ones.
JAVA = 17
#: Modules that Spark's Python workers import.
WORKERS_NEED = ("pyspark", "pyarrow")
#: Modules of ours that they import, which spark-submit may bring along in a zip.
OURS = ("pyspark_plainsong.source", "plainsong.protocol.frames")
#: The environment variable by which spark-submit starts a driver.
SUBMITTED = "PYSPARK_GATEWAY_PORT"
#: The folder of the module that makes Spark's Python processes start faster, for their PYTHONPATH.
STARTUP = Path(__file__).parent / "startup"
#: Packages of ours that jobs and workers import.
PACKAGES = ("pyspark_plainsong", "plainsong")
#: Modules that ``plainsong-spark`` installs.
EXTRA = ("pyspark", "py4j", "pyarrow", "deltalake", "matplotlib")
#: Those of its extra ``report``.
PLOTS = ("matplotlib",)
_PROBE_S = 30.0


def build_session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Start Spark, which takes some seconds.

    Args:
      name: the application's name.
      master: None: the one that spark-submit names, or else ``local[*]``.
      conf: settings of Spark; they win over ours.
    Returns:
      the session, which the caller stops.
    Raises:
      CommandFailed: Java, pyspark, pyarrow or the workers' interpreter is missing or unusable; nothing was started.
    """
    check_surroundings()
    os.environ.update(worker_environ())
    submitted = SUBMITTED in os.environ
    settings = dict(ALWAYS)
    if not submitted:
        master = master or DEFAULT_MASTER
        settings |= WITHOUT_SUBMIT
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            os.environ["PYTHONPATH"] = _joined([str(STARTUP)], os.environ)
            settings |= LOCAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyspark warns about itself while it starts
        from pyspark.sql import SparkSession  # here, so that help needs no pyspark

        builder = SparkSession.builder.appName(name)
        if master is not None:
            builder = builder.master(master)
        for key, value in {**settings, **(conf or {})}.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
    if not submitted:
        session.sparkContext.setLogLevel("ERROR")
    if submitted or not (session.sparkContext.master or "").startswith("local"):
        _register(session)
    _quiet()
    return session


def _register(session: SparkSession) -> None:
    """Register the data source, so that PYSPARK_PYTHON runs it, with the files of ``--py-files`` on its path.

    Without registration, Spark finds the data source itself, but runs it with PYSPARK_DRIVER_PYTHON, even on executors,
    and without those files. The process on the driver's machine that computes a stream's offsets never gets the files,
    so PYTHONPATH is set for it.
    """
    from pyspark_plainsong import DefaultSource

    roots = package_roots()
    if roots:
        environment = session.sparkContext.environment
        before = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([*roots, *before])
    session.dataSource.register(DefaultSource)


def _quiet() -> None:
    # The job reports errors itself; pyspark would write each to standard error as well, with a stack trace.
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    # A signal during a call to the JVM makes py4j log a stack trace, to its own logger and to the root logger.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_no_interrupt)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.exc_info[0] is KeyboardInterrupt)


# --- surroundings ------------------------------------------------------------------------------------


def worker_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables for Spark's processes: the interpreter, and the path of our packages.

    Existing values are kept. PYTHONPATH is extended if our packages are not in site-packages: Spark searches the
    folders of ``sys.path`` for data sources, and an editable install need not be in one.
    """
    found = {
        "PYSPARK_PYTHON": environ.get("PYSPARK_PYTHON") or sys.executable,
        "PYSPARK_DRIVER_PYTHON": environ.get("PYSPARK_DRIVER_PYTHON") or sys.executable,
    }
    roots = package_roots()
    if roots:
        found["PYTHONPATH"] = _joined(roots, environ)
    return found


def _joined(folders: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return PYTHONPATH with these folders before the others."""
    before = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([*(folder for folder in folders if folder not in before), *before])


def package_roots() -> list[str]:
    """Return the folders, or the zip of ``--py-files``, with our packages; empty if they are in site-packages."""
    installed = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    found: dict[str, None] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            root = str(Path(folder).absolute().parent)
            if root not in installed:
                found[root] = None
    return list(found)


def check_surroundings(environ: Mapping[str, str] = os.environ) -> None:
    """Check everything that a session needs. Raises CommandFailed: something is missing; nothing was done."""
    for package in ("pyspark", "pyarrow"):
        if find_spec(package) is None:
            raise _not_installed(package)
    _check_java(environ)
    _check_workers(environ)


def check_plots() -> None:
    """Check that a page with plots can be drawn. Raises CommandFailed: a package of the extra is not installed."""
    for package in PLOTS:
        if find_spec(package) is None:
            raise _not_installed(package)


@contextmanager
def extra_installed() -> Iterator[None]:
    """Wrap the imports of a running job. Raises CommandFailed: a package of the extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        raise _not_installed(package) from error


def _check_java(environ: Mapping[str, str]) -> None:
    home = environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environ.get("PATH"))
    hint = f"install Java {JAVA} or newer (Debian: apt-get install openjdk-{JAVA}-jre-headless), or set JAVA_HOME"
    if java is None:
        raise _missing("there is no Java on the PATH, and JAVA_HOME is not set", hint)
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_PROBE_S, check=True).stderr  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        where = f"JAVA_HOME is {home}, but " if home else ""
        raise _missing(f"{where}{java} cannot be run: {error}", hint) from error
    version = re.search(r'version "(?:1\.)?(\d+)', output)
    if version is not None and int(version[1]) < JAVA:
        raise _missing(f"{java} is Java {version[1]}; Spark needs {JAVA} or newer", hint)


def _check_workers(environ: Mapping[str, str]) -> None:
    """Check the interpreters of Spark's workers, if they differ from this one."""
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        python = environ.get(variable)
        if not python or python == sys.executable:
            continue
        here = f"unset {variable}, or set it to {sys.executable}"
        needed = WORKERS_NEED if SUBMITTED in environ else WORKERS_NEED + OURS
        lines = [
            "import sys, importlib",
            f"for name in {needed!r}: importlib.import_module(name)",
            "print('%d.%d' % sys.version_info[:2])",
        ]
        try:
            done = subprocess.run(  # noqa: S603
                [python, "-c", "\n".join(lines)],
                env={**environ, **worker_environ(environ)},
                capture_output=True,
                text=True,
                timeout=_PROBE_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise _missing(f"{variable} is {python}, which cannot be run: {error}", here) from error
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
            if any(repr(name.partition(".")[0]) in why for name in OURS):
                here += "; for executors that get the zip, use spark-submit: plainsong pipeline run --print"
            raise _missing(f"{variable} is {python}, which lacks what Spark's workers need: {why}", here)
        ours = "{}.{}".format(*sys.version_info[:2])
        if done.stdout.strip() != ours:
            says = f"{variable} is Python {done.stdout.strip()}, the job runs on {ours}"
            raise _missing(f"{says}; Spark needs the same version", here)


def _not_installed(package: str) -> CommandFailed:
    wanted = '"plainsong-spark[report]"' if package in PLOTS else "plainsong-spark"
    return _missing(f"{package} is not installed for {sys.executable}", f"pip install {wanted}")


def _missing(message: str, hint: str) -> CommandFailed:
    return CommandFailed(message, hint=hint, code=Exit.USAGE)
