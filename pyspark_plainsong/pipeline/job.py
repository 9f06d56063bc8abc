"""A job on Spark: its options, the run that its command gets, and how an error of Spark is reported in one line.

    @click.group(cls=VerbGroup)                # or one command; the names are the job's own
    def archive() -> None: ...

    @archive.command(examples=["plainsong pipeline run archive append orders --root archive"])
    @click.argument("topic")
    @job_options("archive")
    def append(run: Run, topic: str) -> None:
        rows = run.session().read.format("plainsong").options(**run.source()).option("subscribe", topic).load()

and in the package's ``__main__.py``: ``main(archive, "archive")``.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from plainsong.cli import job as any_job
from plainsong.cli.command import CommandFailed, Exit, one_line
from plainsong.cli.job import JobRun
from plainsong.cli.main import run as run_program
from pyspark_plainsong.pipeline.session import build_session, extra_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

F = TypeVar("F", bound="Callable[..., Any]")


@dataclass
class Run(JobRun):
    """One run of a job on Spark.

    Args:
      master, conf: Spark's settings, passed to ``build_session``.
      spark: a session to use; None: the first call of ``session`` finds or builds one, and ``close`` stops what was
        built.
    """

    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    spark: SparkSession | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._built = False

    def session(self) -> SparkSession:
        """The Spark session: the active one, or one that is started now. Raises CommandFailed: none can be started."""
        if self.spark is None and "pyspark" in sys.modules:
            from pyspark.sql import SparkSession

            self.spark = SparkSession.getActiveSession()  # a notebook's, or the tests': not ours to stop
        if self.spark is None:
            self.progress.note("starting Spark", "starting")
            self.spark = build_session(f"plainsong {self.job}", master=self.master, conf=self.conf)
            self._built = True
        return self.spark

    def source(self, **more: str) -> dict[str, str]:
        """The options of ``format("plainsong")`` that name the daemon, and ``more``."""
        found = {"url": ",".join(self.where.urls), "namespace": self.where.namespace}
        if self.where.token_file is not None:
            found["tokenFile"] = str(Path(self.where.token_file).absolute())
        if self.where.ca_file is not None:
            found["caFile"] = str(Path(self.where.ca_file).absolute())
        if self.where.insecure:
            found["insecure"] = "true"
        return {**found, **more}

    def failure_of(self, error: Exception) -> CommandFailed | None:
        """An error of pyspark or py4j in one line."""
        return failure_of_spark(error) if is_of_spark(error) else None

    def close(self) -> None:
        """Stop the session if this run has built it."""
        if self._built and self.spark is not None:
            self.spark.stop()
            self.spark, self._built = None, False


# --- options -----------------------------------------------------------------------------------------


def _pairs(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key.startswith("spark."):
            raise click.BadParameter(f"{each!r} is not spark.KEY=VALUE", ctx, param)
        pairs[key] = value
    return pairs


_OF_SPARK = {
    "master": click.option("--master", metavar="URL", help="Spark master; default: local[*]."),
    "conf": click.option(
        "--conf", multiple=True, callback=_pairs, metavar="KEY=VALUE", help="Spark setting. Repeatable."
    ),
}


def job_options(job: str, *, dry_run: bool = True) -> Callable[[F], F]:
    """Adds the options of all jobs and Spark's own; the command gets a ``Run`` as its first argument.

    Args:
      job: the job's name.
      dry_run: False for a command that changes nothing anyway.
    """

    def decorated(command: F) -> F:
        @wraps(command)
        def with_extra(*args: Any, **named: Any) -> Any:
            with extra_installed():
                return command(*args, **named)

        found: Any = any_job.job_options(partial(Run, job), _OF_SPARK, dry_run=dry_run)(with_extra)
        return found  # type: ignore[no-any-return] # it takes what the command takes

    return decorated


def main(command: click.Command, job: str) -> NoReturn:
    """``python -m pyspark_plainsong.pipeline.JOB``, which ``plainsong pipeline run JOB`` starts."""
    sys.exit(run_program(command, sys.argv[1:], f"plainsong pipeline run {job}"))


# --- errors of Spark -------------------------------------------------------------------------------

#: The last line of a Python traceback; the first of a Java one. A class that is named with its module may have any name,
#: as ours do (``DataLoss``); one without a module must look like an error, since a message may contain ``Word: …``.
_REASON = re.compile(
    r"^(?:Caused by: )?((?:[\w$]+\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception|Failed|NotFound|Lost|Warning)): (\S.*)$", re.M
)
#: Classes that only wrap another error.
_WRAPPERS = ("SparkException", "Py4JJavaError", "StreamingQueryException", "PythonException", "AnalysisException")
MAX_CHARS = 600


def reason_of(error: BaseException) -> str:
    """The line that says why: the innermost Python error in the text, or else its first line."""
    text = str(error)
    named = [(name.rpartition(".")[2], reason) for name, reason in _REASON.findall(text)]
    inner = [f"{name}: {reason}" for name, reason in named if name not in _WRAPPERS]
    found = inner[0] if inner else next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return one_line(found)[:MAX_CHARS]


def failure_of_spark(error: BaseException) -> CommandFailed:
    """Convert a Spark error to the error that the program reports."""
    from pyspark_plainsong.subscription import WAY_OUT  # here, so that help needs no pyspark

    reason = reason_of(error)
    if reason.endswith(f"; {WAY_OUT}"):  # the connector's hint; the jobs have their own option for this
        hint = "--may-lose continues with the remaining messages"
        return CommandFailed(reason.removesuffix(f"; {WAY_OUT}"), hint=hint, code=Exit.FAILED)
    return CommandFailed(reason, hint="--trace shows the full traceback", code=Exit.FAILED)


def is_of_spark(error: BaseException) -> bool:
    """True if an error comes from pyspark or from its JVM."""
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j")
