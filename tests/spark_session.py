"""The Spark session that a test run shares (two cores, small, quiet, in UTC, on loopback), and faster startup of JVMs.

python -m tests.spark_session     loads the classes that a session needs, so that the JVM can archive them
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark_plainsong.pipeline.streams import CHECKPOINTS, DISPOSABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

#: Tasks run up to four times; without the second number a local session does not retry.
MASTER = "local[2,4]"
_CACHE = Path(__file__).parents[1] / ".cache/spark"


def _spark() -> Path | None:
    """Return the folder of the installed package, without importing it."""
    spec = find_spec("pyspark")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _archive() -> Path:
    """Return the archive's path. An archive works only with the Java, the jars and the path with which it was made."""
    java, spark = shutil.which("java"), _spark()
    parts = [os.path.realpath(java)] if java else []
    parts.append(str(_CACHE))
    parts += [f"{path.name} {path.stat().st_mtime_ns}" for path in sorted((spark or _CACHE).glob("jars/*"))]
    return _CACHE / f"classes-{sha256(os.linesep.join(parts).encode()).hexdigest()[:16]}.jsa"


#: Loads classes from an archive, if it fits, instead of from three hundred jars, which saves 3 s of processor time per
#: start. A JVM silently ignores a missing or unsuitable archive.
CLASSES = _archive()
#: JVM options for a fast start, without verification and without optimizations that pay off after minutes.
QUICK_JVM = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    f"-XX:SharedArchiveFile={CLASSES} -XX:ArchiveRelocationMode=0 -Xlog:disable"
)
#: Spark's launcher is a separate, short-lived JVM.
LAUNCHER_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: True by default: Spark plans the rest of a query again after each of its stages.
ADAPTIVE = "spark.sql.adaptive.enabled"
#: Settings for sessions with few rows. Programs that are killed, and some jobs on a cluster, keep Spark's defaults.
FEW_ROWS = {
    # Generating, compiling and warming up a class for each query costs more than it gains on a few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # So does planning again: a tenth of the JVM's time. Tests of what jobs write and report turn it on again.
    ADAPTIVE: "false",
    # Without it, Spark starts one task for each of the default 200 partitions, and nearly all of them are empty.
    "spark.sql.shuffle.partitions": "2",
    # The default starts four times as many processes: 45 per micro-batch, most of them readlink.
    CHECKPOINTS: DISPOSABLE,
}
#: The same in PYSPARK_SUBMIT_ARGS, for drivers that tests start as processes; spark-submit ignores it.
FEW_ROWS_ARGS = " ".join([*(f"--conf {name}={value}" for name, value in FEW_ROWS.items()), "pyspark-shell"])
SETTINGS = {
    **FEW_ROWS,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.warehouse.dir": str(_CACHE / "warehouse"),
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": QUICK_JVM,
}


def why_not() -> str | None:
    """Return the reason why this machine cannot run a session; None if it can."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "NOT TESTED: Spark, since there is no Java (Debian: apt-get install openjdk-17-jre-headless)"
    return None


def own_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which drivers have Spark's defaults instead of ``FEW_ROWS``."""
    return {name: value for name, value in environ.items() if name != "PYSPARK_SUBMIT_ARGS"}


def spark_environ() -> dict[str, str]:
    """Return the variables that a process with Spark needs in addition to its environment."""
    return {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}


def spark_home() -> Path | None:
    """Return the installed package as Spark's home, without its zip of Python code; None if it is not installed.

    Spark's Python processes would import the zip, and each of hundreds would compile everything. Without it they import
    the installed package.
    """
    spark, home = _spark(), _CACHE / "home"
    if spark is None:
        return None
    home.mkdir(parents=True, exist_ok=True)
    for path in spark.iterdir():
        link = home / path.name
        if path.name != "python" and (not link.is_symlink() or link.readlink() != path):
            with tempfile.TemporaryDirectory(dir=_CACHE) as folder:  # other processes may be doing the same
                made = Path(folder) / path.name
                made.symlink_to(path)
                made.replace(link)
    return home


def make_archive() -> None:
    """Write ``CLASSES`` unless it exists. Writing takes half a minute."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if CLASSES.exists():
            return
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            made = Path(folder) / CLASSES.name
            options = f"{LAUNCHER_JVM} -XX:ArchiveClassesAtExit={made} -Xlog:disable"
            environ = {**os.environ, "SPARK_SUBMIT_OPTS": options}
            command = [sys.executable, "-m", "tests.spark_session"]
            output = subprocess.DEVNULL
            subprocess.run(command, env=environ, cwd=_CACHE.parents[1], check=True, stdout=output, stderr=output)
            if made.exists():
                made.replace(CLASSES)


def open_session() -> SparkSession:
    """Start the JVM, which takes about 4 s, and open the session."""
    os.environ.update(spark_environ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.appName("plainsong tests").master(MASTER)
        for key, value in SETTINGS.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def _load_classes() -> None:
    """Use a little of everything in a session, and wait for the end of its JVM, which may then write an archive."""
    SETTINGS["spark.driver.extraJavaOptions"] = LAUNCHER_JVM
    session = open_session()
    gateway = session.sparkContext._gateway
    with tempfile.TemporaryDirectory() as folder:
        rows = session.createDataFrame([(number, str(number % 3)) for number in range(50)], "number long, text string")
        rows.write.parquet(f"{folder}/rows")
        session.read.parquet(f"{folder}/rows").groupBy("text").count().orderBy("text").collect()
        query = session.readStream.schema(rows.schema).parquet(f"{folder}/rows").writeStream.format("parquet")
        query = query.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
        query.start(f"{folder}/streamed").awaitTermination()
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    _load_classes()
