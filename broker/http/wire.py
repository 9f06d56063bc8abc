"""Answers as bytes of HTTP/1.1: the head of an answer, and the chunks of a stream."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.http.exchange import HttpAnswer

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class _Dates:
    """The ``Date`` header, made once a second."""

    __slots__ = ("_line", "_second")

    def __init__(self) -> None:
        self._second = -1
        self._line = ""

    def line(self) -> str:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._line = f"Date: {formatdate(now, usegmt=True)}\r\nX-Request-Id: "
        return self._line


_dates = _Dates()


def answer_head(answer: HttpAnswer, request_id: str, *, chunks: bool, close: bool) -> bytes:
    """The head of ``answer`` with its empty line. A stream is framed by its length if that
    is known, else by chunks, or by the end of the connection.
    """
    head = f"{_STATUS_LINES[answer.status]}{_dates.line()}{request_id}\r\n"
    if answer.content_type is not None:
        head = f"{head}Content-Type: {answer.content_type}\r\n"
    if answer.headers:
        head += "".join([f"{name}: {value}\r\n" for name, value in answer.headers])
    if isinstance(answer.body, bytes):
        head = f"{head}Content-Length: {len(answer.body)}\r\n"
    elif answer.length is not None:
        head = f"{head}Content-Length: {answer.length}\r\n"
    elif chunks:
        head += "Transfer-Encoding: chunked\r\n"
    return f"{head}Connection: close\r\n\r\n".encode("latin-1") if close else f"{head}\r\n".encode("latin-1")


def chunk(data: bytes) -> bytes:
    """``data``, not empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
