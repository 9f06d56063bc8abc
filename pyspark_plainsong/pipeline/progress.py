"""Progress of a job, for people on standard error and as JSON on standard output, and the watch over its streaming queries.

How far a job has come: a line on standard error for people, one JSON object a line on standard output for programs.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli.options import show_length
from plainsong.cli.output import echo_json, show_count, show_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql.streaming.query import StreamingQuery

#: The line is written again this often at most; events of programs too.
EVERY_S = 0.25


class Progress:
    """Tells about one run.

    With ``as_json`` everything is an event: ``{"event": …, "job": …, "time": …, …}`` on standard output. Otherwise
    results are lines on standard output, notes and warnings lines on standard error, and ``step`` rewrites one line
    there.

    Args:
      job: its name.
      as_json: for programs.
      shown: whether people see ``step`` and ``note``; None: when standard error is a terminal.
      clock_s: a clock that never goes back.
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
        self._told_s = -EVERY_S
        self._line = ""

    @property
    def is_heard(self) -> bool:
        """Whether anybody gets to see ``step``."""
        return self._as_json or self._shown

    # --- what is rewritten -----------------------------------------------------------------------

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
        """Say how far it has come, if it is time.

        Args:
          rows: done since the run, or this part of it, began (``begin`` starts another part).
          of: of so many, where that is known: a part and a time left are shown.
          what: is being worked on, a topic for example.
          batch: the number of the batch, chunk or range that was finished last.
          lag_s: age of the oldest message that waits.
          last: also when it is not time yet.
          more: fields of the event; not for the line.
        """
        now_s = self._clock_s()
        if now_s - self._told_s < EVERY_S and not last:
            return
        self._told_s = now_s
        spent_s = max(now_s - self._began_s, 1e-9)
        rate = rows / spent_s
        left_s = (of - rows) / rate if of is not None and 0 < rows <= of else None
        if self._as_json:
            told = {"what": what or None, "batch": batch, "rows": rows, "of": of, "rowsPerSecond": round(rate)}
            times = {"seconds": round(spent_s, 3), "secondsLeft": _rounded(left_s), "lagSeconds": _rounded(lag_s)}
            self.event("progress", **told, **times, **more)
        elif self._shown:
            parts = [what] if what else []
            parts += [f"batch {batch}"] if batch is not None else []
            parts += [f"{show_count(rows)} rows" + (f" of {show_count(of)}" if of is not None else "")]
            parts += [show_rate(rate)]
            parts += [f"{show_length(lag_s * 1000)} behind"] if lag_s is not None else []
            parts += [f"{show_length(left_s * 1000)} left"] if left_s is not None else []
            self._rewrite(", ".join(parts))

    def begin(self) -> None:
        """Another part begins: rates and times left count from here."""
        self._began_s = self._clock_s()

    # --- what stays ------------------------------------------------------------------------------

    def event(self, event: str, **fields: Any) -> None:
        """Something for programs; people do not see it. Fields that are None are left out; none hides what all have."""
        assert not {"job", "time"} & fields.keys(), f"{event}: {fields}"
        if self._as_json:
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            told = {name: value for name, value in fields.items() if value is not None}
            echo_json({"event": event, "job": self._job, "time": now, **told})
            sys.stdout.flush()

    def note(self, text: str, event: str = "note", **fields: Any) -> None:
        """Something that a person who watches may want to know."""
        self.clear()
        if self._as_json:
            self.event(event, text=text, **fields)
        elif self._shown:
            click.echo(text, err=True)

    def warn(self, text: str, warning: str, **fields: Any) -> None:
        """Something that wants somebody's attention; always on standard error for people, watching or not.

        Args:
          warning: a word for it, which programs and metrics know it by.
        """
        self.clear()
        if self._as_json:
            self.event("warning", warning=warning, text=text, **fields)
        else:
            click.echo(f"warning: {text}", err=True)

    def result(self, text: str, event: str = "result", **fields: Any) -> None:
        """What the job is run for: lines on standard output, or an event."""
        self.clear()
        if self._as_json:
            self.event(event, **fields)
        else:
            click.echo(text)

    def clear(self) -> None:
        """Take the rewritten line away."""
        if self._line:
            click.echo("\r\x1b[K", err=True, nl=False, color=True)
            self._line = ""

    def _rewrite(self, line: str) -> None:
        self._line = line
        click.echo(f"\r{line}\x1b[K", err=True, nl=False, color=True)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


# --- streams ---------------------------------------------------------------------------------------
#
# A streaming query under way: waited for, and its batches told as they end.


#: How often the query is looked at; its end is noticed at once.
LOOK_S = 1


def watch(
    query: StreamingQuery, on_batch: Callable[[dict[str, Any]], None], *, idle: Callable[[], None] | None = None
) -> None:
    """Wait until the query ends, for ever if it follows.

    Args:
      query: that was started.
      on_batch: called with the progress of each batch that had rows, in their order, as Spark tells it
        (``batchId``, ``numInputRows``, ``durationMs``, ``sources``); those that Spark kept no longer are left out.
      idle: called about every second.
    Raises:
      StreamingQueryException: the query failed. Whatever ``on_batch`` raises; the query is stopped then.
    """
    told = -1
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(LOOK_S))
            for each in query.recentProgress:
                if each["batchId"] > told and each["numInputRows"] > 0:
                    told = each["batchId"]
                    on_batch(dict(each))
            if idle is not None:
                idle()
    finally:
        if query.isActive:
            query.stop()


def watch_all(queries: Sequence[StreamingQuery], *, idle: Callable[[], object]) -> None:
    """Wait until all queries have ended.

    Args:
      idle: called about every second, and at the end.
    Raises:
      StreamingQueryException: one failed; the others are stopped. Whatever ``idle`` raises; all are stopped then.
    """
    try:
        left = list(queries)
        while left:
            left[0].awaitTermination(LOOK_S)  # of one; the others are looked at
            for query in left:
                if not query.isActive:
                    query.awaitTermination()  # raises what it failed of
            left = [query for query in left if query.isActive]
            idle()
    finally:
        for query in queries:
            if query.isActive:
                query.stop()
