"""The one Spark session of a test run: two cores, small, quiet, in UTC, on loopback."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Tasks are tried again, four times in all; without the second number a local session never does.
MASTER = "local[2,4]"
#: What starts sooner, trusts the jars, and does for minutes what would be faster only after them.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": QUICK_JVM,
}


def why_not() -> str | None:
    """Why there can be no session on this machine; None: there can."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "NOT TESTED: Spark, since there is no Java (Debian: apt-get install openjdk-17-jre-headless)"
    return None


def spark_environ() -> dict[str, str]:
    """What a process that runs Spark needs in its environment, beside what it has."""
    return {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}


def open_session() -> SparkSession:
    """Start the JVM, some 4 s, and open the session."""
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
