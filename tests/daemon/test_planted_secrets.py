"""Secrets are planted everywhere they can be entered, and searched for in all output of the daemon and its commands.

The search is for the middle of each secret, and so also finds one that is cut, decoded or written without its prefix.
"""

from __future__ import annotations

import base64
import http.client
import json
import secrets
import socket
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey

from broker.api.routes import ROUTES
from broker.security.tokens import new_token
from tests.certificates import Authority
from tests.daemon.harness import Daemon, eventually, run_plainsong
from tests.patience import PATIENCE_S
from tests.security import named

GRANTS = """format = 1
[[grant]]
to = ["operator", "oidc:ann"]
verbs = ["all"]
on = ["*:*", "system:*", "service"]
[[grant]]
to = ["thrift"]
verbs = ["operate"]
on = ["service"]
"""
PLACES = {**named.PLACES, "topic": "t"}
CLI = (
    ("doctor", "--ready"),
    ("stats",),
    ("topic", "list"),
    ("cluster", "status"),
    ("audit",),
    ("doctor", "--attention"),
    ("tx", "list"),
    ("doctor",),
    ("doctor", "--check"),
    ("poll", "kept"),
    ("publish", "t", "m"),
    ("definitions", "export", "-"),
)


def _middle(secret):
    """Return the part to search for: long enough to be unique."""
    return secret[8:40] if len(secret) > 48 else secret[4:]


@dataclass
class Planted:
    """The planted secrets by name, and all output by source."""

    found_as: dict[str, str] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)

    def plant(self, what, secret):
        """Register a secret, and return it. A JSON Web Token counts as three."""
        parts = secret.split(".") if secret.startswith("eyJ") else [secret]
        for number, part in enumerate(parts):
            self.found_as[f"{what} {number}" if number else what] = part
        return secret

    def see(self, where, said):
        """Record a source's output."""
        text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        self.seen[where] = self.seen.get(where, "") + "\n" + text

    @property
    def found(self):
        """The secrets that were found, as name, form and source."""
        shapes = {}
        for what, secret in self.found_as.items():
            middle = _middle(secret)
            shapes |= {(what, "as it is"): middle, (what, "in hex"): middle.encode().hex()}
            coded = base64.b64encode(secret.encode()).decode()
            shapes[what, "in base64"] = coded[8:-8]
        return [
            (what, shape, where)
            for (what, shape), text in shapes.items()
            for where, said in self.seen.items()
            if text in said
        ]

    def shown(self):
        """Return the findings, one per line, each with the text before it."""
        lines = []
        for what, shape, where in self.found:
            middle = _middle(self.found_as[what])
            at = self.seen[where].find(middle)
            lines.append(f"{what} {shape} at {where}: {self.seen[where][max(0, at - 80) : at + 8]!r}")
        return "\n".join(lines)


@dataclass
class Site:
    """A daemon with every kind of secret in its files and requests."""

    daemon: Daemon
    folder: Path
    planted: Planted
    tokens: dict[str, str]
    authority: Authority

    def ask(self, where, method, path, *, headers=None, body=b"", as_name="operator"):
        """Send a request over TLS, and record the complete answer."""
        sent = {"Authorization": f"Bearer {self.tokens[as_name]}"} if as_name else {}
        connection = http.client.HTTPSConnection(
            *self.daemon.address, timeout=PATIENCE_S, context=self.authority.trusting()
        )
        try:
            connection.request(method, path, body, sent | {"Content-Type": "application/json"} | (headers or {}))
            answer = connection.getresponse()
            streams = "event-stream" in (answer.getheader("content-type") or "")
            said = answer.read1(4096) if streams else answer.read()
            self.planted.see(where, f"{answer.status} {answer.reason} {answer.getheaders()}")
            self.planted.see(where, said)
            return answer.status, said
        finally:
            connection.close()

    def ask_raw(self, where, data):
        """Send bytes that are not a valid request, and record the answer."""
        raw = socket.create_connection(self.daemon.address, timeout=PATIENCE_S)
        with self.authority.trusting().wrap_socket(raw, server_hostname="127.0.0.1") as connection:
            connection.sendall(data)
            connection.settimeout(2)
            said = b""
            try:
                while piece := connection.recv(65536):
                    said += piece
            except OSError:
                pass
            self.planted.see(where, said)

    def run(self, where, *words, environ=None):
        """Run a command, and record its output."""
        done = run_plainsong(*words, cwd=self.folder, environ=environ, timeout_s=PATIENCE_S)
        self.planted.see(where, done.stdout)
        self.planted.see(where, done.stderr)
        return done


@pytest.fixture(params=[1, 2], ids=["one process", "front ends"])
def site(request, tmp_path):
    planted = Planted()
    authority = Authority(tmp_path)
    pair, clients = authority.issue("server", "localhost"), authority.issue("client", "billing")
    for name, each in (("key of the daemon", pair), ("key of a client", clients)):
        planted.plant(name, "".join(each.key.read_text().splitlines()[1:-1]))
    _private(tmp_path / "secret", planted.plant("secret of the cluster", secrets.token_urlsafe(48)))
    _private(
        tmp_path / "zookeeper", f"digest plainsong:{planted.plant('password of ZooKeeper', secrets.token_urlsafe(24))}"
    )
    _private(tmp_path / "grants.toml", GRANTS)
    made = ["token", "create", "--file", "tokens.json", "--expires", "1d", "--name"]
    tokens = {name: _token(tmp_path, *made, name) for name in ("operator", "revoked")}
    revoke = ("token", "revoke", "--file", "tokens.json", "--name", "revoked", "--yes")
    assert run_plainsong(*revoke, cwd=tmp_path).returncode == 0
    tokens |= {"unknown": new_token(secrets.choice), "typed wrong": new_token(secrets.choice)[:-1] + "!"}
    key = RSAKey.generate_key(2048, {"kid": "rsa"})
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
    claims = {"iss": "https://login.test", "aud": "plainsong", "sub": "ann", "exp": int(time.time()) + 600}
    tokens["of a provider"] = jwt.encode({"alg": "RS256", "kid": "rsa"}, claims, key)
    tokens["of a provider, expired"] = jwt.encode({"alg": "RS256", "kid": "rsa"}, {**claims, "exp": 1000}, key)
    tokens["of a provider, not signed"] = tokens["of a provider"].rpartition(".")[0] + "." + secrets.token_urlsafe(64)
    for name, token in tokens.items():
        planted.plant(f"token {name}", token)
    planted.plant("private key of the provider", key.as_dict(private=True)["d"])
    _private(tmp_path / "token", tokens["operator"])
    settings = {
        "security.authentication": "required",
        "security.tokens_file": tmp_path / "tokens.json",
        "security.grants_file": tmp_path / "grants.toml",
        "security.oidc.issuer": "https://login.test",
        "security.oidc.audience": "plainsong",
        "security.oidc.jwks": tmp_path / "jwks.json",
        "tls.certificate": pair.certificate,
        "tls.key": pair.key,
        "tls.client_ca": authority.file,
        "tls.client_certificates": "optional",
        "cluster.secret_file": tmp_path / "secret",
        "cluster.zookeeper_auth_file": tmp_path / "zookeeper",
        "log.level": "debug",
        "log.access": "true",
        "http.processes": request.param,
    }
    sets = [f"{name}={value}" for name, value in settings.items()]
    # No collector listens there, so the failure to send is logged.
    collector = f"http://ann:{planted.plant('password of the collector', secrets.token_urlsafe(24))}@127.0.0.1:9"
    environ = {"PLAINSONG_OTEL__ENDPOINT": collector}
    # Not forked: the test inspects its command line and environment.
    with Daemon(tmp_path / "data", *sets, environ=environ, forked=False) as daemon:
        made_site = Site(daemon, tmp_path, planted, tokens, authority)
        made_site.settings = [*sets, f"otel.endpoint={collector}"]
        yield made_site


def _private(path, text):
    path.write_text(text)
    path.chmod(0o600)


def _token(folder, *words):
    done = run_plainsong(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def plant_in_messages(site):
    """Plant secrets in payloads and attributes, which only readers may see."""
    payload, attribute = secrets.token_urlsafe(40), secrets.token_urlsafe(40)
    body = {"messages": [{"payload": payload, "attributes": {"note": attribute}}]}
    assert (
        site.ask("a publish", "POST", "/v1/namespaces/ns/topics/kept/publish", body=json.dumps(body).encode())[0] == 200
    )
    for what, secret in (("payload", payload), ("attribute", attribute)):
        site.planted.plant(what, secret)


def plant_in_requests(site):
    """Send credentials where they belong, and everywhere a user might put them by mistake."""
    topic = "/v1/namespaces/ns/topics/t"
    for token in site.tokens.values():
        bearer = {"Authorization": f"Bearer {token}"}
        for where, method, path in (
            ("a poll", "POST", f"{topic}/poll"),
            ("a topic", "GET", topic),
            ("whoami", "GET", "/v1/whoami"),
            ("readyz", "GET", "/readyz"),
            ("an unknown path", "GET", "/v1/nothing"),
        ):
            site.ask(where, method, path, headers=bearer, as_name=None, body=b"{}")
        for where, method, path in (
            ("a query", "GET", f"{topic}?token={token}"),
            ("another query", "GET", f"{topic}?access_token={quote(token)}&x=1"),
            ("an unknown parameter", "GET", f"{topic}/stats?{quote(token)}={quote(token)}"),
            ("a parameter", "GET", f"{topic}/messages?limit={quote(token)}"),
            ("a topic's name", "PUT", f"/v1/namespaces/ns/topics/{quote(token)}"),
            ("a namespace", "GET", f"/v1/namespaces/{quote(token)}/topics"),
            ("a producer", "GET", f"{topic}/producers/{quote(token)}"),
            ("a reader", "GET", f"{topic}/readers/{quote(token)}"),
            ("a transaction", "POST", f"/v1/transactions/{quote(token)}/abort"),
            ("a path", "GET", f"/{quote(token)}"),
            ("an error's path", "GET", f"/errors/{quote(token)}"),
            ("a console's path", "GET", f"/console/{quote(token)}"),
            ("a method", "POST", f"/v1/whoami/{quote(token)}"),
        ):
            site.ask(where, method, path, body=b"{}" if method != "GET" else b"")
        body = json.dumps({token: token, "messages": [token], "startFrom": token, "position": token}).encode()
        for path in ("poll", "store", "offsets", "rollback", "producers"):
            site.ask(f"a body of {path}", "POST", f"{topic}/{path}", body=body)
        site.ask("a body of properties", "PUT", f"{topic}/properties", body=json.dumps({"ttl": token}).encode())
        site.ask("a client's id", "POST", "/v1/transactions", body=json.dumps({"clientId": token}).encode())
        site.ask("a document", "PUT", "/v1/definitions", body=json.dumps({"format": 1, "topics": {token: {}}}).encode())
        headers = ("X-Request-Id", "User-Agent", "Cookie", "Origin", "Referer", "Accept", "Content-Type", "If-Match")
        for header in (*headers, "Last-Event-ID", "Plainsong-Reader", "traceparent", "Host"):
            site.ask(f"header {header}", "POST", f"{topic}/poll", headers={header: token}, body=b"{}")
            site.ask(f"header {header}", "GET", topic, headers={header: token})
        for form in (
            f"Basic {base64.b64encode(f'ann:{token}'.encode()).decode()}",
            token,
            f"Bearer {token} {token}",
            f"Token {token}",
        ):
            site.ask("no bearer", "POST", f"{topic}/poll", headers={"Authorization": form}, as_name=None, body=b"{}")
        site.ask_raw(
            "no request",
            f"{token} / HTTP/1.1\r\nHost: {token}\r\nAuthorization: Bearer {token}\r\n{token}\r\n\r\n".encode(),
        )
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n"
        site.ask_raw(
            "a stream", f"GET {topic}/stream?token={quote(token)} HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\n".encode()
        )
        with socket.create_connection(site.daemon.address, timeout=PATIENCE_S) as plain:
            plain.sendall(
                f"GET /?token={token} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
            )
            site.planted.see("plain HTTP", plain.recv(65536))


def look_at_everything(site):
    """Record everything that the daemon outputs unprompted, and the output of commands."""
    site.daemon.signal(1)
    for route in ROUTES:
        path = route.path
        for place, value in PLACES.items():
            path = path.replace(f"{{{place}}}", value)
        if route.method == "GET" and route.name not in ("get_messages", "follow"):
            site.ask(f"GET {route.path}", "GET", path)
    _, records = site.ask("the audit", "POST", "/v1/namespaces/system/topics/audit/poll", body=b"{}")
    assert b"security.refused" in records
    for process in (site.daemon.pid, *site.daemon.children()):
        site.planted.see("/proc/*/cmdline", Path(f"/proc/{process}/cmdline").read_bytes())
        environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")  # only variables that this test set
        site.planted.see("/proc/*/environ", b"\n".join(each for each in environ if b"OTEL__ENDPOINT=" not in each))
    if "http.processes=1" in site.settings:  # a command gets the same answers from front ends
        _look_by_commands(site)
    site.daemon.stop()
    site.planted.see("the log", "\n".join(site.daemon.lines))
    site.planted.see("standard error", site.daemon.errors)


def _look_by_commands(site):
    host, port = site.daemon.address
    at = ("--url", f"https://{host}:{port}", "--ca-file", str(site.authority.file), "--namespace", "ns")
    for token in ("token", "wrong"):
        _private(site.folder / "wrong", site.tokens["revoked"])
        for words in CLI:
            secretive = token == "token" and words[0] in ("poll", "publish")
            for more in ((), ("--json",)):
                if more and words[0] in ("poll", "publish", "definitions"):
                    continue
                done = site.run(f"plainsong {' '.join(words)}", "-v", *at, "--token-file", token, *words, *more)
                assert done.returncode == 0 or token == "wrong" or (words[0] == "doctor" and "--ready" not in words), (
                    words,
                    done,
                )
                if secretive:  # a reader may see payloads, but stderr must not contain them
                    where = f"plainsong {' '.join(words)}"
                    site.planted.seen[where] = done.stderr
    _look_into_the_bundle(site, at)
    sets = [part for each in site.settings for part in ("--set", each)]
    for words in (("config", "show", *sets), ("config", "check", *sets)):
        assert site.run(" ".join(words[:2]), *words).returncode == 0
    for words in (
        ("token", "list"),
        ("token", "list", "--json"),
        ("token", "check", "token"),
        ("token", "check", "wrong"),
    ):
        site.run(" ".join(words), *words, "--file", "tokens.json")
    site.run("whole tokens file", "token", "prune", "--file", "tokens.json")
    site.planted.see("the tokens file", (site.folder / "tokens.json").read_bytes())
    for words in (("grants", "list"), ("grants", "validate", "grants.toml")):
        site.run(" ".join(words), *words, *(("--file", "grants.toml") if words[1] == "list" else ()))
    environ = {"PLAINSONG_TOKEN": site.tokens["unknown"]}
    site.run("a token in a variable", "-v", "--url", f"https://{host}:{port}", "stats", environ=environ)
    site.run("a URL with a token", "-v", "--url", f"https://{site.tokens['unknown']}@{host}:{port}", "stats")
    site.run("a token as an argument", "token", "check", site.tokens["unknown"], "--file", "tokens.json")


def _look_into_the_bundle(site, at):
    """Record the files of a support bundle, whose recipient must not see a secret."""
    lines = "\n".join(site.daemon.lines)
    (site.folder / "daemon.log").write_text(lines)
    sections = {}
    for each in site.settings:
        name, _, value = each.partition("=")
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append(
            f"{key} = {value if value in ('1', '2', 'true') else json.dumps(value)}"
        )
    tables = [f"[{section}]\n" + "\n".join(keys) for section, keys in sections.items()]
    (site.folder / "plainsong.toml").write_text("\n".join(tables))
    bundle = ("doctor", "--bundle", "facts.tar.gz", "--config", "plainsong.toml", "--log", "daemon.log")
    site.run("the bundle is written", "-v", *at, "--token-file", "token", *bundle)
    with tarfile.open(site.folder / "facts.tar.gz") as files:
        names = files.getnames()
        for name in names:
            site.planted.see(f"{name} of the bundle", files.extractfile(name).read())
    assert len(names) > 3


def test_no_secret_leaks_anywhere(site):
    for topic in ("t", "kept"):
        assert site.ask("a topic", "PUT", f"/v1/namespaces/ns/topics/{topic}", body=b"{}")[0] == 200
    plant_in_messages(site)
    plant_in_requests(site)
    eventually(
        "the audit has refusals",
        lambda: (
            b"security.refused"
            in site.ask("the audit", "POST", "/v1/namespaces/system/topics/audit/poll", body=b"{}")[1]
        ),
    )
    look_at_everything(site)
    # Check that the search finds a secret.
    site.planted.seen["on purpose"] = site.tokens["operator"]
    assert ("token operator", "as it is", "on purpose") in site.planted.found
    del site.planted.seen["on purpose"]
    assert site.planted.found == [], site.planted.shown()
    assert len(site.planted.seen) > 60


@pytest.mark.parametrize("words", [("serve",), ("config", "check"), ("config", "show")])
def test_a_setting_that_is_refused_is_shown_without_the_password_in_its_url(tmp_path, words):
    planted = Planted()
    password = planted.plant("password in a URL", secrets.token_urlsafe(24))
    setting = f"security.oidc.jwks=http://ann:{password}@127.0.0.1:9/keys"
    done = run_plainsong(*words, "--set", setting, cwd=tmp_path)
    assert done.returncode == 2
    assert "http://***@127.0.0.1:9/keys" in done.stderr + done.stdout
    planted.see(" ".join(words), (done.stdout + done.stderr).encode())
    assert planted.found == []
