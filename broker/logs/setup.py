"""Puts the logs in place for a process, and takes them away again."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from broker.logs.lines import JsonLines, TextLines
from broker.logs.writer import LineWriter

if TYPE_CHECKING:
    from broker.config.front import LogConfig

#: Libraries whose chatter is of no use below a warning.
_QUIET = ("hypercorn", "quart", "asyncio", "hpack")


@dataclass(frozen=True, slots=True)
class LogCounters:
    """Lines that never came out."""

    dropped: int = 0
    """Because too many waited, or at the exit."""
    failed: int = 0
    """Because they could not be made, or the output refused them."""


class Logs:
    """The process's logs: installed on the root logger until ``close``."""

    def __init__(self, config: LogConfig, stream: TextIO | None) -> None:
        self._json = config.format == "json"
        self._stream = stream  # kept, since a stream that nobody holds closes its descriptor
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

    def say(self, text: str, event: str, **fields: object) -> None:
        """Something for whoever started the daemon: ``text`` as it is, or ``event`` with fields where logs are JSON."""
        if self._json:
            record = logging.makeLogRecord({"name": "plainsong", "msg": event, **fields})
            record.levelno, record.levelname = logging.INFO, "INFO"
            self._handler.emit(record)
        else:
            self._handler.writer.put(text)

    def counters(self) -> LogCounters:
        """What was lost so far."""
        return LogCounters(self._handler.writer.dropped, self._handler.writer.failed + self._handler.unmade)

    def close(self, timeout_s: float = 0.5) -> None:
        """Write what waits, for at most ``timeout_s``, and leave the root logger as it was. Idempotent."""
        for logger, level in self._restore:
            logger.setLevel(level)
        self._restore = []
        logging.getLogger().removeHandler(self._handler)
        self._handler.writer.close(timeout_s)


class _Handler(logging.Handler):
    """Makes the line in the caller's context, which knows the request, and leaves it to the writer."""

    def __init__(self, lines: logging.Formatter, descriptor: int | None, queue_lines: int) -> None:
        super().__init__()
        self.setFormatter(lines)
        self.unmade = 0
        self.writer = LineWriter(descriptor, max_lines=queue_lines, gap=self._gap)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a line that cannot be made must not fail what it speaks of
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
    """Install the logs of this process, in place of any before.

    Args:
      config: the section ``log``.
      stream: written to through its file descriptor; None, or a closed one, and every line fails.
    """
    global _current  # noqa: PLW0603 - a process has one root logger, and so one of these
    if _current is not None:
        _current.close()
    _current = Logs(config, stream)
    return _current


def counters() -> LogCounters:
    """What the process's logs lost so far; zeros before ``setup_logs``. For the metrics."""
    return _current.counters() if _current is not None else LogCounters()


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return stream.fileno() if stream is not None else None
    except (OSError, ValueError):
        return None
