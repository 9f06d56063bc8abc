"""One log record as one line: text for people, or a JSON object for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from broker.logs.context import process, request_id

#: What every record has of its own; whatever else it has came in through ``extra``.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

#: Characters that would end a line, or paint the terminal of whoever reads it. Names and ids come from clients.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


class TextLines(logging.Formatter):
    """``2025-01-31T12:00:00.123Z INFO    actors.topic: topic opened  topic=orders:paid  request=4f1c``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end; a traceback follows on indented lines of its own."""
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
        """The object. Fields never take the place of the five names above; one that would gets a ``_`` after it."""
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
