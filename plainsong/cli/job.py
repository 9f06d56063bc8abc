"""A job: a long-running command that reports its progress, and how it ended, to people and programs.

The jobs of the pipeline on Spark and the daemon's own ``maintain`` share this, and so have the same options, events,
metrics and exit codes; docs/pipeline.md describes them.

    @click.command(cls=Verb)
    @click.argument("topics", nargs=-1)
    @job_options(partial(JobRun, "maintain"))
    def maintain(run: JobRun, topics: tuple[str, ...]) -> None: ...
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from plainsong.cli.command import CommandFailed, Exit, exit_of, json_option
from plainsong.cli.connection import Where, where_options
from plainsong.cli.job_metrics import JobMetrics
from plainsong.cli.options import show_length
from plainsong.cli.output import ProgressLine, echo_json, show_count, show_rate
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.plurals import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from plainsong import Client

F = TypeVar("F", bound="Callable[..., Any]")
#: How long a job waits for a daemon that does not answer; other commands, with a person waiting, fail much sooner.
DEADLINE_S = 60.0


class JobProgress:
    """Reports one run.

    With ``as_json`` it writes JSON objects to standard output, one per line:
    ``{"event": …, "job": …, "time": …, …}``. Otherwise it writes results to standard output, notes and warnings to
    standard error, and ``step`` rewrites one line there.

    Args:
      job: the job's name.
      as_json: write JSON events instead of text.
      shown: whether to print ``step`` and ``note``; None: only if standard error is a terminal.
      clock_s: a monotonic clock.
    """

    def __init__(
        self,
        job: str,
        *,
        as_json: bool = False,
        shown: bool | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._as_json = as_json
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._line = ProgressLine()

    @property
    def is_visible(self) -> bool:
        """True if ``step`` has an audience; otherwise skip computing its figures, which may be costly."""
        return self._as_json or self._shown

    def begin(self) -> None:
        """Start another part of the run: rates and remaining times count from here."""
        self._began_s = self._clock_s()

    def step(
        self,
        rows: int,
        *,
        of: int | None = None,
        what: str = "",
        batch: int | None = None,
        lag_s: float | None = None,
        last: bool = False,
        **more: Any,
    ) -> None:
        """Report how far the run has come, four times a second at most.

        Args:
          rows: done since ``begin``.
          of: the total, if it is known: then the remaining time is shown.
          what: the part of the work in progress, such as a topic.
          batch: the number of the batch, chunk or range that was finished last.
          lag_s: the age of the oldest message that the job has not processed.
          last: report even if the previous report was a moment ago.
          more: further fields of the JSON event; the text does not show them.
        """
        now_s = self._clock_s()
        if not self._line.is_due(now_s, at_once=last):
            return
        spent_s = max(now_s - self._began_s, 1e-9)
        rate = rows / spent_s
        left_s = (of - rows) / rate if of is not None and 0 < rows <= of else None
        if self._as_json:
            done = {"what": what or None, "batch": batch, "rows": rows, "of": of, "rowsPerSecond": round(rate)}
            times = {"seconds": round(spent_s, 3), "secondsLeft": _rounded(left_s), "lagSeconds": _rounded(lag_s)}
            self.event("progress", **done, **times, **more)
        elif self._shown:
            parts = [what] if what else []
            parts += [f"batch {batch}"] if batch is not None else []
            parts += [
                f"{show_count(rows, grouped=True)} {plural('row', rows)}"
                + (f" of {show_count(of, grouped=True)}" if of is not None else "")
            ]
            parts += [show_rate(rate, grouped=True)]
            parts += [f"{show_length(lag_s * 1000)} behind"] if lag_s is not None else []
            parts += [f"{show_length(left_s * 1000)} left"] if left_s is not None else []
            self._line.rewrite(", ".join(parts))

    def event(self, event: str, **fields: Any) -> None:
        """Write a JSON event without the fields that are None; do nothing unless ``as_json``."""
        assert not {"job", "time"} & fields.keys(), f"{event}: {fields}"
        if self._as_json:
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            known = {name: value for name, value in fields.items() if value is not None}
            echo_json({"event": event, "job": self._job, "time": now, **known})
            sys.stdout.flush()

    def note(self, text: str, event: str = "note", **fields: Any) -> None:
        """Report a remark that is shown only while progress is."""
        self.clear()
        if self._as_json:
            self.event(event, text=text, **fields)
        elif self._shown:
            click.echo(text, err=True)

    def warn(self, text: str, warning: str, **fields: Any) -> None:
        """Report a problem that needs attention, even if progress is not shown.

        Args:
          warning: the word that identifies the problem in events and metrics.
        """
        self.clear()
        if self._as_json:
            self.event("warning", warning=warning, text=text, **fields)
        else:
            click.echo(f"warning: {text}", err=True)

    def result(self, text: str, event: str = "result", **fields: Any) -> None:
        """Write the job's result to standard output."""
        self.clear()
        if self._as_json:
            self.event(event, **fields)
        else:
            click.echo(text)

    def clear(self) -> None:
        """Remove the line that ``step`` rewrites."""
        self._line.clear()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


# --- a run -------------------------------------------------------------------------------------------


@dataclass
class JobRun:
    """One run of a job; the job's command gets it as its first argument.

    Args:
      job: the job's name.
      where: the daemon.
    """

    job: str
    where: Where = field(default_factory=Where)
    dry_run: bool = False
    as_json: bool = False
    progress: JobProgress = None  # type: ignore[assignment] # made below, from the job's name
    metrics: JobMetrics = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.progress = self.progress or JobProgress(self.job, as_json=self.as_json)
        self.metrics = self.metrics or JobMetrics(self.job)

    def client(self, *topics: str) -> AbstractContextManager[Client]:
        """A client of the daemon, for a ``with``. If one of ``topics`` is missing, the error names the nearest one."""
        return self.where.client(*topics, retry=True, deadline_s=DEADLINE_S)

    def warn(self, text: str, warning: str, **fields: Any) -> None:
        """Warn, and count the warning in the metrics."""
        self.progress.warn(text, warning, **fields)
        self.metrics.add("warnings_total", warning=warning)

    def failure_of(self, error: Exception) -> CommandFailed | None:
        """Convert an error from a library that only this kind of job uses. None: report it like any other error."""
        del error
        return None

    def close(self) -> None:
        """Release what the run has opened."""


@contextmanager
def reported(run: JobRun, *, trace: bool) -> Iterator[None]:
    """Wrap the work of a run: write the metrics before and after, and report how the run ended.

    Raises:
      CommandFailed: in place of an OSError, and of an error that ``run.failure_of`` converts.
    """
    code: int = Exit.FAILED
    try:
        run.metrics.write()
        yield
        code = Exit.OK
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
        raise
    except Exception as error:
        if _is_interrupt(error):
            code = Exit.INTERRUPTED
            raise KeyboardInterrupt from error
        if trace:
            traceback.print_exc()
        code = error.code if isinstance(error, CommandFailed) else Exit.FAILED
        if isinstance(error, PlainsongError):
            code = exit_of(error)
        elif (failure := run.failure_of(error)) is not None:
            raise failure from error
        elif isinstance(error, click.ClickException):
            code = error.exit_code
        elif isinstance(error, OSError):
            raise CommandFailed(f"{error.filename or 'a file'}: {error.strerror or error}") from error
        raise
    finally:
        run.progress.clear()
        run.progress.event("end", exit=int(code))
        run.metrics.end(int(code))
        # After an interrupt, closing may well fail.
        with suppress(Exception) if code == Exit.INTERRUPTED else nullcontext():
            run.close()


def _is_interrupt(error: BaseException | None) -> bool:
    """True if an error was raised while an interrupt unwound: Spark may fail to stop interrupted work."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Turn SIGTERM, which systemd and schedulers send, into KeyboardInterrupt, so that the run reports how it ended."""
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


# --- options -----------------------------------------------------------------------------------------

_DRY_RUN = click.option("--dry-run", is_flag=True, help="Show what would be done; do nothing.")
_OPTIONS = (
    json_option,
    click.option("--progress/--no-progress", "shown", default=None, help="Show progress; default: on a terminal."),
    click.option(
        "--metrics-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Keep writing metrics to FILE as Prometheus text, atomically.",
    ),
)
_TRACE = click.option("--trace", is_flag=True, help="Show the whole traceback of a failure.")


def job_options(
    make: Callable[..., JobRun], own: Mapping[str, Callable[[F], F]] | None = None, *, dry_run: bool = True
) -> Callable[[F], F]:
    """Add the options that all jobs have; the command gets its run as its first argument.

    Args:
      make: makes the run; it gets the fields after ``job``, and the options in ``own``.
      own: further options of this kind of job, by parameter name.
      dry_run: False for a command that changes nothing anyway.
    """
    own = own or {}

    def decorated(command: F) -> F:
        @wraps(command)
        def with_run(*args: Any, where: Where, as_json: bool, shown: bool | None, trace: bool, **named: Any) -> Any:
            of_run = {name: named.pop(name) for name in own}
            run = make(where=where, dry_run=named.pop("dry_run", False), as_json=as_json, **of_run)
            run.progress = JobProgress(run.job, as_json=as_json, shown=shown)
            run.metrics = JobMetrics(run.job, named.pop("metrics_file"))
            with reported(run, trace=trace), sigterm_interrupts():
                return command(run, *args, **named)

        found: Any = where_options(with_run)
        options = (*((_DRY_RUN,) if dry_run else ()), *_OPTIONS, *own.values(), _TRACE)
        for option in reversed(options):
            found = option(found)
        return found  # type: ignore[no-any-return] # the command with further options

    return decorated
