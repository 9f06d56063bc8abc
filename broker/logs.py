"""Structured logs that no request ever waits for, and the access log.

    logger.info("topic opened", extra={"topic": "orders:paid"})
      │  the caller's thread formats a line, and puts it into a bounded queue, or drops and counts it
      └─ one daemon thread writes lines to standard output, which may be slow, full or closed

All packages use only the standard library's logging; ``extra`` becomes the fields of the line. The request id and the
process name of a line are context variables, which the listeners set.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TextIO

from plainsong.protocol.cluster import OWNER_HEADER
from plainsong.protocol.masking import masked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from broker.config.sections import LogConfig

#: The ``X-Request-Id`` of the request that this task serves; empty outside of a request.
request_id: ContextVar[str] = ContextVar("request_id", default="")
#: The name of a front end's process, such as ``front-1``; empty in the process that owns the topics.
process: ContextVar[str] = ContextVar("process", default="")


# --- lines -----------------------------------------------------------------------------------------


#: Attributes of every record; any other came from ``extra``.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: Characters that would end a line, or control the reader's terminal: names and ids come from clients.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


class TextLines(logging.Formatter):
    """``2025-01-31T12:00:00.123Z INFO    actors.topic: topic opened  topic=orders:paid  request=4f1c``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end; a traceback follows on indented lines."""
        parts = [f"{_time(record)} {record.levelname:<7} {record.name}: {record.getMessage().translate(_ESCAPES)}"]
        parts += [f"{key}={_shown(value)}" for key, value in _fields(record).items()]
        if request := request_id.get():
            parts.append(f"request={_shown(request)}")
        if name := process.get():
            parts.append(f"process={name}")
        line = "  ".join(parts)
        if trace := _traceback(self, record):
            line += "\n" + "\n".join("    " + part.translate(_ESCAPES) for part in trace.splitlines())
        return line


class JsonLines(logging.Formatter):
    """``{"ts": …, "level": "info", "logger": …, "event": …, "request_id": …, fields…}`` on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object. A field with the name of one of the standard keys gets the suffix ``_``."""
        line: dict[str, Any] = {
            "ts": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if request := request_id.get():
            line["request_id"] = request
        if name := process.get():
            line["process"] = name
        if trace := _traceback(self, record):
            line["traceback"] = trace
        for key, value in _fields(record).items():
            line[f"{key}_" if key in line else key] = value
        return json.dumps(line, ensure_ascii=False, default=str, separators=(",", ":"))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: object) -> str:
    text = str(value).translate(_ESCAPES)
    return json.dumps(text, ensure_ascii=False) if not text or " " in text or '"' in text else text


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    # `exc_info=True` outside of an except block leaves a triple of None.
    return formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


# --- writer ----------------------------------------------------------------------------------------
#
# The output may stall, close or fill up. That affects only the writing thread: callers queue a line or drop it, and the
# process waits for queued lines only for a limited time when it exits.


#: The maximum number of bytes in one write.
_GATHER_BYTES = 64 * 1024


class LineWriter:
    """Writes lines to a file descriptor in the background.

    Args:
      descriptor: the output; None if there is none, so that every line fails.
      max_lines: capacity of the queue.
      gap: returns the line that reports a number of dropped lines.
    """

    def __init__(self, descriptor: int | None, *, max_lines: int, gap: Callable[[int], str]) -> None:
        self.dropped = 0
        self.failed = 0
        self._descriptor = descriptor
        self._max_lines = max_lines
        self._gap = gap
        self._gap_written = 0
        self._torn = False
        self._closed = False
        # A SimpleQueue is reentrant: signal handlers and destructors may log.
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._put = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="plainsong-logs", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue ``line``, or drop and count it. Never waits for the output."""
        with self._put:
            if self._closed or self._lines.qsize() >= self._max_lines:
                self.dropped += 1
            else:
                self._lines.put(line)

    def close(self, timeout_s: float) -> None:
        """Write the queued lines, for at most ``timeout_s``; count the rest as dropped."""
        with self._put:
            if not self._closed:
                self._closed = True
                self._lines.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._put:
                self.dropped += max(0, self._lines.qsize() - 1)

    def _run(self) -> None:
        while (first := self._lines.get()) is not None:
            batch, ended = self._gather(first)
            self._write(batch)
            if ended:
                break
        self._write([])

    def _gather(self, first: str) -> tuple[list[str], bool]:
        batch, size = [first], len(first)
        while size < _GATHER_BYTES:
            try:
                line = self._lines.get_nowait()
            except Empty:
                break
            if line is None:
                return batch, True
            batch.append(line)
            size += len(line)
        return batch, False

    def _write(self, batch: list[str]) -> None:
        missed = self.dropped - self._gap_written
        if missed:
            batch = [self._gap(missed), *batch]
        if not batch:
            return
        # A failed write may have left half a line: start a new one.
        text = ("\n" if self._torn else "") + "\n".join(batch) + "\n"
        try:
            self._write_all(text.encode("utf-8", "backslashreplace"))
        except OSError:
            self.failed += len(batch) - (1 if missed else 0)
        else:
            self._gap_written += missed

    def _write_all(self, data: bytes) -> None:
        if self._descriptor is None:
            raise OSError("there is no output")
        rest = memoryview(data)
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except BlockingIOError:
                # Another process that shares the output has made it non-blocking.
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
                continue
            rest = rest[written:]
            self._torn = bool(rest)


# --- setup -----------------------------------------------------------------------------------------


#: Libraries that log too much below WARNING.
_QUIET = ("hypercorn", "quart", "asyncio", "hpack")


@dataclass(frozen=True, slots=True)
class LogCounters:
    """Lines that were not written."""

    dropped: int = 0
    """Because the queue was full, or the process exited."""
    failed: int = 0
    """Because they could not be formatted, or the output refused them."""


class Logs:
    """The process's logs: installed on the root logger until ``close``."""

    def __init__(self, config: LogConfig, stream: TextIO | None) -> None:
        self._json = config.format == "json"
        self._stream = stream  # kept, since a stream closes its descriptor when it is collected
        self._handler = _Handler(JsonLines() if self._json else TextLines(), _descriptor(stream), config.queue_lines)
        root = logging.getLogger()
        self._restore = [(root, root.level)]
        root.addHandler(self._handler)
        root.setLevel(config.level.upper())
        if root.level > logging.DEBUG:
            for name in _QUIET:
                logger = logging.getLogger(name)
                self._restore.append((logger, logger.level))
                logger.setLevel(max(logging.WARNING, root.level))

    def announce(self, text: str, event: str, **fields: object) -> None:
        """Write ``text`` unchanged, for the person who started the daemon; in JSON logs, ``event`` with the fields."""
        if self._json:
            record = logging.makeLogRecord({"name": "plainsong", "msg": event, **fields})
            record.levelno, record.levelname = logging.INFO, "INFO"
            self._handler.emit(record)
        else:
            self._handler.writer.put(text)

    def counters(self) -> LogCounters:
        """Return the numbers of lines lost so far."""
        return LogCounters(self._handler.writer.dropped, self._handler.writer.failed + self._handler.unmade)

    def close(self, timeout_s: float = 0.5) -> None:
        """Write queued lines, for at most ``timeout_s``, and restore the root logger. Idempotent."""
        for logger, level in self._restore:
            logger.setLevel(level)
        self._restore = []
        logging.getLogger().removeHandler(self._handler)
        self._handler.writer.close(timeout_s)


class _Handler(logging.Handler):
    """Formats lines in the caller's context, which has the request's id, and queues them."""

    def __init__(self, lines: logging.Formatter, descriptor: int | None, queue_lines: int) -> None:
        super().__init__()
        self.setFormatter(lines)
        self.unmade = 0
        self.writer = LineWriter(descriptor, max_lines=queue_lines, gap=self._gap)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = masked(self.format(record))
        except Exception:  # noqa: BLE001 - a line that cannot be formatted must not fail its caller
            self.unmade += 1
        else:
            self.writer.put(line)

    def _gap(self, missed: int) -> str:
        fields = {"name": "broker.logs", "msg": "log lines dropped", "lines": missed}
        record = logging.makeLogRecord(fields)
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return self.format(record)


_current: Logs | None = None


def setup_logs(config: LogConfig, stream: TextIO | None) -> Logs:
    """Install the logs of this process, and remove earlier ones.

    Args:
      config: the section ``log``.
      stream: its file descriptor is the output; if it is None or closed, every line fails.
    """
    global _current  # noqa: PLW0603 - a process has one root logger, and so one of these
    if _current is not None:
        _current.close()
    _current = Logs(config, stream)
    return _current


def counters() -> LogCounters:
    """Return the numbers of lines lost so far, for the metrics; zeros before ``setup_logs``."""
    return _current.counters() if _current is not None else LogCounters()


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return stream.fileno() if stream is not None else None
    except (OSError, ValueError):
        return None


# --- access log ------------------------------------------------------------------------------------


log = logging.getLogger("plainsong.access")


class AccessLog:
    """Writes a line for each answered request, if ``log.access`` is on; the same for all listeners and routes."""

    def __init__(self, *, enabled: bool) -> None:
        #: True if lines are written.
        self.enabled = enabled

    def begin(self, identity: str) -> None:
        """Set the request id of this task's log lines."""
        request_id.set(identity)

    def answered(
        self,
        route: str,
        target: str,
        status: int,
        seconds: float,
        headers: Sequence[tuple[str, str]] = (),
        identity: str | None = None,
    ) -> None:
        """Log an answered request.

        Args:
          target: the topic or path of the request.
          headers: the answer's headers; they may name the owner.
          identity: the request's id; None for the one set for this task.
        """
        if self.enabled:
            fields: dict[str, object] = {
                "route": route,
                "target": target,
                "status": status,
                "ms": round(seconds * 1000, 3),
            }
            for name, value in headers:
                if name == OWNER_HEADER:
                    fields["owner"] = value
            before = None if identity is None else request_id.set(identity)
            log.info("answered", extra=fields)
            if before is not None:
                request_id.reset(before)

    def refused(self, route: str, target: str, status: int, identity: str = "") -> None:
        """Log a request that was refused before its route, because of its credential, Host or Origin."""
        self.answered(route, target, status, 0.0, identity=identity)
