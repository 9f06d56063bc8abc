"""The load generator detects when a response is complete."""

from __future__ import annotations

import socket

import pytest

from bench.load import Answers


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (b"HTTP/1.1 204 No Content\r\ndate: x\r\n\r\n", 204),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", 304),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab", 200),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 200),
    ],
)
def test_a_response_is_complete_at_its_last_byte(response, status):
    with socket.socket() as unused:
        answers = Answers(unused)
        for at in range(len(response) - 1):
            assert answers.take(response[at : at + 1]) is None
        assert answers.take(response[-1:]) == (status, len(response))
