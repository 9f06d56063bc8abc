"""The Spark session of a job: local unless told otherwise, in UTC, quiet, with the interpreter that runs the job."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING

from pipeline.surroundings import SUBMITTED, check_surroundings, worker_environ

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
    else:
        _register(session)
    _quiet()
    return session


def _register(session: SparkSession) -> None:
    """Spark looks for data sources without what ``--py-files`` brings; one that is registered is imported with it."""
    from pyspark_plainsong import DefaultSource

    session.dataSource.register(DefaultSource)


def _quiet() -> None:
    """Errors are raised and told by the job; pyspark would write each to standard error before, with its whole trace."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
