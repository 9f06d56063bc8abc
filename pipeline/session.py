"""The Spark session of a job: local unless told otherwise, in UTC, quiet, with the interpreter that runs the job."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING

from pipeline.surroundings import SUBMITTED, check_surroundings, package_roots, worker_environ

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[*]"
#: Whatever the cluster's own settings are.
ALWAYS = {"spark.sql.session.timeZone": "UTC"}
#: Where nobody runs spark-submit, which has its own ways to say these.
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


def build_session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Start Spark, some seconds.

    Args:
      name: of the application.
      master: None: what spark-submit says, else ``local[*]``.
      conf: settings of Spark, which go before ours.
    Returns:
      the session; whoever built it stops it.
    Raises:
      CommandFailed: Java, pyspark, pyarrow or the workers' interpreter is not as needed; nothing was started.
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
            settings |= LOCAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pyspark about itself, while it starts
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
    """Have PYSPARK_PYTHON run what reads and writes, and import it from what ``--py-files`` brings.

    For data sources that it finds itself Spark does neither: PYSPARK_DRIVER_PYTHON runs them, also on executors, and
    without the files. For one that is registered tasks get the files, but not the process that asks for a stream's
    offsets, on the driver's machine; it goes by the path.
    """
    from pyspark_plainsong import DefaultSource

    roots = package_roots()
    if roots:
        environment = session.sparkContext.environment
        before = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([*roots, *before])
    session.dataSource.register(DefaultSource)


def _quiet() -> None:
    """Errors are raised and told by the job; pyspark would write each to standard error before, with its whole trace."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    # Of a signal that comes while the JVM is asked something, py4j tells the whole trace, in its name and in nobody's.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_no_interrupt)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.exc_info[0] is KeyboardInterrupt)
