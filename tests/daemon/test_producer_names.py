"""Any text is a valid producer name, and all routes agree on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
import trio

from tests.broker.listeners import Reader, Reply
from tests.daemon.harness import Daemon

NAMES = [
    "a/b", "/a", "a/", "//", "a//b", "/", ".", "..", "a/../b", " ", " a", "a ", "a+b", "a%2Fb", "%", "?", "#", "a?b=c#d",
    "\x00", "\n", "a\nb\n", "\r\n", "\t", "\x1b[31m", "\x7f", "\u0085", "\u2028", "\ufeff", "ünï", "e\u0301", "\u00e9",
    "\ufffd", "😀", "'\"<>&", "\\", "{producer}", "producers", "a,b;c", "x" * 255, "ü" * 127,
]  # fmt: skip
#: Percent-encoded bytes that are not UTF-8: truncated, lone continuation, overlong, surrogate, out of range.
NOT_UTF_8 = ["%FF", "%C3", "%A9", "a%FFb", "%C0%AF", "%ED%A0%80", "%F4%90%80%80"]
TOPIC = "/v1/namespaces/ns/topics/t"


@pytest.fixture(scope="module", params=[(), ("http.processes=2",)], ids=["alone", "front"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with Daemon(tmp_path_factory.mktemp("names") / "data", *request.param) as running:
        assert call(running.address, "PUT", TOPIC).status == 200
        yield running.address


def call(address: tuple[str, int], method: str, path: str, body: object = None) -> Reply:
    """Send one request with its path unchanged."""

    async def main() -> Reply:
        content = b"" if body is None else json.dumps(body).encode()
        async with await trio.open_tcp_stream(*address) as stream:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            await stream.send_all(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            return await Reader(stream).reply()

    return trio.run(main)


def test_a_producer_of_any_name_is_found_again_at_every_route(address: tuple[str, int]) -> None:
    for name in NAMES:
        path = f"{TOPIC}/producers/{quote(name, safe='')}"
        opened = call(address, "PUT", path)
        assert (opened.status, json.loads(opened.body)["producer"]) == (200, name), opened.body
        epoch = json.loads(opened.body)["epoch"]
        sent = {"messages": ["m"], "producer": name, "producerEpoch": epoch, "sequenceIds": [7]}
        assert call(address, "POST", f"{TOPIC}/publish", sent).status == 200
        shown = json.loads(call(address, "GET", path).body)
        assert (shown["producer"], shown["epoch"], shown["lastSequenceId"]) == (name, epoch, 7)
    listed = json.loads(call(address, "GET", f"{TOPIC}/producers?limit=1000").body)["producers"]
    assert sorted(each["producer"] for each in listed) == sorted(NAMES)
    before = quote(sorted(NAMES, key=str.encode)[-2], safe="")
    after = json.loads(call(address, "GET", f"{TOPIC}/producers?after={before}").body)["producers"]
    assert [each["producer"] for each in after] == sorted(NAMES, key=str.encode)[-1:]
    for left, name in zip(reversed(range(len(NAMES))), NAMES, strict=True):
        assert call(address, "DELETE", f"{TOPIC}/producers/{quote(name, safe='')}").status == 200
        assert json.loads(call(address, "GET", f"{TOPIC}/producers").body)["count"] == left


def test_a_name_that_is_not_utf_8_is_refused_at_every_route(address: tuple[str, int]) -> None:
    for sent in NOT_UTF_8:
        for method in ("PUT", "GET", "DELETE"):
            refused = call(address, method, f"{TOPIC}/producers/{sent}")
            assert (refused.status, refused.code) == (400, "invalid_name"), (method, sent, refused.body)
        assert call(address, "GET", f"{TOPIC}/producers?after={sent}").status == 400
    half = call(address, "POST", f"{TOPIC}/publish", {"messages": ["m"], "producer": "\ud800", "sequenceIds": [1]})
    assert half.status == 400
    assert json.loads(call(address, "GET", f"{TOPIC}/producers").body)["count"] == 0
