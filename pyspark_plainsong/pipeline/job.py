"""What all jobs share: their options, the run they are given, and how it ends.

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
import signal
import sys
import threading
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from plainsong.cli.main import run as run_program
from plainsong.cli.verb import CommandFailed, Exit, exit_of, json_option, one_line
from plainsong.cli.where import Where, where_options
from plainsong.protocol.errors import PlainsongError
from pyspark_plainsong.pipeline.metrics import Metrics
from pyspark_plainsong.pipeline.progress import Progress
from pyspark_plainsong.pipeline.session import build_session, extra_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from plainsong import Client

F = TypeVar("F", bound="Callable[..., Any]")
#: A job asks again for so long when a daemon does not answer; somebody at a terminal does not.
DEADLINE_S = 60.0


@dataclass
class Run:
    """One run of a job, as its command is given it.

    Args:
      job: its name.
      where: the daemon.
      spark: a session to use; None: one is built when it is asked for, and stopped at the end.
    """

    job: str
    where: Where = field(default_factory=Where)
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    dry_run: bool = False
    as_json: bool = False
    progress: Progress = None  # type: ignore[assignment] # made below, of the job's name
    metrics: Metrics = None  # type: ignore[assignment]
    spark: SparkSession | None = None

    def __post_init__(self) -> None:
        self.progress = self.progress or Progress(self.job, as_json=self.as_json)
        self.metrics = self.metrics or Metrics(self.job)
        self._built = False

    def session(self) -> SparkSession:
        """The Spark session: the one there is, or one started now. Raises CommandFailed: it cannot be, and why."""
        if self.spark is None and "pyspark" in sys.modules:
            from pyspark.sql import SparkSession

            self.spark = SparkSession.getActiveSession()  # a notebook's, or the tests'; not ours to stop
        if self.spark is None:
            self.progress.note("starting Spark", "starting")
            self.spark = build_session(f"plainsong {self.job}", master=self.master, conf=self.conf)
            self._built = True
        return self.spark

    def client(self, *topics: str) -> AbstractContextManager[Client]:
        """A client of the daemon, for a ``with``; a missing one of ``topics`` is told with the nearest there is."""
        return self.where.client(*topics, retry=True, deadline_s=DEADLINE_S)

    def source(self, **more: str) -> dict[str, str]:
        """Options of ``format("plainsong")`` that say which daemon, and ``more``."""
        found = {"url": ",".join(self.where.urls), "namespace": self.where.namespace}
        if self.where.token_file is not None:
            found["auth.tokenFile"] = str(Path(self.where.token_file).absolute())
        return {**found, **more}

    def warn(self, text: str, warning: str, **fields: Any) -> None:
        """Warn, and count it."""
        self.progress.warn(text, warning, **fields)
        self.metrics.add("warnings_total", warning=warning)

    def close(self) -> None:
        """Stop the session, if it was built here."""
        if self._built and self.spark is not None:
            self.spark.stop()
            self.spark, self._built = None, False


# --- options -----------------------------------------------------------------------------------------


def _pairs(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key.startswith("spark."):
            raise click.BadParameter(f"{each!r} is not like spark.KEY=VALUE", ctx, param)
        pairs[key] = value
    return pairs


_DRY_RUN = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
_OPTIONS = (
    json_option,
    click.option("--progress/--no-progress", "shown", default=None, help="By default when a terminal is there."),
    click.option(
        "--metrics-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Write metrics as Prometheus text, atomically, again and again.",
    ),
    click.option("--master", metavar="URL", help="Of Spark; local[*] by default."),
    click.option("--conf", multiple=True, callback=_pairs, metavar="KEY=VALUE", help="A setting of Spark. Repeatable."),
    click.option("--trace", is_flag=True, help="Show the whole traceback of a failure."),
)


def job_options(job: str, *, dry_run: bool = True) -> Callable[[F], F]:
    """Adds what all jobs take; the command gets it as its first argument, a ``Run``.

    Args:
      job: its name.
      dry_run: False for a command that changes nothing anyway.
    """

    def decorated(command: F) -> F:
        @wraps(command)
        def with_run(*args: Any, where: Where, as_json: bool, shown: bool | None, trace: bool, **named: Any) -> Any:
            run = Run(
                job,
                where,
                named.pop("master"),
                named.pop("conf"),
                named.pop("dry_run", False),
                as_json,
                Progress(job, as_json=as_json, shown=shown),
                Metrics(job, named.pop("metrics_file")),
            )
            with _lived(run, trace=trace), _ended_by_sigterm(), extra_installed():
                return command(run, *args, **named)

        found: Any = where_options(with_run)
        for option in reversed((_DRY_RUN, *_OPTIONS) if dry_run else _OPTIONS):
            found = option(found)
        return found  # type: ignore[no-any-return] # it takes what the command takes

    return decorated


@contextmanager
def _lived(run: Run, *, trace: bool) -> Iterator[None]:
    """From the first metrics of a run to its last, whatever happens in between."""
    code: int = Exit.FAILED
    try:
        run.metrics.write()
        yield
        code = Exit.OK
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
        raise
    except Exception as error:
        if trace:
            traceback.print_exc()
        code = error.code if isinstance(error, CommandFailed) else Exit.FAILED
        if isinstance(error, PlainsongError):
            code = exit_of(error)
        elif is_of_spark(error):
            raise failure_of_spark(error) from error
        elif isinstance(error, click.ClickException):
            code = error.exit_code
        elif isinstance(error, OSError):
            raise CommandFailed(f"{error.filename or 'a file'}: {error.strerror or error}") from error
        raise
    finally:
        run.progress.clear()
        run.progress.event("end", exit=int(code))
        run.metrics.end(int(code))
        run.close()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM is like Ctrl-C inside: what systemd and schedulers send lets the run say how it ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(command: click.Command, job: str) -> NoReturn:
    """``python -m pyspark_plainsong.pipeline.JOB``, which is what ``plainsong pipeline run JOB`` starts."""
    sys.exit(run_program(command, sys.argv[1:], f"plainsong pipeline run {job}"))


# --- failures --------------------------------------------------------------------------------------
#
# What went wrong in Spark, in one line: the reason, out of two languages' tracebacks.


#: The last line of a Python traceback; the first of a Java one.
_REASON = re.compile(
    r"^(?:Caused by: )?((?:[\w$]+\.)*[A-Z]\w*(?:Error|Exception|Failed|NotFound|Lost|Warning)): (\S.*)$", re.M
)
#: Classes that only say that something else went wrong.
_WRAPPERS = ("SparkException", "Py4JJavaError", "StreamingQueryException", "PythonException", "AnalysisException")
MAX_CHARS = 600


def reason_of(error: BaseException) -> str:
    """The line that says why: the innermost Python error in the text, else the first line."""
    text = str(error)
    said = [(name.rpartition(".")[2], reason) for name, reason in _REASON.findall(text)]
    inner = [f"{name}: {reason}" for name, reason in said if name not in _WRAPPERS]
    found = inner[0] if inner else next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return one_line(found)[:MAX_CHARS]


def failure_of_spark(error: BaseException) -> CommandFailed:
    """What the program says of an error of Spark's."""
    return CommandFailed(reason_of(error), hint="the whole of it: --trace", code=Exit.FAILED)


def is_of_spark(error: BaseException) -> bool:
    """Whether it comes from pyspark or the JVM behind it."""
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j")
