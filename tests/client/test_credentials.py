"""Tokens, certificates and certificate authorities in both clients: where they are sent, and where they are not."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from plainsong import AsyncClient
from plainsong import Client as ThreadsClient
from plainsong.errors import ConnectFailed, InvalidParameter, Unauthenticated, UnexpectedAnswer
from tests.certificates import Authority
from tests.daemon.harness import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Gate:
    """A server that accepts given tokens and records requests, over HTTPS if it has a context."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.accepted: set[str] = set()
        self.seen: list[tuple[str, str | None]] = []
        self.redirect: str | None = None
        self.keeps_connections = True
        #: Common name of the client's certificate for each request.
        self.shown: list[str] = []
        gate = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                sent = self.headers["Authorization"]
                gate.seen.append((self.path, sent))
                certificate = self.connection.getpeercert() if context is not None else None
                if certificate:
                    gate.shown += [value for ((name, value),) in certificate["subject"] if name == "commonName"]
                self.close_connection = not gate.keeps_connections
                body = b'["t"]'
                if gate.redirect is not None:
                    self.send_response(307)
                    self.send_header("Location", gate.redirect)
                elif (sent or "").removeprefix("Bearer ") in gate.accepted:
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                else:
                    problem = {"status": 401, "code": "unauthenticated", "detail": "no", "outcome": "not-applied"}
                    body = json.dumps(problem).encode()
                    self.send_response(401)
                    self.send_header("Content-Type", "application/problem+json")
                self.send_header("Content-Length", str(len(body)))
                if not gate.keeps_connections:
                    self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def gate() -> Iterator[Gate]:
    opened = Gate()
    yield opened
    opened.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(params=["threads", "asyncio", "trio"])
def topics(request: pytest.FixtureRequest) -> Callable[..., list[list[str]]]:
    """List the topics several times with one client, calling ``between`` after each."""

    def by_threads(url: str, times: int = 1, between: Callable[[], None] = lambda: None, **options: Any):
        found = []
        with ThreadsClient(url, retry=False, **options) as client:
            for _ in range(times):
                found.append(client.topics())
                between()
        return found

    def by_loop(url: str, times: int = 1, between: Callable[[], None] = lambda: None, **options: Any):
        async def ask() -> list[list[str]]:
            found = []
            async with AsyncClient(url, retry=False, **options) as client:
                for _ in range(times):
                    found.append(await client.topics())
                    between()
            return found

        return anyio.run(ask, backend=request.param)

    return by_threads if request.param == "threads" else by_loop


# --- tokens ----------------------------------------------------------------------------------------


def test_a_token_is_sent_as_a_bearer_token(gate, topics, tmp_path):
    gate.accepted.add("psg_one")
    file = tmp_path / "token"
    file.write_text("psg_one\n")
    assert topics(gate.url, token="psg_one") == topics(gate.url, token_file=file) == [["t"]]
    assert {sent for _, sent in gate.seen} == {"Bearer psg_one"}
    with pytest.raises(Unauthenticated):
        topics(gate.url)
    assert gate.seen[-1][1] is None


def test_a_replaced_token_file_is_read_again_once_after_a_401(gate, topics, tmp_path):
    file = tmp_path / "token"
    file.write_text("psg_one")
    gate.accepted.add("psg_one")

    def rotate() -> None:
        gate.accepted = {"psg_two"}
        file.write_text("psg_two")

    assert topics(gate.url, 3, rotate, token_file=file) == [["t"]] * 3
    assert [sent for _, sent in gate.seen] == [f"Bearer psg_{name}" for name in ("one", "one", "two", "two")]
    gate.seen.clear()
    gate.accepted.clear()
    with pytest.raises(Unauthenticated):
        topics(gate.url, token_file=file)
    assert len(gate.seen) == 1  # the file contains no other token


def test_while_the_token_file_is_missing_the_401_is_raised(gate, topics, tmp_path):
    file = tmp_path / "token"
    file.write_text("psg_one")
    with pytest.raises(Unauthenticated):
        topics(gate.url, 2, file.unlink, token_file=file)


@pytest.mark.parametrize("client", [ThreadsClient, AsyncClient])
def test_no_token_is_sent_unencrypted_to_another_machine(client):
    for url in ("http://10.0.0.1:7420", "http://queue.example", "http://[2001:db8::1]", "http://localhost.example"):
        with pytest.raises(InvalidParameter, match="unencrypted") as caught:
            client(["http://127.0.0.1:1", url], token="psg_secret")
        assert "psg_secret" not in str(caught.value)
        client(url, token="psg_secret", insecure=True)
        client(url)
    for url in ("http://127.9.9.9:1", "http://localhost:1", "http://[::1]:1", "https://queue.example", "unix:/a"):
        client(url, token="psg_secret")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"token": "a", "token_file": "/dev/null"}, "both"),
        ({"token": ""}, "one line"),
        ({"token": "two words"}, "one line"),
        ({"token_file": "/nowhere/token"}, "cannot be read"),
        ({"ca_file": "/nowhere/ca"}, "ca_file"),
        ({"certificate": ("/nowhere/c", "/nowhere/k")}, "certificate"),
    ],
)
def test_an_unusable_credential_is_refused_when_the_client_is_made(options, said):
    for client in (ThreadsClient, AsyncClient):
        with pytest.raises(InvalidParameter, match=said):
            client("https://queue.example", **options)


def test_a_client_with_a_token_does_not_follow_to_an_unencrypted_owner_on_another_machine():
    channel = ThreadsClient("http://127.0.0.1:1", token="psg_secret")._channel
    path = "/v1/namespaces/ns/topics/t"
    for address, url in (("10.0.0.1:7420", "http://127.0.0.1:1"), ("127.0.0.2:7420", "http://127.0.0.2:7420")):
        channel.places.remember_owner(path, "http://127.0.0.1:1", {"plainsong-owner": address})
        assert channel.places.where(path) == url


def test_redirects_are_not_followed(gate, topics):
    elsewhere = Gate()
    gate.redirect = f"{elsewhere.url}/v1/namespaces/default/topics"
    with pytest.raises(UnexpectedAnswer):
        topics(gate.url, token="psg_one")
    assert len(gate.seen) == 1
    assert elsewhere.seen == []
    elsewhere.close()


# --- TLS -------------------------------------------------------------------------------------------


def test_the_given_authority_is_trusted_and_no_other(authority, topics, tmp_path):
    pair = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    secured = Gate(context)
    secured.accepted.add("psg_one")
    try:
        assert topics(secured.url, 2, token="psg_one", ca_file=authority.file) == [["t"]] * 2
        (tmp_path / "other").mkdir()
        for options in ({}, {"ca_file": Authority(tmp_path / "other", "other").file}):
            with pytest.raises(ConnectFailed):
                topics(secured.url, token="psg_one", **options)
        assert len(secured.seen) == 2
    finally:
        secured.close()


def test_new_connections_present_a_replaced_certificate(authority, topics, monkeypatch):
    monkeypatch.setattr("plainsong.credentials._LOOK_S", 0.0)
    server, mine = authority.issue("server"), authority.issue("mine", common_name="before")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    secured = Gate(context)
    secured.accepted.add("psg_one")
    secured.keeps_connections = False
    steps = iter(
        [
            lambda: mine.certificate.write_text("half of it"),  # as during its replacement
            lambda: authority.issue("mine", common_name="after"),
            lambda: None,
        ]
    )

    def go_on() -> None:
        next(steps)()

    options = {"token": "psg_one", "ca_file": authority.file, "certificate": tuple(mine)}
    try:
        assert topics(secured.url, 3, go_on, **options) == [["t"]] * 3
        assert secured.shown == ["before", "before", "after"]
    finally:
        secured.close()


@pytest.fixture(scope="module")
def demanding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Authority]]:
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory)
    pair = authority.issue("server")
    values = {"certificate": pair.certificate, "key": pair.key, "client_ca": authority.file}
    sets = [f"tls.{name}={path}" for name, path in values.items()]
    bind = f"127.0.0.1:0,unix:{directory}/s"
    with Daemon(directory / "data", *sets, "tls.client_certificates=required", bind=bind) as daemon:
        yield daemon, authority


def test_a_daemon_that_requires_certificates_gets_one(demanding, topics):
    daemon, authority = demanding
    url = f"https://127.0.0.1:{daemon.address[1]}"
    mine = authority.issue("client")
    assert topics(url, ca_file=authority.file, certificate=tuple(mine)) == [[]]
    with pytest.raises((ConnectFailed, Exception)) as caught:
        topics(url, ca_file=authority.file)
    assert caught.value.outcome != "applied"


def test_the_error_for_an_untrusted_certificate_names_the_option_to_set(demanding, topics):
    daemon, authority = demanding
    with pytest.raises(ConnectFailed, match="its certificate is not trusted: ") as caught:
        topics(f"https://127.0.0.1:{daemon.address[1]}", certificate=tuple(authority.issue("client")))
    assert "--ca-file" in caught.value.hint
    assert "ca_file=" in caught.value.hint
    assert "plainsong serve" not in str(caught.value)


@pytest.mark.parametrize("loop", [None, "asyncio", "trio"])
def test_the_error_of_a_stream_names_an_untrusted_certificate(demanding, loop):
    url = f"https://127.0.0.1:{demanding[0].address[1]}"

    def by_threads() -> None:
        with ThreadsClient(url) as client:
            client.stream("t")

    async def by_loop() -> None:
        async with AsyncClient(url) as client, client.stream("t"):
            pass

    with pytest.raises(ConnectFailed, match="its certificate is not trusted: "):
        by_threads() if loop is None else anyio.run(by_loop, backend=loop)


def test_publishers_streams_and_readers_work_over_tls_and_unix_sockets(demanding):
    daemon, authority = demanding
    tls = {"ca_file": authority.file, "certificate": tuple(authority.issue("client"))}
    places = {f"https://127.0.0.1:{daemon.address[1]}": tls, f"unix:{daemon.data_dir.parent}/s": {}}
    for number, (url, options) in enumerate(places.items()):
        with ThreadsClient(url, **options) as client:
            client.create_topic(f"t{number}")
            client.publish(f"t{number}", b"one")
            with client.stream(f"t{number}") as stream:
                for _ in range(200):
                    stream.publish(b"x" * 1000)
            assert len(list(client.read(f"t{number}"))) == 201

        async def by_loop(url: str = url, options: Any = options, number: int = number) -> int:
            async with AsyncClient(url, **options) as client:
                async with client.stream(f"t{number}") as stream:
                    for _ in range(200):
                        await stream.publish(b"y" * 1000)
                return len([message async for message in client.read(f"t{number}")])

        assert anyio.run(by_loop, backend="trio") == 401
        assert anyio.run(by_loop, backend="asyncio") == 601
