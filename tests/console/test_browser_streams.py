"""A stream of publishes from a page, over TLS, in a real browser, which uses HTTP/2 wherever a server offers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.certificates import Authority
from tests.daemon.harness import Daemon

#: Publishes one message on a stream, and returns the answer, or the stream's close code.
PUBLISH = """
const done = arguments[arguments.length - 1];
const socket = new WebSocket(location.origin.replace("https", "wss") + "/v1/namespaces/ns/topics/t/stream");
socket.binaryType = "arraybuffer";
socket.onopen = () => socket.send(new Uint8Array([0x92, 7, 0x81, 0xa8, ...new TextEncoder().encode("messages"),
                                                  0x91, 0xc4, 2, 0x6d, 0x30]));
socket.onmessage = (event) => { const said = [...new Uint8Array(event.data)]; socket.onclose = null; socket.close();
                                done(said); };
socket.onclose = (event) => done("closed with " + event.code);
"""
PROTOCOL = "return performance.getEntriesByType('navigation')[0].nextHopProtocol"


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Daemon]:
    pair = Authority(tmp_path).issue("server", "localhost")
    with Daemon(tmp_path / "data", f"tls.certificate={pair.certificate}", f"tls.key={pair.key}") as running:
        yield running


@pytest.fixture
def unconcerned(browser: Chrome) -> Iterator[Chrome]:
    """The browser, which accepts any certificate."""
    browser.execute_cdp_cmd("Security.setIgnoreCertificateErrors", {"ignore": True})
    yield browser
    browser.execute_cdp_cmd("Security.setIgnoreCertificateErrors", {"ignore": False})
    browser.get("about:blank")
    browser.get_log("browser")


def test_a_page_opens_a_stream_where_it_was_loaded_over_http_2(secured: Daemon, unconcerned: Chrome) -> None:
    host, port = secured.address
    unconcerned.get(f"https://{host}:{port}/console")
    assert unconcerned.execute_script(PROTOCOL) == "h2"
    made = "const done = arguments[arguments.length - 1];"
    made += "fetch('/v1/namespaces/ns/topics/t', {method: 'PUT'}).then((answer) => done(answer.status))"
    assert unconcerned.execute_async_script(made) == 200
    said = unconcerned.execute_async_script(PUBLISH)
    assert isinstance(said, list), said
    assert said[:4] == [0x93, 7, 0xCC, 200]
