"""Several real instances with a secret and TLS between them, and TLS to clients, HBase and ZooKeeper."""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from plainsong import Client
from plainsong.protocol.link import PREFACE
from tests.certificates import Authority
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ, eventually, free_port
from tests.patience import PATIENCE_S
from tests.tls_proxy import TlsProxy

#: Enough topics for each instance to own some: by chance, an instance owns none in 1 of 60 000 runs.
TOPICS = [f"t{number}" for number in range(30)]
#: Longer than any stall of the machine, which would move topics; a test that kills an instance waits this long.
SESSION_TIMEOUT_S = 10
GRANTS = """format = 1
[[grant]]
to = ["operator"]
verbs = ["all"]
on = ["*:*", "system:*", "service"]
[[grant]]
to = ["clerk"]
verbs = ["publish"]
on = ["shop:t0"]
"""


class Secured:
    """The settings, files and proxies that all instances share."""

    def __init__(self, hbase: Any, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.authority = Authority(folder)
        show = self.authority.issue("proxy")
        mine = self.authority.issue("toProxies", "instance.example")
        self.thrift = stack.enter_context(TlsProxy(hbase.address, show, clients=self.authority))
        self.zookeeper = stack.enter_context(TlsProxy(("127.0.0.1", hbase.zookeeper), show, clients=self.authority))
        (folder / "grants.toml").write_text(GRANTS)
        (folder / "grants.toml").chmod(0o600)
        self.tokens = {name: self._token(name) for name in ("operator", "clerk")}
        self.secret = self.secret_file("secret")
        prefix = "s" + folder.name.replace("-", "_")[-30:] + "_"
        self._shared = {
            "storage.kind": "hbase",
            "storage.min_free_bytes": 0,
            "storage.hbase.thrift": self.thrift.text,
            "storage.hbase.table_prefix": prefix,
            "storage.hbase.tls": "true",
            "storage.hbase.tls_ca": self.authority.file,
            "storage.hbase.tls_certificate": mine.certificate,
            "storage.hbase.tls_key": mine.key,
            "cluster.zookeeper": f"{self.zookeeper.text}/{prefix}",
            "cluster.zookeeper_tls": "true",
            "cluster.zookeeper_ca": self.authority.file,
            "cluster.zookeeper_certificate": mine.certificate,
            "cluster.zookeeper_key": mine.key,
            "cluster.session_timeout_s": SESSION_TIMEOUT_S,
            "security.authentication": "required",
            "security.tokens_file": folder / "tokens.json",
            "security.grants_file": folder / "grants.toml",
            "tls.client_ca": self.authority.file,
        }

    def _token(self, name: str) -> str:
        made = ("token", "create", "--file", "tokens.json", "--expires", "1d", "--name", name)
        done = subprocess.run([PLAINSONG, *made], cwd=self.folder, env=clean_environ(), capture_output=True, check=True)
        return done.stdout.decode().strip()

    def secret_file(self, name: str) -> Path:
        file = self.folder / name
        file.write_text(secrets.token_hex(32) + "\n")
        file.chmod(0o600)
        return file

    def start(self, name: str, secret: Path | None = None) -> Daemon:
        pair, bind = self.authority.issue(name), f"127.0.0.1:{free_port()}"
        own = {
            "cluster.instance": name,
            "cluster.advertise": bind,
            "cluster.secret_file": secret or self.secret,
            "tls.certificate": pair.certificate,
            "tls.key": pair.key,
        }
        sets = [f"{key}={value}" for key, value in (self._shared | own).items()]
        return self.stack.enter_context(Daemon(self.folder / name, *sets, bind=bind))

    def client(self, daemon: Daemon, name: str = "operator") -> Client:
        made = Client(url(daemon), token=self.tokens[name], ca_file=self.authority.file, namespace="shop")
        return self.stack.enter_context(made)

    def ask(
        self, daemon: Daemon, method: str, path: str, body: Any = None, name: str = "operator"
    ) -> tuple[int, Any, str]:
        """Send a request once; return the status, the content, and the owner's address if the request was forwarded."""
        connection = http.client.HTTPSConnection(*daemon.address, timeout=PATIENCE_S, context=self.authority.trusting())
        headers = {"Authorization": f"Bearer {self.tokens[name]}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        value = json.loads(content) if content[:1] in (b"{", b"[") else content.decode()
        return answer.status, value, answer.headers.get("Plainsong-Owner", "")


def url(daemon: Daemon) -> str:
    return "https://{}:{}".format(*daemon.address)


def topic(name: str, rest: str = "") -> str:
    return f"/v1/namespaces/shop/topics/{name}{rest}"


def answered(secured: Secured, *asked: Any) -> tuple[int, Any, str]:
    """Like ``Secured.ask``, repeated while the answer is 503, which a late instance or a missing owner may cause."""
    return eventually("it is answered", lambda: (found := secured.ask(*asked))[0] != 503 and found)


@pytest.fixture(scope="module")
def secured(hbase, tmp_path_factory):
    with ExitStack() as stack:
        found = Secured(hbase, tmp_path_factory.mktemp("secured"), stack)
        found.daemons = [found.start(name) for name in "abc"]
        operator = found.client(found.daemons[0])
        eventually(
            "all three have joined",
            lambda: len(found.ask(found.daemons[0], "GET", "/v1/cluster")[1]["instances"]) == 3,
        )
        for name in TOPICS:
            operator.create_topic(name)
        yield found


def test_publishes_at_any_instance_reach_their_owner_and_are_read_in_one_order_at_all(secured):
    clients = [secured.client(each) for each in secured.daemons]
    for name in TOPICS:
        for number, client in enumerate(clients):
            client.publish(name, f"{name} {number}".encode())
    for name in TOPICS:
        found = [[(each.id, each.payload) for each in client.poll(name)] for client in clients]
        assert found[0] == found[1] == found[2]
        assert [payload for _, payload in found[0]] == [f"{name} {number}".encode() for number in range(3)]

    def passed_on() -> set[str]:
        owners = set()
        for each in secured.daemons:
            for name in TOPICS:
                status, _, owner = answered(secured, each, "POST", topic(name, "/poll"), {})
                assert status == 200
                owners |= {owner} if owner else set()
        return owners

    # On a busy machine an instance may lose its topics to the others for a moment.
    eventually("each instance owns some topics", lambda: len(passed_on()) == 3)
    assert secured.thrift.shown == secured.zookeeper.shown == {"instance.example"}


def test_a_stream_at_any_instance_reaches_the_owner(secured):
    for each in secured.daemons:
        with secured.client(each).stream("t1") as stream:
            tickets = [stream.publish(b"%d" % number) for number in range(200)]
            ids = [ticket.result(60).first_id for ticket in tickets]
        assert sorted(ids) == ids


def test_the_owner_authorizes_names_authenticated_by_another_instance(secured):
    for each in secured.daemons:
        assert answered(secured, each, "POST", topic("t0", "/publish"), {"messages": ["m"]}, "clerk")[0] == 200
        for refused in (topic("t0", "/poll"), topic("t5", "/publish"), topic("none", "/publish")):
            status, said, _ = answered(secured, each, "POST", refused, {"messages": ["m"]}, "clerk")
            assert (status, said["code"]) == (403, "forbidden")


def test_no_instance_talks_unencrypted_or_links_without_the_secret(secured):
    for each in secured.daemons:
        with socket.create_connection(each.address, timeout=PATIENCE_S) as plain:
            plain.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert plain.recv(12) == b"HTTP/1.1 400"
        with (
            socket.create_connection(each.address, timeout=PATIENCE_S) as raw,
            secured.authority.trusting().wrap_socket(raw, server_hostname="127.0.0.1") as link,
        ):
            # Both sides send the preface; the acceptor then sends its nonce and name, and a wrong proof ends the
            # connection.
            link.sendall(PREFACE)
            said = b""
            while len(said) < len(PREFACE) + 33:
                said += link.recv(4096)
            assert said.startswith(PREFACE)
            link.sendall(bytes(32) + b"\x01d" + bytes(32))
            with suppress(ssl.SSLError, ConnectionError):
                assert link.recv(4096) == b""
        each.wait_for_line("a peer could not prove itself")


def test_an_instance_with_another_secret_takes_no_topic_out_of_service(secured):
    stranger = secured.start("d", secured.secret_file("other"))
    stranger.wait_for_line("another cluster.secret_file, nothing is owned")
    with ThreadPoolExecutor(len(TOPICS)) as threads:  # each is answered after two seconds of looking for an owner
        forged = [
            threads.submit(secured.ask, stranger, "POST", topic(name, "/publish"), {"messages": ["forged"]})
            for name in TOPICS
        ]
        for each in forged:
            status, said, owner = each.result()
            assert (status, said["code"], owner) == (503, "no_owner", "")
    for name in TOPICS:
        for each in secured.daemons:
            assert (
                answered(secured, each, "POST", topic(name, "/publish"), {"messages": ["while it is there"]})[0] == 200
            )
    assert answered(secured, secured.daemons[0], "POST", "/v1/transactions", {})[0] == 200
    assert secured.ask(stranger, "GET", "/readyz")[0] == 503
    stranger.kill()
