"""nginx and HAProxy in front of the daemon: they terminate TLS, and pass on requests, waits, streams and events."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from plainsong import Client
from tests.certificates import Authority
from tests.daemon.harness import Daemon, eventually
from tests.patience import PATIENCE_S
from tests.ports import free_port

#: The longest wait that the daemon allows; the proxies allow more.
WAIT_MS = 60_000
#: The settings that docs/howto/secure.md requires; all others have their defaults.
NGINX = """
daemon off;
master_process off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    map $http_upgrade $connection_of_upstream {{ default upgrade; "" ""; }}
    server {{
        listen 127.0.0.1:{port} ssl http2;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        client_max_body_size 64m;
        location / {{
            proxy_pass {scheme}://127.0.0.1:{daemon};
            proxy_ssl_trusted_certificate {authority};
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_of_upstream;
            proxy_read_timeout 90s;
            proxy_next_upstream off;
        }}
    }}
}}
"""
HAPROXY = """
global
    maxconn 100
defaults
    mode http
    timeout connect 10s
    timeout client 90s
    timeout server 90s
    timeout tunnel 1h
    retries 0
frontend front
    bind 127.0.0.1:{port} ssl crt {folder}/both.pem alpn h2,http/1.1
    default_backend daemon
backend daemon
    server daemon 127.0.0.1:{daemon} {options}
"""
#: How a proxy connects to the daemon: over plain HTTP or over TLS. Over TLS, HAProxy chooses HTTP/2.
WAYS = ["nginx, plain", "nginx, TLS", "haproxy, plain", "haproxy, TLS"]


class Proxied(NamedTuple):
    """A daemon behind a proxy."""

    url: str
    """The proxy's address."""
    authority: Authority
    """Signed the proxy's certificate."""
    daemon: Daemon

    def client(self) -> Client:
        return Client(self.url, ca_file=str(self.authority.file), deadline_s=PATIENCE_S)


_numbers = count()


@pytest.fixture(scope="module")
def proxied_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Proxied]]:
    """Return a function that starts a daemon behind a proxy, once for each way."""
    with ExitStack() as running:
        started: dict[str, Proxied] = {}

        def start(way: str) -> Proxied:
            if way not in started:
                started[way] = _start(way, tmp_path_factory.mktemp("proxied"), running)
            return started[way]

        yield start


def _start(way: str, folder: Path, running: ExitStack) -> Proxied:
    program, _, inner = way.partition(", ")
    path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        pytest.skip(f"NOT TESTED: the daemon behind {program}, which is not installed")
    authority = Authority(folder)
    pair = authority.issue("server", "localhost")
    by_tls = inner == "TLS"
    sets = [f"tls.certificate={pair.certificate}", f"tls.key={pair.key}"] if by_tls else []
    port = free_port()
    daemon = running.enter_context(Daemon(folder / "data", *sets, f"security.allowed_origins=https://localhost:{port}"))
    (folder / "both.pem").write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    text = (NGINX if program == "nginx" else HAPROXY).format(
        folder=folder,
        port=port,
        daemon=daemon.address[1],
        certificate=pair.certificate,
        key=pair.key,
        authority=authority.file,
        scheme="https" if by_tls else "http",
        options=f"ssl ca-file {authority.file} verifyhost localhost sni str(localhost) alpn h2,http/1.1"
        if by_tls
        else "",
    )
    settings = folder / "settings"
    settings.write_text(text)
    options = ["-c", str(settings)] if program == "nginx" else ["-db", "-f", str(settings)]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen([path, *options], stdout=said, stderr=subprocess.STDOUT)
    running.callback(process.wait, PATIENCE_S)
    running.callback(process.kill)
    proxied = Proxied(f"https://localhost:{port}", authority, daemon)

    def answers() -> bool:
        assert process.poll() is None, (folder / "said").read_text()
        connection = http.client.HTTPSConnection("localhost", port, context=authority.trusting(), timeout=PATIENCE_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    eventually(f"{program} answers", answers)
    return proxied


@pytest.fixture(params=WAYS)
def proxied(request: pytest.FixtureRequest, proxied_by: Callable[[str], Proxied]) -> Proxied:
    return proxied_by(request.param)


@pytest.fixture
def client(proxied: Proxied) -> Iterator[Client]:
    with proxied.client() as client:
        yield client


@pytest.fixture
def topic(client: Client) -> str:
    return client.create_topic(f"topic-{next(_numbers)}").name


def test_messages_of_any_size_are_published_and_polled(client: Client, topic: str):
    payloads = [b"", b"tea", bytes(range(256)) * (16 << 10)]  # the last one has 4 MiB
    client.publish(topic, payloads)
    assert [message.payload for message in client.read(topic)] == payloads


def test_a_poll_that_waits_is_answered_when_a_message_arrives(proxied: Proxied, client: Client, topic: str):
    found: list[bytes] = []

    def wait() -> None:
        with proxied.client() as other:
            found.extend(message.payload for message in other.poll(topic, wait_ms=WAIT_MS))

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually("the poll waits", lambda: client.admin.stats(topic)["parkedPolls"] == 1)
    client.publish(topic, b"tea")
    waiting.join(PATIENCE_S)
    assert found == [b"tea"]


def test_a_stream_of_publishes_is_a_websocket(client: Client, topic: str):
    with client.stream(topic) as stream:
        receipts = [stream.publish(b"%d" % number) for number in range(1000)]
        assert all(receipt.result(PATIENCE_S) for receipt in receipts)
    assert [message.payload for message in client.read(topic)] == [b"%d" % number for number in range(1000)]


def test_server_sent_events_arrive_one_by_one(proxied: Proxied, client: Client, topic: str):
    host, _, port = proxied.url.removeprefix("https://").rpartition(":")
    connection = http.client.HTTPSConnection(host, int(port), context=proxied.authority.trusting(), timeout=PATIENCE_S)
    connection.request("GET", f"/v1/namespaces/default/topics/{topic}/events?from=0")
    answer = connection.getresponse()
    assert answer.status == 200
    for number in range(3):
        client.publish(topic, b"number %d" % number)
        # The next message is published only after this one has been read: the proxy must not hold any back.
        while b"number %d" % number not in answer.readline():
            pass
    connection.close()


def test_events_of_the_service_arrive(client: Client, topic: str):
    with client.admin.events(topic, kinds=["topics"]) as events:
        assert [row["messages"] for row in next(events).data] == [0]
        client.publish(topic, b"tea")
        assert any(row["messages"] == 1 for event in events for row in event.data)


def test_a_request_over_http_2_to_the_proxy_is_served(proxied: Proxied, client: Client, topic: str, tmp_path: Path):
    if (curl := shutil.which("curl")) is None:
        pytest.skip("NOT TESTED: HTTP/2 to a proxy, since curl is not installed")
    client.publish(topic, b"tea")
    command = [curl, "-sS", "--http2", "--cacert", str(proxied.authority.file), "-w", "%{http_version} %{http_code} "]
    command += ["-H", "Content-Type: application/json", "--data-binary", "{}"]
    url = f"{proxied.url}/v1/namespaces/default/topics/{topic}/poll"
    ran = subprocess.run([*command, url], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ran.stdout.endswith("2 200 "), ran.stdout
    assert '"tea"' in ran.stdout


def test_a_page_of_the_proxy_may_make_changes_and_a_page_of_another_site_may_not(proxied: Proxied, topic: str):
    host, _, port = proxied.url.removeprefix("https://").rpartition(":")
    for origin, status in ((proxied.url, 200), ("https://elsewhere.example", 403)):
        connection = http.client.HTTPSConnection(
            host, int(port), context=proxied.authority.trusting(), timeout=PATIENCE_S
        )
        headers = {"Content-Type": "application/json", "Origin": origin}
        connection.request("POST", f"/v1/namespaces/default/topics/{topic}/publish", '{"messages": ["x"]}', headers)
        assert connection.getresponse().status == status
        connection.close()
